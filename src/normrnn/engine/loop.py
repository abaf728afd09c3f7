"""The training loop: updates, rows cut by updates, validations, checkpoints, resume."""

import copy
import json
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.config.base import Config
from normrnn.config.jsonio import from_dict, to_dict
from normrnn.engine.callbacks import Callback
from normrnn.engine.display import Display, Status
from normrnn.engine.interrupt import Interrupt, Interrupted
from normrnn.engine.model import derived_seed
from normrnn.engine.ranks import (
    current,
    distributed,
    share_statistics,
    sharing_statistics,
)
from normrnn.engine.schedule import build_optimizer, clip_gradients, learning_rate
from normrnn.engine.statistics import (
    StatisticsKind,
    Tensors,
    better_kind,
    both_kinds,
    set_statistics,
    statistics_fit,
    statistics_of,
    using,
)
from normrnn.engine.sums import Sums
from normrnn.engine.task import Loss, Task
from normrnn.errors import UsageError, UserError
from normrnn.runs.names import CONFIG
from normrnn.runs.note import Note
from normrnn.runs.rows import Row
from normrnn.runs.store import RunDirectory


class Diverged(UserError):  # noqa: N818  a result, in a search
    """The loss or its gradient is not a finite number."""


@dataclass
class Progress:
    """Position of a run."""

    epoch: int = 0
    """Finished epochs; metrics.jsonl counts the current one from 1."""
    index: int = 0
    """Updates done in this epoch."""
    updates: int = 0
    seconds: float = 0.0
    """Time spent in updates, without evaluation and checkpoints."""
    validation_due: bool = False
    """Whether the last update ended a segment that is not validated yet."""


@dataclass
class Best:
    """The best validation so far."""

    loss: float = math.inf
    epoch: int = 0
    updates: int = 0


@dataclass(frozen=True)
class _Done:
    """An update whose figures are still on the device."""

    number: int
    loss: Loss
    norm: Tensor


class Trainer:
    """Train a task to its last epoch and write the run directory."""

    def __init__(
        self,
        config: Config,
        task: Task,
        run: RunDirectory,
        display: Display,
        interrupt: Interrupt,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config = config
        self.measure = config.loss_measure
        self.task = task
        self.run_directory = run
        self.display = display
        self.interrupt = interrupt
        self.callbacks = callbacks
        self.device = next(task.model.parameters()).device
        self.ranks = current()
        self._loss = self._shared_loss() if self.ranks.size > 1 else task.loss
        self._agreed = False
        """Whether some rank was asked to stop."""
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(config.optimizer, self.parameters)
        self.progress = Progress()
        self.best = Best()
        self.best_running: Tensors = {}
        """Running statistics of the best model, once it was saved with recalibrated ones."""
        self.sums = Sums()
        self._unread: deque[_Done] = deque()
        self._status: Status | None = None
        self.saved_at = 0
        self.run_id = secrets.token_hex(16)
        self.model_sha256 = ""
        """Checksum of the best model, as it was written last."""
        self.metrics_bytes, self.metrics_sha256 = 0, ""
        """Size and hash of metrics.jsonl at the checkpoint: a resume truncates it there."""

    def run(self) -> None:
        """Train to the end and test the best model."""
        self.task.model.train()
        while self.progress.epoch < self.config.epochs:
            if not self.progress.validation_due:
                self._segment()
            self._validate()
        self._finish()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        metrics = self.run_directory.metrics
        try:
            self.task.model.load_state_dict(checkpoint["model"])
            self._load_optimizer(checkpoint["optimizer"])
            self.task.load_state_dict(checkpoint["task"])
            self.progress = self._checked(from_dict(Progress, checkpoint["progress"]))
            self.best = from_dict(Best, checkpoint["best"])
            self.best_running = dict(checkpoint["best_running"])
            if not statistics_fit(self.task.model, self.best_running):
                raise ValueError("statistics of another network")
            self.sums = from_dict(Sums, checkpoint["sums"])
            self.run_id, self.model_sha256 = checkpoint["run"], checkpoint["model_sha256"]
            self.metrics_bytes = int(checkpoint["metrics_bytes"])
            self.metrics_sha256 = str(checkpoint["metrics_sha256"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, UserError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"the checkpoint does not fit this network or its data: {reason}"
            ) from None
        if self.ranks.first:
            metrics.check(self.metrics_bytes, self.metrics_sha256)
            if self.best.updates:
                self.run_directory.read_model()  # belongs to this run, or UserError
        if checkpoint["finished"]:
            # The test rows are removed now, so the checkpoint must not refer to them.
            self._write_checkpoint(finished=0)
        if self.ranks.first:
            metrics.cut(self.metrics_bytes)
        self.saved_at = self.progress.updates

    def _note(self, finished: int) -> Note:
        """Return what identifies the files of the run."""
        size, sha256 = self.metrics_bytes, self.metrics_sha256
        if finished:
            metrics = self.run_directory.metrics
            size, sha256 = metrics.size(), metrics.sha256()
        return Note(
            config=to_dict(self.config),
            run=self.run_id,
            updates=self.progress.updates,
            best=self.best.updates,
            model_sha256=self.model_sha256,
            finished=finished,
            metrics_bytes=size,
            metrics_sha256=sha256,
        )

    def save(self, *, finished: bool = False) -> None:
        """Write a checkpoint.

        A finished run keeps the size of metrics.jsonl before its test rows, so that a run with
        more epochs removes them and equals one that had them from the start.
        """
        metrics = self.run_directory.metrics
        if not finished and self.ranks.first:
            self.metrics_bytes, self.metrics_sha256 = metrics.size(), metrics.sha256()
        self._write_checkpoint(self.progress.epoch if finished else 0)
        self.saved_at = self.progress.updates

    def _write_checkpoint(self, finished: int) -> None:
        payload = {
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "task": self.task.state_dict(),
            "progress": asdict(self.progress),
            "best": asdict(self.best),
            "best_running": self.best_running,
            "sums": asdict(self.sums),
            "processes": self.ranks.size,
            "run": self.run_id,
            "model_sha256": self.model_sha256,
            "metrics_bytes": self.metrics_bytes,
            "metrics_sha256": self.metrics_sha256,
            "finished": finished,
        }
        if self.ranks.first:
            self.run_directory.write_checkpoint(payload, self._note(finished))

    def _checked(self, progress: Progress) -> Progress:
        """Return a position; ValueError if no run of this config can be there."""
        epoch, index = progress.epoch, progress.index
        last = self.task.updates(epoch) if 0 <= epoch <= self.config.epochs else -1
        due = last if progress.validation_due else last - 1
        if not 0 <= index <= due or progress.updates < 0:
            raise ValueError(f"it stands at update {index} of {last} in epoch {epoch + 1}")
        return progress

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Load the optimiser's state; ValueError if it does not fit, which torch does not check."""
        self.optimizer.load_state_dict(state)
        for parameter, state in self.optimizer.state.items():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(f"{name} of the optimizer has another size")

    def _bounds(self) -> list[int]:
        """Return the updates at which the segments of this epoch end."""
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
            self.update()
            if progress.index % config.log_every == 0 or progress.index == end:
                self._read()
                sums, self.sums = self.sums, Sums()
                norm = sums.grad_norm / sums.batches
                row = {"split": "train", **sums.row(self.measure), "grad_norm": norm, "lr": lr}
                self._write(row)
            if progress.index < end and (
                progress.updates % config.checkpoint_every == 0 or self._to_stop
            ):
                self._read()
                self.save()
                self._stop_if_asked()
        progress.validation_due = True

    def update(self) -> None:
        """Run one update and read its figures; on a GPU those of the update before."""
        start = time.perf_counter()
        progress = self.progress
        # Masks depend on seed, update and rank alone: the same for every norm, and after a resume.
        torch.manual_seed(derived_seed(self.config.seed, progress.updates, self.ranks.rank))
        loss, norm = self.step(progress.epoch, progress.index)
        progress.index += 1
        progress.updates += 1
        self._unread.append(_Done(progress.updates, loss, norm))
        self._read(keep=0 if self.device.type == "cpu" else 1)
        progress.seconds += time.perf_counter() - start
        if self._status is not None:
            self.display.update(replace(self._status, seconds=progress.seconds))

    def step(self, epoch: int, index: int) -> tuple[Loss, Tensor]:
        """Compute loss and gradient of a batch and take a step; return the loss and the gradient's
        norm, without waiting for the device."""
        config = self.config
        half = config.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext():
            loss = self._loss(epoch, index)
        by_time = config.optimizer.loss == "sum_over_time"
        self.optimizer.zero_grad()
        # Gradients are averaged over ranks, but each rank has a share of the sum.
        parts = loss.sequences if by_time else loss.count
        (loss.differentiable * self.ranks.size / parts).backward()
        norm = clip_gradients(self.parameters, config.optimizer.clip_norm)
        self.optimizer.step()
        return loss, norm

    def _read(self, keep: int = 0) -> None:
        """Read the figures of all updates but the last `keep` from the device."""
        while len(self._unread) > keep:
            done = self._unread.popleft()
            loss = done.loss
            total, norm = loss.total.item(), done.norm.item()
            errors = None if loss.errors is None else int(loss.errors)
            if self.ranks.size > 1:
                figures = total, float(errors or 0), float(self.interrupt.requested)
                total, wrong, stops = self.ranks.total(figures)
                errors, self._agreed = None if errors is None else int(wrong), stops > 0
            self._check_finite("loss", total, done.number)
            self._check_finite("gradient", norm, done.number)
            self.sums.add(total, loss.count, errors, self.measure, grad_norm=norm)
            self._status = self._status_of(total, loss.count, errors)

    def _validate(self) -> None:
        # Saved first: a run stopped in a long validation repeats only the validation.
        self.save()
        self._stop_if_asked()
        progress = self.progress
        self.ranks.same_buffers(self.task.model)
        with self._evaluating():
            rows, loss = self.task.validate(self.interrupt.poll)
        self._check_finite("validation loss", loss, progress.updates)
        for row in rows:
            self._write(row)
        if loss < self.best.loss:
            self.best = Best(loss, progress.epoch + 1, progress.updates)
            self.best_running = {}
            self._write_model(self.task.model, "running")
        progress.validation_due = False
        if progress.index == self._bounds()[-1]:
            progress.epoch += 1
            progress.index = 0
        self.save()
        self._stop_if_asked()

    def _write_model(self, model: nn.Module, statistics: StatisticsKind) -> None:
        """Write the best model with its statistics, and what identifies its run."""
        if not self.ranks.first:
            return
        metadata = {"format": "pt", "epoch": str(self.best.epoch), "statistics": statistics}
        metadata |= {"updates": str(self.best.updates), "loss": repr(self.best.loss)}
        metadata |= {"run": self.run_id, CONFIG: json.dumps(to_dict(self.config))}
        metadata |= self.task.metadata
        self.model_sha256 = self.run_directory.write_model(model.state_dict(), metadata)

    def _finish(self) -> None:
        """Evaluate the selected model, and save it with the kind of statistics that is better on
        validation data."""
        model = copy.deepcopy(self.task.model)
        weights = self.ranks.from_first(lambda: self.run_directory.read_model()[0])
        self.run_directory.fill(model, weights)
        set_statistics(model, self.best_running)
        poll = self.interrupt.poll
        with self._evaluating():
            population = self.task.population(model, poll)
            rows = self.task.test(model, both_kinds(population), poll)
        saved = better_kind(rows)
        if saved == "recalibrated":
            # The checkpoint keeps the others: a run that is killed or extended needs both.
            self.best_running = statistics_of(model)
            self.save()
            with using(model, population):
                self._write_model(model, saved)
        # Test rows belong to the last epoch; `progress` is already at the next.
        for row in rows:
            mark = {"saved": row["statistics"] == saved} if population else {}
            self._write({**row, **mark}, epoch=self.config.epochs)
        self.save(finished=True)

    def _write(self, row: Row, epoch: int | None = None) -> None:
        progress = self.progress
        epoch = progress.epoch + 1 if epoch is None else epoch
        at = {"updates": progress.updates, "epoch": epoch}
        full = {**at, **self.measure.row(row), "seconds": round(progress.seconds, 3)}
        if self.ranks.first:
            self.run_directory.metrics.append(full)
        self.display.row(full)
        for callback in self.callbacks:
            callback(full)

    def _check_finite(self, what: str, value: float, at: int) -> None:
        if not math.isfinite(value):
            kept = f"the checkpoint of update {self.saved_at} is kept" if self.saved_at else ""
            raise Diverged(f"the {what} is {value} at update {at}; {kept or 'nothing was saved'}")

    @property
    def _to_stop(self) -> bool:
        """Whether to stop; the same on every rank, because they save together."""
        return self.interrupt.requested if self.ranks.size == 1 else self._agreed

    def _stop_if_asked(self) -> None:
        if self.ranks.any(self.interrupt.requested):
            raise Interrupted

    def _shared_loss(self) -> Callable[[int, int], Loss]:
        """Return a function for the loss of this rank's share, with gradients of all ranks."""
        task, train, norm = self.task, self.config.train, self.config.normalisation
        pooled = train.sync_statistics and norm.keeps_statistics
        if pooled and not norm.sync:
            raise UsageError(
                f"norm {self.config.norm} cannot pool its statistics over processes:"
                " --train.no-sync-statistics lets each normalise its own part of a batch"
            )
        least = 2 if norm.keeps_statistics and not pooled else 1
        if train.batch // self.ranks.size < least:
            raise UsageError(
                f"train.batch {train.batch} leaves less than {least} for each of"
                f" {self.ranks.size} processes"
            )
        share_statistics(task.model, pooled)
        return distributed(task.model, task.loss, pooled or not norm.keeps_statistics)

    def _evaluating(self) -> AbstractContextManager[None]:
        """Pool statistics over ranks: evaluations normalise whole batches."""
        if self.ranks.size == 1 or not self.config.normalisation.sync:
            return nullcontext()
        return sharing_statistics(self.task.model)

    def _status_of(self, total: float, count: int, errors: int | None) -> Status:
        progress = self.progress
        return Status(
            epoch=progress.epoch + 1,
            updates=progress.updates,
            seconds=progress.seconds,
            index=progress.index,
            epoch_updates=self.task.updates(progress.epoch),
            loss=total / count,
            count=count,
            lr=self.optimizer.param_groups[0]["lr"],
            error_rate=None if errors is None else errors / count,
        )
