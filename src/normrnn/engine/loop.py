"""The training loop: updates, rows cut by updates, validations, checkpoints, resume."""

import json
import math
import time
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

import torch

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.engine.display import Display, Status
from normrnn.engine.interrupt import Interrupt, Interrupted
from normrnn.engine.schedule import build_optimizer, clip_gradients, learning_rate
from normrnn.engine.task import Loss, Task
from normrnn.errors import UserError
from normrnn.runs.metrics import RowSums
from normrnn.runs.names import CONFIG
from normrnn.runs.rows import Row
from normrnn.runs.store import RunDirectory


class Diverged(UserError):  # noqa: N818  a finding, in a search
    """The loss or its gradient is no finite number any more."""


@dataclass
class Progress:
    """Where a run stands."""

    epoch: int = 0
    """Finished epochs; metrics.jsonl counts the current one from 1."""
    index: int = 0
    """Updates done in this epoch."""
    updates: int = 0
    seconds: float = 0.0
    """Time spent in updates: evaluation and checkpoints are not in it."""
    validation_due: bool = False
    """The last update ended a segment that is not validated yet."""


@dataclass
class Best:
    """The best validation so far."""

    loss: float = math.inf
    epoch: int = 0
    updates: int = 0
    files: list[str] = field(default_factory=list)
    """What the model consists of in the run directory."""


class Trainer:
    """Runs a task to its last epoch, writing the run directory as it goes."""

    def __init__(
        self, config: Config, task: Task, run: RunDirectory, display: Display, interrupt: Interrupt
    ) -> None:
        self.config = config
        self.measure = config.own_measure
        self.task = task
        self.run_directory = run
        self.display = display
        self.interrupt = interrupt
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(config.optimizer, self.parameters)
        self.progress = Progress()
        self.best = Best()
        self.sums = RowSums()
        self.saved_at = 0
        self.metrics_bytes, self.metrics_sha256 = 0, ""
        """How far metrics.jsonl is good, and the hash of it: a resume cuts it there."""

    def run(self) -> None:
        """Train to the end and test the best model."""
        self.task.model.train()
        while self.progress.epoch < self.config.epochs:
            if not self.progress.validation_due:
                self._segment()
            self._validate()
        self._finish()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Go on where the checkpoint was written."""
        metrics = self.run_directory.metrics
        try:
            self.task.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self._check_optimizer()
            self.task.load_state_dict(checkpoint["task"])
            self.progress = Progress(**checkpoint["progress"])
            self.best = Best(**checkpoint["best"])
            self.sums = RowSums(**checkpoint["sums"])
            _set_random_state(checkpoint["random"])
            self.metrics_bytes = checkpoint["metrics_bytes"]
            metrics.check(self.metrics_bytes, checkpoint.get("metrics_sha256"))
            self.metrics_sha256 = metrics.sha256()
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"the checkpoint does not fit this network or text: {reason}") from None
        if checkpoint["finished"]:
            # It vouches for test rows, which go now: first there must be one that does not.
            self._write_checkpoint(finished=0)
        metrics.cut(self.metrics_bytes)
        self.saved_at = self.progress.updates

    def save(self, *, finished: bool = False) -> None:
        """Write a checkpoint.

        A finished run keeps the size of metrics.jsonl from before its test rows, so that an
        extension cuts them off and goes on as if it had been asked for from the start.
        """
        metrics = self.run_directory.metrics
        if not finished:
            self.metrics_bytes, self.metrics_sha256 = metrics.size(), metrics.sha256()
        self._write_checkpoint(self.progress.epoch if finished else 0)
        self.saved_at = self.progress.updates

    def _write_checkpoint(self, finished: int) -> None:
        metrics = self.run_directory.metrics
        payload = {
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "task": self.task.state_dict(),
            "files": {name: sha256(c).hexdigest() for name, c in self.task.files.items()},
            "progress": asdict(self.progress),
            "best": asdict(self.best),
            "sums": self.sums.to_dict(),
            "random": _random_state(),
            "metrics_bytes": self.metrics_bytes,
            "metrics_sha256": self.metrics_sha256,
            "finished": finished,
        }
        written = self.metrics_bytes, self.metrics_sha256
        if finished:
            written = metrics.size(), metrics.sha256()
        self.run_directory.write_checkpoint(payload, self.config, written)

    def _check_optimizer(self) -> None:
        """torch takes a momentum of any size, and fails at the next step."""
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(f"{name} of the optimizer has another size")

    def _bounds(self) -> list[int]:
        """Updates at which the segments of this epoch end; the last is the epoch's end."""
        n, parts = self.task.updates(self.progress.epoch), self.config.train.segments
        return sorted({n * (i + 1) // parts for i in range(parts)} - {0})

    def _segment(self) -> None:
        progress, config = self.progress, self.config.train
        bounds = self._bounds()
        end = next(b for b in bounds if b > progress.index)
        if progress.index == 0 or progress.index in bounds:
            self.task.reset()
        lr = learning_rate(self.config.optimizer, progress.epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        while progress.index < end:
            self.update(lr)
            if progress.index % config.log_every == 0 or progress.index == end:
                self._write({"split": "train", **self.sums.row(), "lr": lr})
                self.sums = RowSums()
            if progress.index < end and (
                progress.updates % config.checkpoint_every == 0 or self.interrupt.requested
            ):
                self.save()
                self._stop_if_asked()
        progress.validation_due = True

    def update(self, lr: float) -> None:
        """One batch: loss, gradient, step."""
        start = time.perf_counter()
        progress = self.progress
        loss = self.task.loss(progress.epoch, progress.index)
        nats = loss.nats.item()
        self._check_finite("loss", nats)
        by_time = self.config.optimizer.loss == "sum_over_time"
        self.optimizer.zero_grad()
        (loss.nats / (loss.sequences if by_time else loss.count)).backward()
        norm = clip_gradients(self.parameters, self.config.optimizer.clip_norm)
        self._check_finite("gradient", norm)
        self.optimizer.step()
        self.sums.add(nats, loss.count, norm, loss.errors)
        progress.index += 1
        progress.updates += 1
        progress.seconds += time.perf_counter() - start
        self.display.update(self._status(nats, loss, lr))

    def _validate(self) -> None:
        # Saved first: a run stopped in a long validation repeats only that.
        self.save()
        self._stop_if_asked()
        progress = self.progress
        validation = self.task.validate(self.interrupt.poll)
        self._check_finite("validation loss", validation.loss)
        for row in validation.rows:
            self._write(row)
        if validation.loss < self.best.loss:
            files = sorted(validation.files)
            self.best = Best(validation.loss, progress.epoch + 1, progress.updates, files)
            metadata = {"format": "pt", "epoch": str(self.best.epoch)}
            metadata |= {"updates": str(self.best.updates), "loss": repr(self.best.loss)}
            metadata[CONFIG] = json.dumps(to_dict(self.config))
            for name, content in self.task.files.items():
                metadata[name] = sha256(content).hexdigest()  # what the weights belong to
            for name in files:
                self.run_directory.write_tensors(name, validation.files[name], metadata)
        progress.validation_due = False
        if progress.index == self._bounds()[-1]:
            progress.epoch += 1
            progress.index = 0
        self.save()
        self._stop_if_asked()

    def _finish(self) -> None:
        run = self.run_directory
        best = {name: run.read_tensors(name) for name in self.best.files}
        rows = self.task.test(best, self.interrupt.poll)
        # The test belongs to the last epoch; `progress` already stands before the next.
        for row in rows:
            self._write(row, epoch=self.config.epochs)
        self.save(finished=True)

    def _write(self, row: Row, epoch: int | None = None) -> None:
        progress = self.progress
        epoch = progress.epoch + 1 if epoch is None else epoch
        at = {"updates": progress.updates, "epoch": epoch}
        full = {**at, **self.measure.row(row), "seconds": round(progress.seconds, 3)}
        self.run_directory.metrics.append(full)
        self.display.row(full)

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            at = self.progress.updates + (what != "validation loss")
            kept = f"the checkpoint of update {self.saved_at} is kept" if self.saved_at else ""
            raise Diverged(f"the {what} is {value} at update {at}; {kept or 'nothing was saved'}")

    def _stop_if_asked(self) -> None:
        if self.interrupt.requested:
            raise Interrupted

    def _status(self, nats: float, loss: Loss, lr: float) -> Status:
        progress = self.progress
        return Status(
            epoch=progress.epoch + 1,
            updates=progress.updates,
            seconds=progress.seconds,
            index=progress.index,
            epoch_updates=self.task.updates(progress.epoch),
            loss=nats / loss.count,
            count=loss.count,
            lr=lr,
            fer=None if loss.errors is None else loss.errors / loss.count,
        )


def _random_state() -> dict[str, Any]:
    """Dropout draws from these generators; nothing else does."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
