"""Start, resume or extend a run."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from normrnn.config.base import Config
from normrnn.config.registry import task_of
from normrnn.engine.display import Display
from normrnn.engine.interrupt import Interrupt
from normrnn.engine.loop import Trainer
from normrnn.engine.task import Experiment
from normrnn.errors import UsageError, UserError
from normrnn.runs.environment import named_device, record, set_threads
from normrnn.runs.names import CHECKPOINT, CONFIG, MODEL
from normrnn.runs.note import read_note
from normrnn.runs.store import DATA_CHANGED, RunDirectory, changed_fields


def train(
    config: Config,
    out: Path,
    display: Callable[[int, str], Display],
    say: Callable[[str], None] = print,
) -> None:
    """Bring the run in `out` to the last epoch of `config`, from wherever it stands.

    `display` is made from the number of epochs and the name of what is counted.
    """
    device = named_device(config.device)
    experiment = open_experiment(config)
    config = dataclasses.replace(config, data=experiment.where, data_sha256=experiment.sha256)
    run = RunDirectory(out)
    run.create()
    with run.locked():
        checkpoint = None
        if run.has(CONFIG):
            saved = run.config()
            if saved.data_sha256 == experiment.older_sha256 != experiment.sha256:
                say(f"{out} was begun by an older version: its data is compared by the labels only")
                config = dataclasses.replace(config, data_sha256=experiment.older_sha256)
            run.check_config(saved, (read_note(out) or {}).get("config"), CHECKPOINT)
            _refuse_changes(saved, config, out)
            checkpoint = run.read_checkpoint(config)
            if checkpoint is None and run.has(MODEL):  # which is never written before it
                raise UserError(f"{out} has a {MODEL} but no {CHECKPOINT}: not overwriting it")
        if checkpoint and checkpoint["finished"] >= config.epochs:
            say(f"{out} is finished: {_epochs(config)}. A larger --epochs goes on from there.")
            return
        say(f"data: {experiment.source}")
        set_threads(config.threads)
        torch.manual_seed(config.seed)
        task = experiment.build(device)
        with Interrupt() as interrupt, display(config.epochs, config.own_measure.unit) as view:
            trainer = Trainer(config, task, run, view, interrupt)
            if checkpoint:
                for name, content in task.files.items():
                    if run.read(name) != content:
                        raise UserError(f"{out / name} does not match the checkpoint beside it")
                trainer.load(checkpoint)
                say(f"resuming {out} at update {trainer.progress.updates}")
            else:
                for name, content in task.files.items():
                    run.write(name, content)
                run.metrics.cut(0)
            run.write_config(config)
            if not record(run) and checkpoint:
                say(
                    f"{out} had other kernels so far: it goes on to float tolerance, not to the bit"
                )
            trainer.run()
    say(f"{out} is finished: {_epochs(config)}.")


def open_experiment(config: Config) -> Experiment:
    """The data of a config, found and read."""
    return task_of(config).open_data(config)


def _refuse_changes(old: Config, new: Config, out: Path) -> None:
    changed = changed_fields(old, new)
    if not changed and new.epochs < old.epochs:
        changed = f"epochs was {old.epochs}, is now {new.epochs}"
    if changed == DATA_CHANGED:
        raise UsageError(f"{out} was begun on other data than {new.data} is now: use another --out")
    if changed:
        raise UsageError(f"{out} holds a run with other settings ({changed}): use another --out")


def _epochs(config: Config) -> str:
    return "1 epoch" if config.epochs == 1 else f"{config.epochs} epochs"
