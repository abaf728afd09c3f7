"""A worker of a study as a process: `python -m normrnn.experiments.search.worker < order.json`."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError

from normrnn.cli import guarded
from normrnn.config.base import Config
from normrnn.config.extensions import handed_over, receive
from normrnn.config.registry import with_fields
from normrnn.engine.display import PlainDisplay
from normrnn.engine.interrupt import Interrupt, Interrupted
from normrnn.engine.launch import DIVERGED, start_run
from normrnn.engine.loop import Diverged
from normrnn.engine.start import train
from normrnn.errors import UserError
from normrnn.experiments.search.plan import Plan
from normrnn.experiments.search.space import draw
from normrnn.experiments.search.study import ARMS, SLOT, Study, storage_errors
from normrnn.processes import stop, stop_with_parent
from normrnn.runs.names import CONFIG, METRICS
from normrnn.runs.rows import Row, read_rows
from normrnn.runs.store import BusyError, RunDirectory


@dataclass(frozen=True)
class Order:
    """What a worker has to do."""

    study: str
    storage: str
    trials: int
    heartbeat: int
    out: str
    plan: dict[str, Any]
    processes: int = 1
    """Processes that train each run together."""
    imports: dict[str, str] = field(default_factory=handed_over)
    """Import paths that the user gave, and where they were found."""

    def send(self) -> bytes:
        """Return it for standard input, where a password of the storage is not visible."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Pruning:
    """Reports validations of an arm to the pruner, which compares them with the same arm of other
    settings."""

    trial: optuna.Trial
    first: int
    """Step of the arm's first validation."""
    active: bool = True
    """Whether the arm may be stopped."""

    def report(self, losses: list[float]) -> None:
        """Report the lowest loss so far; TrialPruned if the pruner stops the arm."""
        if self.active:
            self.trial.report(min(losses), self.first + len(losses) - 1)
            if self.trial.should_prune():
                raise optuna.TrialPruned


def work(study: Study, out: Path, poll: Callable[[], None], processes: int = 1) -> None:
    """Claim slots until all are done, or until `poll` raises.

    A setting that cannot be run stops no other: UserError at the end.
    """
    impossible: dict[int, str] = {}
    while True:
        poll()
        study.reclaim()
        trial = study.claim(impossible)
        if trial is None:
            if len(study.done().keys() | impossible.keys()) == study.count:
                break
            time.sleep(min(2.0, study.heartbeat))  # other workers run the last ones, and may die
            continue
        with study.alive(trial):
            try:
                value = run_trial(trial, study.plan, out, poll, processes)
            except optuna.TrialPruned:
                study.finish(trial, None)
            except UpdateFinishedTrialError:
                print("counted as dead and run by another worker", flush=True)
            except BusyError:  # its worker counted as dead and is alive
                study.give_back(trial)
                time.sleep(min(2.0, study.heartbeat))
            except UserError as error:
                study.give_back(trial)
                slot = trial.user_attrs[SLOT]
                impossible[slot] = f"trial {slot} ({trial.params}) cannot be run: {error}"
                print(impossible[slot], flush=True)
            except BaseException:
                study.give_back(trial)
                raise
            else:
                study.finish(trial, value)
    if left := impossible.keys() - study.done().keys():
        raise UserError(impossible[min(left)])


def run_trial(
    trial: optuna.Trial, plan: Plan, out: Path, poll: Callable[[], None], processes: int = 1
) -> float:
    """Train all arms with one setting; return the lowest validation loss of those that trained.

    A setting is pruned only if the pruner stops every arm. Otherwise all arms run to their end, so
    that those that are compared had the same budget.
    """
    slot = trial.user_attrs[SLOT]
    settings = draw(trial, plan.space, plan.config)
    print(f"trial {slot}: {settings}", flush=True)

    def run(norm: str, active: bool) -> dict[str, Any]:
        config = with_fields(plan.config, {**settings, "norm": norm})
        directory = out / "trials" / f"{slot:04d}" / norm
        first = plan.norms.index(norm) * config.epochs * config.train.segments
        return run_arm(config, directory, Pruning(trial, first, active), poll, processes)

    results: dict[str, Any] = {}
    for norm in plan.norms:
        with contextlib.suppress(optuna.TrialPruned):
            results[norm] = run(norm, active=not results)
    if not results:
        raise optuna.TrialPruned
    results = {norm: results.get(norm) or run(norm, active=False) for norm in plan.norms}
    trial.set_user_attr(ARMS, results)
    losses = [found["loss"] for found in results.values() if not found["diverged"]]
    return min(losses, default=math.inf)


def run_arm(
    config: Config, out: Path, pruning: Pruning, poll: Callable[[], None], processes: int = 1
) -> dict[str, Any]:
    """Train or resume one arm, in this process or by several; return its result."""
    begun = RunDirectory(out)
    if begun.has(CONFIG):  # workers may differ in threads and device, a run may not
        before = begun.config()
        config = replace(config, threads=before.threads, device=before.device)
    try:
        if processes == 1:
            _train_here(config, out, pruning)
        else:
            _train_together(config, out, pruning, poll, processes)
    except Diverged as error:
        print(f"diverged: {error}", flush=True)
        return {"diverged": True, "loss": None, "reason": str(error).split(";")[0]}
    return result(out)


def _train_here(config: Config, out: Path, pruning: Pruning) -> None:
    def on_row(row: Row) -> None:
        if _is_validation(row):
            pruning.report(validations(out))

    train(config, out, PlainDisplay, callbacks=[on_row])


def _train_together(
    config: Config, out: Path, pruning: Pruning, poll: Callable[[], None], processes: int
) -> None:
    """Watch several processes that train; Diverged or UserError as they end."""
    if out.exists():
        with RunDirectory(out).locked():  # BusyError if another worker has it
            pass
    child, reported = start_run(config, out, processes), len(validations(out))
    try:
        while child.code is None:
            time.sleep(0.2)
            poll()
            losses = validations(out)
            if len(losses) > reported:
                reported = len(losses)
                pruning.report(losses)
    finally:
        stop([child])
    if child.code:
        raise (Diverged if child.code == DIVERGED else UserError)(child.last_words())


def _is_validation(row: Row) -> bool:
    return row["split"] == "valid" and row["statistics"] == "running"


def validations(out: Path) -> list[float]:
    """Return the validation losses with running statistics."""
    return [row["loss"] for row in read_rows(out / METRICS) if _is_validation(row)]


def result(out: Path) -> dict[str, Any]:
    """Return the results of a finished arm: best and last validation, last epoch's training.

    It diverged if its last validation is worse than twice a uniform guess, where the network ends
    in a softmax called `decoder`.
    """
    rows = read_rows(out / METRICS)
    valid = [r for r in rows if _is_validation(r)]
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


def run(arguments: list[str]) -> int:  # noqa: ARG001  the order is on standard input
    """Work as the order on standard input says."""
    stop_with_parent()
    order = Order(**json.load(sys.stdin))
    receive(order.imports)
    plan = Plan.from_json(order.plan)
    plan = replace(plan, config=replace(plan.config, threads=plan.config.threads or 1))
    with storage_errors():
        study = Study(order.study, order.storage, plan, order.trials, order.heartbeat)
        try:
            with Interrupt() as interrupt:
                work(study, Path(order.out), interrupt.poll, order.processes)
        except (Interrupted, KeyboardInterrupt):
            return 130
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(guarded(run, sys.argv[1:]))
