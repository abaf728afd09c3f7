"""`normrnn search`: run or join a study, write its results, confirm the best settings."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.config.base import Config
from normrnn.config.registry import with_fields
from normrnn.console import PlainConsole
from normrnn.errors import UsageError, UserError
from normrnn.experiments.jobs import plan as plan_runs
from normrnn.experiments.jobs import run_jobs
from normrnn.experiments.search.space import Space
from normrnn.extras import install_command
from normrnn.files import resolved
from normrnn.processes import ended_politely
from normrnn.reporting.study import TRIALS, read_study

if TYPE_CHECKING:
    from normrnn.experiments.search.study import Plan, Study

OTHER = "use another --out"
DATABASE = "study.db"
CONFIRM = "confirm"


@dataclass(frozen=True)
class SearchRequest:
    """How to search, besides the experiment and its space."""

    out: Path
    trials: int
    norms: tuple[str, ...]
    storage: str = ""
    study: str = ""
    sampler: str = "random"
    pruner: str = "none"
    workers: int = 1
    processes: int = 1
    heartbeat: int = 60
    confirm: int = 0

    def check(self) -> None:
        """Raise UsageError for what cannot be done."""
        for name in ("trials", "workers", "processes", "heartbeat"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.confirm < 0 or self.confirm == 1:
            raise UsageError(f"--confirm needs at least 2 seeds, not {self.confirm}")


def search(config: Config, space: Space, request: SearchRequest) -> int:
    """Run the study to its end, or join it; return the exit code."""
    try:
        from normrnn.experiments.search.study import Plan, Study, storage_errors
    except ImportError:
        raise UserError(f"search needs Optuna: {install_command('search')}") from None
    from normrnn.engine.start import open_experiment

    experiment = open_experiment(config)
    config = replace(
        config,
        data=experiment.where,
        data_sha256=experiment.sha256,
        threads=config.threads or 1,
    )
    plan = Plan(config, space, request.norms, request.sampler, request.pruner)
    name, out = request.study or config.recipe, request.out
    _refuse_other(out, name, plan, request.trials)
    console = PlainConsole(soft_wrap=True)
    with storage_errors():
        url = request.storage or _database_in(out)
        study = Study(name, url, plan, request.trials, request.heartbeat)
        try:
            _run_trials(study, request, console)
        except KeyboardInterrupt:
            _write(study, out, console)
            return 130
        except UserError as error:
            _write(study, out, console)
            raise UserError(f"not finished, the same command resumes: {error}") from None
        _write(study, out, console)
        if request.confirm:
            _confirm(study, request, console)
            _write(study, out, console)
    return 0


def _database_in(out: Path) -> str:
    out.mkdir(parents=True, exist_ok=True)
    if (out / DATABASE).is_symlink():
        raise UserError(f"{out / DATABASE} is a symbolic link: not writing through it")
    return f"sqlite:///{resolved(out / DATABASE)}"


def _refuse_other(out: Path, name: str, plan: "Plan", trials: int) -> None:
    """Raise UserError if `out` holds results of another study, or of more trials."""
    recorded = read_study(out)
    if recorded.problem and (out / TRIALS).exists():
        raise UserError(f"{out} {recorded.problem}: remove that, or {OTHER}")
    if not recorded.about:
        return
    study, recipe = recorded.about.get("study", name), recorded.recipe
    if (study, recipe) != (name, plan.config.recipe):
        raise UserError(f"{out} holds the results of the study {study!r} of {recipe}: {OTHER}")
    found = {k: v for k, v in recorded.about.items() if k not in ("study", "trials")}
    if changes := plan.changes(found):
        raise UserError(f"{out} holds results of other settings ({changes}): {OTHER}")
    if len(recorded.trials) > trials:
        raise UserError(
            f"{out} holds {len(recorded.trials)} trials, more than --trials {trials}: {OTHER}"
        )


def _run_trials(study: "Study", request: SearchRequest, console: PlainConsole) -> None:
    """Run trials in threads and print those that end, also of other commands."""
    from normrnn.experiments.search.worker import Worker

    worker, printed = Worker(study, request.out, request.processes), set()
    with ended_politely(), ThreadPoolExecutor(request.workers) as pool:
        threads = [pool.submit(worker.work) for _ in range(request.workers)]
        try:
            is_running = True
            while is_running:
                is_running = not all(thread.done() for thread in threads)
                for row in study.rows():
                    if row["trial"] not in printed:
                        printed.add(row["trial"])
                        console.print(f"{len(printed)}/{study.count}  {_line(row)}")
                time.sleep(0.5 * is_running)
        finally:
            worker.stopping.set()
    for thread in threads:
        thread.result()
    if left := worker.failed.keys() - study.done().keys():
        raise UserError(worker.failed[min(left)])


def _line(row: dict[str, Any]) -> str:
    settings = " ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row["settings"].items()
    )
    arms = "  ".join(
        f"{arm} {'diverged' if found['diverged'] else format(found['loss'], '.4f')}"
        for arm, found in row["arms"].items()
    )
    return f"trial {row['trial']}  {settings}  {arms}"


def _write(study: "Study", out: Path, console: PlainConsole) -> None:
    """Print and write tables and report."""
    from normrnn.reporting.page import write_report
    from normrnn.reporting.pictures import why_no_pictures
    from normrnn.reporting.runs import find
    from normrnn.reporting.study import RecordedStudy, write
    from normrnn.reporting.trials import lines

    rows = study.rows()
    if rows:
        about = {"study": study.name, "trials": study.count, **study.plan.identity()}
        recorded = RecordedStudy(out, rows, about)
        console.print("\n".join(lines(rows)))
        report = out / "report.html"
        write(recorded)
        runs = [*recorded.runs(), *sorted((out / CONFIRM).glob("*"))]
        write_report(find(runs), report, f"normrnn search {study.plan.config.recipe}", [recorded])
        omitted = why_no_pictures()
        console.print(f"report: {report}{f' ({omitted})' if omitted else ''}")
    console.print(f"{len(rows)} of {study.count} trials are done")


def _confirm(study: "Study", request: SearchRequest, console: PlainConsole) -> None:
    """Train the best setting of each variant with fresh seeds, and print the verdict on them."""
    from normrnn.reporting.answer import group_verdict
    from normrnn.reporting.groups import Group
    from normrnn.reporting.runs import load
    from normrnn.reporting.trials import best

    config, jobs = study.plan.config, []
    for norm in study.plan.norms:
        top = best(study.rows(), norm)
        if top is None:
            raise UserError(f"nothing to confirm: no setting trained with norm {norm}")
        chosen = replace(with_fields(config, top["settings"]), seed=config.seed + 1)
        jobs += plan_runs(chosen, (norm,), request.confirm, request.out / CONFIRM)
    console.print(f"confirming with {request.confirm} fresh seeds: {len(jobs)} runs")
    run_jobs(jobs, request.workers, lambda: None)
    runs = [load(job.out) for job in jobs]
    console.print(str(group_verdict(Group(config.recipe, "", runs))))
