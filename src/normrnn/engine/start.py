"""Start, resume or extend a run."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.config.registry import task_of
from normrnn.engine.callbacks import LOGS, Callback, Display, require_tensorboard
from normrnn.engine.loop import Diverged, Interrupt, Trainer
from normrnn.engine.ranks import device_of_rank, together
from normrnn.errors import UsageError, UserError
from normrnn.ops.native.library import library
from normrnn.runs.environment import named_device, record, set_threads
from normrnn.runs.records import CONFIG, DIVERGED, changed_fields
from normrnn.runs.store import RunDirectory


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
        ranks = stack.enter_context(together(device))
        say: Callable[[str], None] = print if ranks.first else lambda _: None
        task = task_of(config).open(config)
        config = replace(task.completed(config), data=task.where, shared_initialisation=True)
        if ranks.first:
            stack.enter_context(run.locked())
        sha256, checkpoint = ranks.from_first(lambda: (task.sha256, _checkpoint(config, run)))
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
        set_threads(config.threads)
        torch.manual_seed(config.seed)
        trainer = Trainer(config, task.build(device), run, stack.enter_context(Interrupt()))
        if checkpoint:
            trainer.load(checkpoint)
            say(f"resuming {out} at update {trainer.progress.updates}")
        if ranks.first:
            _begin(config, run, device, checkpoint, ranks.size)
            trainer.callbacks = [Display(config, task.updates(0)), *open_logs(), *callbacks]
        library()  # compiled now, so that the first update takes no longer than others
        try:
            trainer.run()
        except Diverged as error:
            if ranks.first:
                run.write(DIVERGED, f"{error}\n".encode())
            raise
        say(ends)


def _checkpoint(config: Config, run: RunDirectory) -> dict[str, Any] | None:
    """Return the checkpoint to resume from, if any."""
    if not run.has(CONFIG):
        return None
    checkpoint = run.read_checkpoint()
    refuse_changes(run.config(), config, run.path)
    return checkpoint


def _begin(
    config: Config,
    run: RunDirectory,
    device: torch.device,
    checkpoint: dict[str, Any] | None,
    processes: int,
) -> None:
    """Write the files of a new run; say how the machine of a resumed one differs."""
    if checkpoint is None:
        run.metrics.truncate()
    (run.path / DIVERGED).unlink(missing_ok=True)
    run.write_config(config)
    others = [] if record(run, processes, device.type) else ["other kernels"]
    if checkpoint and (before := checkpoint["processes"]) != processes:
        others.append(f"{before} process{'es' * (before > 1)}, now {processes},")
    if checkpoint and others:
        had = " and ".join(others)
        print(f"{run.path} had {had} so far: it resumes to float tolerance, not bit-exactly")


def refuse_changes(old: Config, new: Config, out: Path) -> None:
    """Raise UsageError if the run in `out` cannot be resumed with the new config."""
    new = replace(new, shared_initialisation=old.shared_initialisation)
    changed = changed_fields(to_dict(old), to_dict(new))
    if not changed and new.epochs < old.epochs:
        changed = f"epochs was {old.epochs}, is now {new.epochs}"
    if changed:
        raise UsageError(f"{out} holds a run with other settings ({changed}): use another --out")
