"""Start, resume or extend a run: updates, rows, validations, checkpoints."""

import copy
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from normrnn import processes
from normrnn.config import jsonio
from normrnn.config.base import Config, OptimizerConfig
from normrnn.config.jsonio import to_dict
from normrnn.config.registry import task_of
from normrnn.engine.callbacks import LOGS, Callback, Display, require_tensorboard
from normrnn.engine.model import Loss, Sums, derived_seed
from normrnn.engine.ranks import device_of_rank, distributed_loss, process_group, share_statistics
from normrnn.engine.task import StatisticsKind, Task, Tensors, better_kind
from normrnn.errors import UsageError, UserError
from normrnn.ops.native.library import library
from normrnn.runs.environment import named_device, record, set_threads
from normrnn.runs.records import CONFIG, DIVERGED, Note, Row
from normrnn.runs.store import RunDirectory


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; everything done so far is in the checkpoint."""


class Interrupt:
    """While entered, SIGINT and SIGTERM set `requested`; a second one ends the process at once."""

    requested = False
    at_once = False  # whether a request raises Interrupted immediately: while nothing is written

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}  # a signal may come before both handlers are set
        # Only the main thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _request(self, *_: object) -> None:
        self.requested = True
        self.__exit__()
        if self.at_once:
            raise Interrupted


class Diverged(UserError):  # noqa: N818  a result, in a search
    """The loss or its gradient is not a finite number."""

    code = processes.DIVERGED


def train(
    config: Config, out: Path, callbacks: Sequence[Callback] = (), logs: Sequence[str] = ()
) -> None:
    """Train or resume the run in `out` up to the last epoch of `config`; Interrupted if asked to
    stop.

    Callbacks get every row, `logs` are names of files of rows. Processes that were started together
    train the run together; the first of them writes, prints and calls.
    """
    if "tensorboard" in logs:
        require_tensorboard()
    run = RunDirectory(out)
    device = device_of_rank(named_device(config.device))
    with ExitStack() as stack:
        ranks = stack.enter_context(process_group(device))
        say: Callable[[str], None] = print if ranks.first else lambda _: None
        task = task_of(config).open(config)
        if config.data_sha256 not in ("", task.sha256):
            raise UsageError(f"{task.where} is not the data of this config: the data has changed")
        config = replace(task.completed(config), data=task.where, shared_initialisation=True)
        checkpoint = None
        if ranks.first:
            stack.enter_context(run.locked())
            checkpoint = run.read_checkpoint()
            if run.has(CONFIG):
                refuse_changes(run.config(), config, out)
        sha256, checkpoint = ranks.from_first(lambda: (task.sha256, checkpoint))
        if sha256 != task.sha256:
            raise UserError(f"process {ranks.rank} finds other data in {task.where} than the first")

        def open_logs() -> list[Any]:
            return [stack.enter_context(closing(LOGS[name](out))) for name in logs if ranks.first]

        ends = f"{out} is finished: {config.epochs} epoch{'s' * (config.epochs > 1)}."
        if checkpoint and checkpoint["note"]["finished"] >= config.epochs:
            say(f"{ends} A larger --epochs continues it.")
            open_logs()
            return
        say(f"data: {task.source}")
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        set_threads(config.threads)
        torch.manual_seed(config.seed)
        trainer = Trainer(config, task.build(device), run, stack.enter_context(Interrupt()))
        trainer.begin(checkpoint)
        if ranks.first:
            trainer.callbacks = [Display(config, task.updates(0)), *open_logs(), *callbacks]
        library()  # compiled now, so that the first update takes no longer than others
        try:
            trainer.run()
        except Diverged as error:
            if ranks.first:
                run.write(DIVERGED, f"{error}\n".encode())
            raise
        say(ends)


def refuse_changes(old: Config, new: Config, out: Path) -> None:
    """Raise UsageError if the run in `out` cannot be resumed with the new config."""
    same = {"data": old.data, "shared_initialisation": old.shared_initialisation}
    new = replace(new, **same, epochs=min(old.epochs, new.epochs))
    jsonio.refuse_changes(to_dict(old), to_dict(new), out)


class Trainer:
    """Train a task to its last epoch and write the run directory; callbacks get every row."""

    def __init__(self, config: Config, task: Task, run: RunDirectory, interrupt: Interrupt) -> None:
        self.config, self.task, self.run_directory = config, task, run
        self.interrupt, self.ranks, self.device = interrupt, task.ranks, task.device
        self.callbacks: list[Callback] = []
        keeps = config.normalisation.keeps_statistics
        self._pools = self.ranks.size > 1 and config.train.sync_statistics and keeps
        self._loss = self._shared_loss() if self.ranks.size > 1 else task.loss
        self._stops = False  # whether some rank was asked to stop
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(config.optimizer, self.parameters)
        self.progress = Note(to_dict(config))
        # Running statistics of the best model, which may be saved with recalibrated ones.
        self.best_running: Tensors = {}
        self.sums = Sums()

    def run(self) -> None:
        """Train to the end and test the best model."""
        self.task.model.train()
        while self.progress.epoch < self.config.epochs:
            if not self.progress.validation_due:
                self._segment()
            self._validate()
        if self.ranks.first:
            self._test()
        self.save(finished=True)

    def begin(self, checkpoint: dict[str, Any] | None) -> None:
        """Load the checkpoint, if any, and write the files of the run; print why a resumed one is
        not bit-exact."""
        run, processes = self.run_directory, self.ranks.size
        if checkpoint:
            self.load(checkpoint)
        if not self.ranks.first:
            return
        if checkpoint:
            print(f"resuming {run.path} at update {self.progress.updates}")
        else:
            run.metrics.truncate()
        (run.path / DIVERGED).unlink(missing_ok=True)
        text = json.dumps(to_dict(self.config), indent=2, allow_nan=False)
        run.write(CONFIG, f"{text}\n".encode())
        same_kernels = record(run, processes, self.device.type)
        changes = [] if same_kernels else ["different kernels than before"]
        if checkpoint and checkpoint["processes"] != processes:
            changes.append(f"{processes} instead of {checkpoint['processes']} processes")
        if checkpoint and changes:
            print(f"{', '.join(changes)}: resume is not bit-exact")

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        model, metrics = self.task.model, self.run_directory.metrics
        self.progress = progress = Note(**{**checkpoint["note"], "config": to_dict(self.config)})
        try:
            self.best_running = checkpoint["best_running"]
            model.load_state_dict({**checkpoint["model"], **self.best_running})  # checks both
            model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.task.load_state_dict(checkpoint["task"])
            self.sums = Sums(**checkpoint["sums"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, UserError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"the checkpoint does not fit this network or its data: {reason}"
            ) from None
        if self.ranks.first:
            metrics.resume(progress)
            if progress.best_updates:
                self.run_directory.read_model()  # belongs to this run, or UserError
        if progress.finished:
            self.save()  # before the test rows are removed, which it must not refer to then
        if self.ranks.first:
            metrics.truncate()

    def save(self, *, finished: bool = False) -> None:
        """Write a checkpoint; Interrupted on every rank if one was asked to stop.

        A finished run knows the size of metrics.jsonl before its test rows: a run with more epochs
        removes them and equals one that had them from the start.
        """
        progress, metrics = self.progress, self.run_directory.metrics
        payload = {
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "task": self.task.state_dict(),
            "best_running": self.best_running,
            "sums": asdict(self.sums),
            "processes": self.ranks.size,
        }
        if self.ranks.first:
            progress.finished = progress.epoch if finished else 0
            progress.metrics_bytes, progress.metrics_sha256 = metrics.size, metrics.sha256
            progress.resume_bytes = progress.resume_bytes if finished else metrics.size
            self.run_directory.write_checkpoint(payload, progress)
        if not finished and self.ranks.total([float(self.interrupt.requested)])[0]:
            raise Interrupted

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
                sums, self.sums = self.sums, Sums()
                norm = sums.grad_norm / sums.batches
                row = sums.row(self.task.measure)
                self._write({"split": "train", **row, "grad_norm": norm, "lr": lr})
            is_due = progress.updates % config.checkpoint_every == 0
            if progress.index < end and (is_due or self._stops):
                self.save()
        progress.validation_due = True

    def update(self) -> None:
        """Run one update and add its loss to the sums of the next row."""
        start = time.perf_counter()
        progress = self.progress
        # Masks depend on seed, update and rank alone: the same for every norm, and after a resume.
        torch.manual_seed(derived_seed(self.config.seed, progress.updates, self.ranks.rank))
        loss, norm = self.step(progress.epoch, progress.index)
        progress.index += 1
        progress.updates += 1
        figures = loss.total.item(), float(loss.errors or 0), float(self.interrupt.requested)
        total, wrong, stops = self.ranks.total(figures)
        self._stops = stops > 0
        grad_norm = norm.item()
        self._check_finite("loss", total)
        self._check_finite("gradient", grad_norm)
        errors = None if loss.errors is None else int(wrong)
        self.sums.add(total, loss.count, errors, self.task.measure, grad_norm=grad_norm)
        progress.seconds += time.perf_counter() - start

    def step(self, epoch: int, index: int) -> tuple[Loss, Tensor]:
        """Compute loss and gradient of a batch and take a step; return the loss and the gradient's
        norm, without waiting for the device."""
        config = self.config
        half = config.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext():
            loss = self._loss(epoch, index)
        self.optimizer.zero_grad()
        # Gradients are averaged over ranks, but each rank has a share of the sum.
        (loss.objective * self.ranks.size).backward()
        norm = clip_gradients(self.parameters, config.optimizer.clip_norm)
        self.optimizer.step()
        return loss, norm

    def _validate(self) -> None:
        # Saved first: a run stopped in a long validation repeats only the validation.
        self.save()
        progress, model = self.progress, self.task.model
        if self.ranks.first:
            with self._evaluating(model):
                rows, loss = self.task.validate()
            self._check_finite("validation loss", loss)
            for row in rows:
                self._write(row)
            if loss < progress.best_loss:
                progress.best_loss, progress.best_updates = loss, progress.updates
                progress.best_epoch = progress.epoch + 1
                state, buffers = model.state_dict(), dict(model.named_buffers())
                self.best_running = {name: state[name].clone() for name in buffers if name in state}
                self._write_model(model, "running")
        progress.validation_due = False
        if progress.index == self._bounds()[-1]:
            progress.epoch += 1
            progress.index = 0
        self.save()

    def _test(self) -> None:
        """Evaluate the selected model, and save it with the kind of statistics that is better on
        validation data. The checkpoint keeps the running ones, for a run that is extended."""
        model = copy.deepcopy(self.task.model)
        weights, _ = self.run_directory.read_model()
        self.run_directory.load_weights(model, {**weights, **self.best_running})
        with self._evaluating(model):
            models = self.task.population(model)
            rows = self.task.test(models)
        saved = better_kind(rows)
        if saved == "recalibrated":
            self._write_model(models[saved], saved)
        # Test rows belong to the last epoch; `progress` is already at the next.
        for row in rows:
            mark = {"saved": row["statistics"] == saved} if len(models) > 1 else {}
            self._write({**row, **mark}, epoch=self.config.epochs)

    @contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluate on the first rank alone, so without pooling statistics; a request to stop is
        followed at once. An error ends the run."""
        share_statistics(model, sync=False)
        self.interrupt.at_once = True
        yield
        self.interrupt.at_once = False
        share_statistics(model, self._pools)

    def _write_model(self, model: nn.Module, statistics: StatisticsKind) -> None:
        """Write the best model with its statistics, and what identifies its run."""
        progress = self.progress
        metadata = {
            "format": "pt",
            "epoch": str(progress.best_epoch),
            "statistics": statistics,
            "updates": str(progress.best_updates),
            "loss": repr(progress.best_loss),
            "run": progress.run,
            CONFIG: json.dumps(to_dict(self.config)),
            **self.task.metadata,
        }
        progress.model_sha256 = self.run_directory.write_model(model.state_dict(), metadata)

    def _write(self, row: Row, epoch: int | None = None) -> None:
        progress = self.progress
        epoch = progress.epoch + 1 if epoch is None else epoch
        at = {"updates": progress.updates, "epoch": epoch}
        full = {**at, **row, "seconds": round(progress.seconds, 3)}
        if self.ranks.first:
            self.run_directory.metrics.append(full)
        for callback in self.callbacks:
            callback(full)

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise Diverged(f"the {name} is {value} at update {self.progress.updates}")

    def _shared_loss(self) -> Callable[[int, int], Loss]:
        """Return a function for the loss of this rank's share, with gradients of all ranks."""
        task, train, norm = self.task, self.config.train, self.config.normalisation
        if self._pools and not norm.sync:
            raise UsageError(
                f"norm {self.config.norm} cannot pool its statistics over processes:"
                " --train.no-sync-statistics lets each normalise its own part of a batch"
            )
        least = 2 if norm.keeps_statistics and not self._pools else 1
        if train.batch // self.ranks.size < least:
            raise UsageError(
                f"train.batch {train.batch} leaves less than {least} for each of"
                f" {self.ranks.size} processes"
            )
        share_statistics(task.model, self._pools)
        return distributed_loss(task.model, task.loss, self._pools or not norm.keeps_statistics)


def learning_rate(config: OptimizerConfig, epoch: int) -> float:
    """Return the learning rate of an epoch (0-based); it depends on nothing else."""
    return config.lr / config.decay ** max(0, epoch + 1 - config.decay_after)


def build_optimizer(
    config: OptimizerConfig, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimiser of a config."""
    optim = torch.optim
    kinds = {"sgd": optim.SGD, "rmsprop": optim.RMSprop, "adam": optim.Adam, "adamw": optim.AdamW}
    options: dict[str, Any] = {"weight_decay": config.weight_decay}
    if config.name in ("sgd", "rmsprop"):
        options["momentum"] = config.momentum
    return kinds[config.name](parameters, config.lr, foreach=_foreach(parameters), **options)


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients down to the global norm `limit` (0: never); return the norm before that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    foreach = _foreach(parameters)
    norm = torch.nn.utils.get_total_norm(grads, foreach=foreach)
    # Most updates are within the limit: no pass over memory to multiply by 1. Only on a CPU is
    # the norm known without waiting for the device.
    if limit and (norm.device.type != "cpu" or norm > limit):
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=foreach)
    return norm


def _foreach(parameters: list[nn.Parameter]) -> bool | None:
    """Return torch's option `foreach`: its own choice is slow on a CPU."""
    return True if all(p.device.type == "cpu" for p in parameters) else None
