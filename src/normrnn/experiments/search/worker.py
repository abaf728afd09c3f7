"""A worker of a study: takes trials, and trains each variant in processes of their own."""

import contextlib
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna

from normrnn.config.base import Config
from normrnn.config.registry import with_fields
from normrnn.engine.launch import DIVERGED, start_run
from normrnn.errors import UserError
from normrnn.experiments.search.space import draw
from normrnn.experiments.search.study import SLOT, Study
from normrnn.processes import stop
from normrnn.runs.names import CONFIG
from normrnn.runs.rows import read_rows
from normrnn.runs.store import BusyError, RunDirectory


class TrialAbandonedError(Exception):
    """A trial that this command cannot run, or not now."""


class Worker:
    """Runs trials until all are done; `work` may be called in several threads."""

    def __init__(self, study: Study, out: Path, processes: int = 1) -> None:
        self.study, self.out, self.processes = study, out, processes
        self.stopping = threading.Event()
        self.failed: dict[int, str] = {}
        """Slot -> why its setting cannot be run; others are run all the same."""

    def work(self) -> None:
        """Run trials until none is left, or until `stopping` is set."""
        pause = min(2.0, self.study.heartbeat)
        while not self.stopping.is_set():
            with contextlib.suppress(TrialAbandonedError):
                if self.study.run_next(self.run_trial, self.failed):
                    continue
            if len(self.study.done().keys() | self.failed.keys()) == self.study.count:
                return
            self.stopping.wait(pause)  # other workers run the last ones, and may die

    def run_trial(self, trial: optuna.Trial) -> dict[str, Any]:
        """Train all variants with one setting; return their results.

        A setting is pruned only if the pruner stops every variant. Otherwise all run to their end,
        so that those that are compared had the same budget.
        """
        plan, slot = self.study.plan, trial.user_attrs[SLOT]
        setting = draw(trial, plan.space, plan.config)
        results: dict[str, Any] = {}

        def run(number: int, pruning: bool) -> dict[str, Any]:
            config = with_fields(plan.config, {**setting, "norm": plan.norms[number]})
            out = self.out / "trials" / f"{slot:04d}" / config.norm
            first = number * config.epochs * config.train.segments
            return self._run(trial if pruning else None, config, out, first)

        try:
            for number, norm in enumerate(plan.norms):
                with contextlib.suppress(optuna.TrialPruned):
                    results[norm] = run(number, pruning=not results)
            if not results:
                raise optuna.TrialPruned
            return {norm: results.get(norm) or run(i, False) for i, norm in enumerate(plan.norms)}
        except BusyError as error:  # its worker counted as dead and is alive
            raise TrialAbandonedError from error
        except UserError as error:
            self.failed[slot] = f"trial {slot} ({setting}) cannot be run: {error}"
            raise TrialAbandonedError from error

    def _run(
        self, trial: optuna.Trial | None, config: Config, out: Path, first: int
    ) -> dict[str, Any]:
        """Train or resume one variant and return its result. Its validations are reported to the
        pruner of `trial`, numbered from `first`: pruners compare variants with themselves."""
        directory = RunDirectory(out)
        if directory.has(CONFIG):  # workers may differ in threads and device, a run may not
            with directory.locked():  # BusyError if another worker trains it
                before = directory.config()
            config = replace(config, threads=before.threads, device=before.device)
        reported = len(validations(out))
        child = start_run(config, out, self.processes)
        try:
            is_running = True
            while is_running:
                if self.stopping.is_set():
                    raise TrialAbandonedError
                time.sleep(0.2)
                is_running = child.code is None
                losses = validations(out)
                if trial is not None and len(losses) > reported:
                    reported = len(losses)
                    trial.report(min(losses), first + reported - 1)
                    if trial.should_prune():
                        raise optuna.TrialPruned
        finally:
            stop([child])
        if child.code == DIVERGED:
            reason = child.last_words()
            return {"diverged": True, "loss": None, "reason": reason.split(";")[0]}
        if child.code:
            raise UserError(child.last_words())
        return result(out)


def validations(out: Path) -> list[float]:
    """Return the validation losses with running statistics."""
    rows = read_rows(out)
    return [r["loss"] for r in rows if r["split"] == "valid" and r["statistics"] == "running"]


def result(out: Path) -> dict[str, Any]:
    """Return the results of a finished variant: best and last validation, last epoch's training.

    It diverged if its last validation is worse than twice a uniform guess, where the network ends
    in a softmax called `decoder`.
    """
    rows = read_rows(out)
    valid = [r for r in rows if r["split"] == "valid" and r["statistics"] == "running"]
    train_rows = [r for r in rows if r["split"] == "train"]
    last = [r for r in train_rows if r["epoch"] == train_rows[-1]["epoch"]]
    tested = [r for r in rows if r["split"] == "test" and r["statistics"] == "running"]
    fixed = [r for r in rows if r["split"] == "train_eval"]
    classes = len(RunDirectory(out).read_model()[0].get("decoder.bias", ()))
    final = valid[-1]["loss"]
    at_end = [r for r in rows if r["split"] == "valid" and r["updates"] == valid[-1]["updates"]]
    is_high = classes > 1 and final > 2 * math.log(classes)
    reason = f"the last validation loss is {final:.4g}, above 2 log {classes}"
    return {
        "diverged": is_high,
        "loss": min(r["loss"] for r in valid),
        "final": final,
        "statistics": {r["statistics"]: r["loss"] for r in at_end},
        "train": sum(r["loss"] * r["count"] for r in last) / sum(r["count"] for r in last),
        "train_eval": fixed[-1]["loss"] if fixed else None,
        "test": tested[-1]["loss"] if tested else None,
        "updates": train_rows[-1]["updates"],
        "count": sum(r["count"] for r in train_rows),
        "seconds": train_rows[-1]["seconds"],
        **({"reason": reason} if is_high else {}),
    }
