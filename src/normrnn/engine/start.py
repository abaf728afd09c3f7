"""Start, resume or extend a run."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from normrnn.config.base import Config
from normrnn.config.jsonio import from_dict, to_dict
from normrnn.config.measure import Measure
from normrnn.config.registry import task_of
from normrnn.engine.callbacks import Callback
from normrnn.engine.display import Display
from normrnn.engine.interrupt import Interrupt
from normrnn.engine.loop import Diverged, Trainer
from normrnn.engine.ranks import Ranks, current, device_of_rank, together
from normrnn.engine.task import Task
from normrnn.errors import UsageError, UserError
from normrnn.ops.native.library import library
from normrnn.runs.environment import named_device, record, set_threads
from normrnn.runs.names import CHECKPOINT, CONFIG, DIVERGED, MODEL
from normrnn.runs.note import changed_fields
from normrnn.runs.store import RunDirectory


def train(
    config: Config,
    out: Path,
    display: Callable[[int, Measure], Display] = Display,
    say: Callable[[str], None] = print,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train or resume the run in `out` up to the last epoch of `config`.

    `display` is called with the number of epochs and the measure, `callbacks` with every row.
    Processes that were started together train the run together; the first of them writes, prints
    and calls.
    """
    device = device_of_rank(named_device(config.device))
    with together(device) as ranks:
        if not ranks.first:
            display, say, callbacks = Display, lambda _: None, ()
        _train(config, RunDirectory(out), device, display, say, callbacks, ranks)


def _train(
    config: Config,
    run: RunDirectory,
    device: torch.device,
    display: Callable[[int, Measure], Display],
    say: Callable[[str], None],
    callbacks: Sequence[Callback],
    ranks: Ranks,
) -> None:
    out = run.path
    task = open_experiment(config)
    if ranks.from_first(lambda: task.sha256) != task.sha256:
        raise UserError(f"process {ranks.rank} finds other data in {config.data} than the first")
    config = dataclasses.replace(
        task.completed(config), data=task.where, shared_initialisation=True
    )
    if ranks.first:
        run.create()
    with run.locked() if ranks.first else nullcontext():
        values, checkpoint = ranks.from_first(lambda: _checkpoint(config, run))
        config = from_dict(type(config), values)
        if checkpoint and checkpoint["finished"] >= config.epochs:
            say(f"{out} is finished: {_epochs(config)}. A larger --epochs continues it.")
            return
        say(f"data: {task.source}")
        set_threads(config.threads)
        torch.manual_seed(config.seed)
        task.build(device)
        with Interrupt() as interrupt, display(config.epochs, config.loss_measure) as view:
            trainer = Trainer(config, task, run, view, interrupt, callbacks)
            if checkpoint:
                trainer.load(checkpoint)
                say(f"resuming {out} at update {trainer.progress.updates}")
            if ranks.first:
                _begin(config, run, task, checkpoint, say)
            library()  # compiled now, so that the first update takes no longer than others
            try:
                trainer.run()
            except Diverged as error:
                if ranks.first:
                    run.write(DIVERGED, f"{error}\n".encode())
                raise
    say(f"{out} is finished: {_epochs(config)}.")


def _checkpoint(config: Config, run: RunDirectory) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the config, as plain values, and the checkpoint to resume from, if any."""
    if not run.has(CONFIG):
        return to_dict(config), None
    saved, checkpoint = run.config(), run.read_checkpoint()
    config = dataclasses.replace(config, shared_initialisation=saved.shared_initialisation)
    refuse_changes(saved, config, run.path)
    if checkpoint is None and run.has(MODEL):  # the checkpoint is written first
        raise UserError(f"{run.path} has a {MODEL} but no {CHECKPOINT}: not overwriting it")
    return to_dict(config), checkpoint


def _begin(
    config: Config,
    run: RunDirectory,
    task: Task,
    checkpoint: dict[str, Any] | None,
    say: Callable[[str], None],
) -> None:
    """Write the files of a new run; say how the machine of a resumed one differs."""
    if checkpoint is None:
        run.metrics.cut(0)
    (run.path / DIVERGED).unlink(missing_ok=True)
    run.write_config(config)
    size, device = current().size, next(task.model.parameters()).device.type
    same_kernels = record(run, size, device)
    if checkpoint is None:
        return
    before = checkpoint.get("processes", 1)
    others = [] if same_kernels else ["other kernels"]
    others += [] if before == size else [f"{before} process{'es' * (before > 1)}, now {size},"]
    if others:
        had = " and ".join(others)
        say(f"{run.path} had {had} so far: it resumes to float tolerance, not bit-exactly")


def open_experiment(config: Config) -> Task:
    """Read the data of a config."""
    return task_of(config).open(config)


def refuse_changes(old: Config, new: Config, out: Path) -> None:
    """Raise UsageError if the run in `out` cannot be resumed with the new config."""
    new = dataclasses.replace(new, shared_initialisation=old.shared_initialisation)
    changed = changed_fields(to_dict(old), to_dict(new))
    if not changed and new.epochs < old.epochs:
        changed = f"epochs was {old.epochs}, is now {new.epochs}"
    if changed:
        raise UsageError(f"{out} holds a run with other settings ({changed}): use another --out")


def _epochs(config: Config) -> str:
    return "1 epoch" if config.epochs == 1 else f"{config.epochs} epochs"
