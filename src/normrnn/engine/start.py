"""Start, resume or extend a run."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from normrnn.config.base import Config
from normrnn.config.jsonio import from_dict, to_dict
from normrnn.config.registry import task_of
from normrnn.engine.callbacks import Callback
from normrnn.engine.loop import Diverged, Interrupt, Trainer
from normrnn.engine.ranks import device_of_rank, together
from normrnn.engine.task import Task
from normrnn.errors import UsageError, UserError
from normrnn.ops.native.library import library
from normrnn.runs.environment import named_device, record, set_threads
from normrnn.runs.records import CHECKPOINT, CONFIG, DIVERGED, MODEL, changed_fields
from normrnn.runs.store import RunDirectory


def train(
    config: Config,
    out: Path,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = print,
    display: Callable[[Config, int], Callback] | None = None,
) -> None:
    """Train or resume the run in `out` up to the last epoch of `config`.

    Callbacks get every row. `display` is called with the completed config and the number of updates
    of an epoch, and gives one more. Processes that were started together train the run together;
    the first of them writes, prints and calls.
    """
    run = RunDirectory(out)
    device = device_of_rank(named_device(config.device))
    with ExitStack() as stack:
        ranks = stack.enter_context(together(device))
        if not ranks.first:
            callbacks, say, display = (), lambda _: None, None
        task = open_experiment(config)
        config = replace(task.completed(config), data=task.where, shared_initialisation=True)
        if ranks.first:
            run.create()
            stack.enter_context(run.locked())
        values, checkpoint = ranks.from_first(lambda: _checkpoint(config, run))
        config = from_dict(type(config), values)
        if config.data_sha256 != task.sha256:
            raise UserError(f"process {ranks.rank} finds other data in {task.where} than the first")
        ends = f"{out} is finished: {config.epochs} epoch{'s' * (config.epochs > 1)}."
        if checkpoint and checkpoint["finished"] >= config.epochs:
            say(f"{ends} A larger --epochs continues it.")
            return
        say(f"data: {task.source}")
        set_threads(config.threads)
        torch.manual_seed(config.seed)
        task.build(device)
        shown = [display(config, task.updates(0))] if display else []
        interrupt = stack.enter_context(Interrupt())
        trainer = Trainer(config, task, run, interrupt, [*shown, *callbacks])
        if checkpoint:
            trainer.load(checkpoint)
            say(f"resuming {out} at update {trainer.progress.updates}")
        if ranks.first:
            _begin(config, run, device, checkpoint, ranks.size, say)
        library()  # compiled now, so that the first update takes no longer than others
        try:
            trainer.run()
        except Diverged as error:
            if ranks.first:
                run.write(DIVERGED, f"{error}\n".encode())
            raise
        say(ends)


def _checkpoint(config: Config, run: RunDirectory) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the config, as plain values, and the checkpoint to resume from, if any."""
    if not run.has(CONFIG):
        return to_dict(config), None
    saved, checkpoint = run.config(), run.read_checkpoint()
    config = replace(config, shared_initialisation=saved.shared_initialisation)
    refuse_changes(saved, config, run.path)
    if checkpoint is None and run.has(MODEL):  # the checkpoint is written first
        raise UserError(f"{run.path} has a {MODEL} but no {CHECKPOINT}: not overwriting it")
    return to_dict(config), checkpoint


def _begin(
    config: Config,
    run: RunDirectory,
    device: torch.device,
    checkpoint: dict[str, Any] | None,
    processes: int,
    say: Callable[[str], None],
) -> None:
    """Write the files of a new run; say how the machine of a resumed one differs."""
    if checkpoint is None:
        run.metrics.cut(0)
    (run.path / DIVERGED).unlink(missing_ok=True)
    run.write_config(config)
    others = [] if record(run, processes, device.type) else ["other kernels"]
    if checkpoint and (before := checkpoint["processes"]) != processes:
        others.append(f"{before} process{'es' * (before > 1)}, now {processes},")
    if checkpoint and others:
        had = " and ".join(others)
        say(f"{run.path} had {had} so far: it resumes to float tolerance, not bit-exactly")


def open_experiment(config: Config) -> Task:
    """Read the data of a config."""
    return task_of(config).open(config)


def refuse_changes(old: Config, new: Config, out: Path) -> None:
    """Raise UsageError if the run in `out` cannot be resumed with the new config."""
    new = replace(new, shared_initialisation=old.shared_initialisation)
    changed = changed_fields(to_dict(old), to_dict(new))
    if not changed and new.epochs < old.epochs:
        changed = f"epochs was {old.epochs}, is now {new.epochs}"
    if changed:
        raise UsageError(f"{out} holds a run with other settings ({changed}): use another --out")
