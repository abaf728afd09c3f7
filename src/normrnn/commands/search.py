"""`normrnn search RECIPE`."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from tyro.conf import arg

from normrnn.commands.options import Directory, chosen_config, parse, split_recipe
from normrnn.config.base import Config, checked_norms
from normrnn.config.registry import with_fields
from normrnn.console import PlainConsole
from normrnn.errors import UsageError, UserError
from normrnn.experiments.jobs import plan as plan_runs
from normrnn.experiments.jobs import run_jobs
from normrnn.experiments.search.space import read_space
from normrnn.experiments.training import folder_name
from normrnn.extras import install_command
from normrnn.files import refuse_stream, resolved
from normrnn.processes import Child, ended_politely, stop
from normrnn.reporting.study import TRIALS, read_study
from normrnn.reporting.trials import short

if TYPE_CHECKING:
    from normrnn.experiments.search.plan import Plan
    from normrnn.experiments.search.study import Study

OTHER = "use another --out"
DATABASE = "study.db"
WORKER = "normrnn.experiments.search.worker"
CONFIRM = "confirm"


def run(arguments: list[str]) -> int:
    """Search the settings of a recipe."""
    default, rest = split_recipe("search", arguments, hide_norm=True)

    def options(
        config: Annotated[Config, arg(name="")] = default,
        trials: int = 52,
        storage: Annotated[str, arg(metavar="URL")] = "",
        study: str = "",
        space: Annotated[Path | None, arg(metavar="FILE")] = None,
        norms: str = "none,hidden",
        sampler: str = "random",
        pruner: str = "none",
        workers: int = 1,
        processes: int = 1,
        heartbeat: int = 60,
        confirm: Annotated[int, arg(metavar="N")] = 0,
        out: Directory = None,
        path: Directory = None,
    ) -> dict[str, Any]:
        """Train every arm with the same settings, drawn from a space, and compare them.

        A trial is one setting with all arms; its objective is the lower validation loss. A setting
        is pruned only if it is hopeless for every arm, and then counts for none. The same command,
        here or on another machine, joins the study; starting again resumes it.

        Args:
            config: The experiment; the space and --norms set the rest.
            trials: Settings of the study, over all workers.
            storage: sqlite:///FILE (default: study.db in DIR), journal:FILE, or
                postgresql://USER@HOST/DATABASE for workers on several machines.
            study: Name of the study in the storage; the recipe's unless given.
            space: JSON file: field to a list of values or to {"low", "high", "log"}; the paper's
                unless given, where the paper has one.
            norms: Arms of a trial, comma-separated; none is the baseline.
            sampler: Optuna's: random, tpe, gp, qmc, nsgaii, bruteforce.
            pruner: Optuna's: none, median, hyperband, successivehalving.
            workers: Processes of this command, one thread each unless --threads says otherwise.
            processes: That train each run of a worker together; its batch is shared among them.
            heartbeat: Seconds between signs of life in a database; a worker silent for three
                times as long is dead, and its trial is run again.
            confirm: Train the best setting of each arm again with N fresh seeds, in DIR/confirm,
                and compare them with intervals.
            out: Run directories and results; runs/RECIPE-search unless given.
            path: Directory of the modules that import paths (module:name) name.
        """
        return dict(locals())

    chosen = parse(options, f"search {default.recipe}", rest)
    config = chosen_config(chosen["config"])
    norms = checked_norms(chosen["norms"], "--norms")
    _check(config, chosen)
    out = chosen["out"] or Path("runs") / f"{folder_name(config.recipe)}-search"
    space = read_space(chosen["space"], config, norms)
    return _search(config, space, norms, out, chosen)


def _check(config: Config, chosen: dict[str, Any]) -> None:
    refuse_stream(config.data)
    for name in ("trials", "workers", "processes", "heartbeat"):
        if chosen[name] < 1:
            raise UsageError(f"--{name} must be at least 1, not {chosen[name]}")
    if chosen["confirm"] < 0 or chosen["confirm"] == 1:
        raise UsageError(f"--confirm needs at least 2 seeds, not {chosen['confirm']}")


def _search(config: Config, space: Any, norms: Any, out: Path, chosen: dict[str, Any]) -> int:
    try:
        from normrnn.experiments.search.plan import Plan
        from normrnn.experiments.search.storage import storage_errors
        from normrnn.experiments.search.study import Study
    except ImportError:
        raise UserError(f"search needs Optuna: {install_command('search')}") from None
    from normrnn.engine.start import open_experiment
    from normrnn.experiments.search.worker import Order

    experiment = open_experiment(config)
    config = replace(config, data=experiment.where, data_sha256=experiment.sha256)
    plan = Plan(config, space, norms, chosen["sampler"], chosen["pruner"])
    name, trials, heartbeat = (
        chosen["study"] or config.recipe,
        chosen["trials"],
        chosen["heartbeat"],
    )
    _refuse_other(out, name, plan, trials)
    storage = chosen["storage"]
    if not storage:
        out.mkdir(parents=True, exist_ok=True)
        if (out / DATABASE).is_symlink():
            raise UserError(f"{out / DATABASE} is a symbolic link: not writing through it")
        storage = f"sqlite:///{resolved(out / DATABASE)}"
    with storage_errors():
        study = Study(name, storage, plan, trials, heartbeat)
        study.reclaim()
        how = chosen["processes"]
        order = Order(name, storage, trials, heartbeat, str(out), plan.to_json(), how)
        logs = [out / f"worker-{os.getpid()}-{k}.log" for k in range(chosen["workers"])]
        threads = config.threads or 1
        workers = [Child(WORKER, (), order.send(), log, threads) for log in logs]
        try:
            _watch(study, workers)
        except KeyboardInterrupt:
            stop(workers)
            _write(study, out)
            return 130
        finally:
            stop(workers)
        code = _conclude(study, workers, out)
        if chosen["confirm"]:
            _confirm(study, out, chosen["confirm"], chosen["workers"])
            _write(study, out)
        return code


def _refuse_other(out: Path, name: str, plan: "Plan", trials: int) -> None:
    """Results of another study, or of more trials, are not overwritten."""
    recorded = read_study(out)
    if recorded.problem and (out / TRIALS).exists():
        raise UserError(f"{out} {recorded.problem}: remove that, or {OTHER}")
    if not recorded.about:
        return
    study, recipe = recorded.about.get("study", name), recorded.recipe
    if (study, recipe) != (name, plan.config.recipe):
        raise UserError(f"{out} holds the results of the study {study!r} of {recipe}: {OTHER}")
    theirs = {k: v for k, v in recorded.about.items() if k not in ("study", "trials")}
    if changes := plan.changes(theirs):
        raise UserError(f"{out} holds results of other settings ({changes}): {OTHER}")
    if len(recorded.trials) > trials:
        raise UserError(
            f"{out} holds {len(recorded.trials)} trials, more than --trials {trials}: {OTHER}"
        )


def _watch(study: "Study", workers: list[Child]) -> None:
    """Show the study until our workers have ended."""
    with ended_politely(), _display(study) as show:
        while any(worker.code is None for worker in workers):
            time.sleep(0.5)
            show()
        show()


def _conclude(study: "Study", workers: list[Child], out: Path) -> int:
    if _write(study, out) < study.count:
        failed = [worker for worker in workers if worker.code]
        reason = f": a worker ended: {failed[0].last_words()}" if failed else ""
        raise UserError(f"the study is not finished{reason}; the same command goes on")
    return 0


def _write(study: "Study", out: Path) -> int:
    """Tables, sentences, pictures and report of what is done; how many trials that is."""
    from normrnn.reporting.page import write_report
    from normrnn.reporting.pictures import why_no_pictures
    from normrnn.reporting.runs import find
    from normrnn.reporting.study import RecordedStudy, write
    from normrnn.reporting.trials import lines, table

    console = PlainConsole()
    rows = study.rows()
    if rows:
        about = {"study": study.name, "trials": study.count, **study.plan.identity()}
        recorded = RecordedStudy(out, rows, about)
        console.print(table(rows, paper=recorded.paper).text(), soft_wrap=True)
        console.print("\n".join(lines(rows)), soft_wrap=True)
        written = write(recorded)
        report = out / "report.html"
        title = f"normrnn search {study.plan.config.recipe}"
        runs = [*recorded.runs(), *sorted((out / CONFIRM).glob("*"))]
        write_report(find(runs), report, title, [recorded])
        for path in (*written, report):
            console.print(f"wrote {path}", soft_wrap=True)
        if omitted := why_no_pictures():
            console.print(omitted, soft_wrap=True)
    console.print(f"{len(rows)} of {study.count} trials are done", soft_wrap=True)
    return len(rows)


def _confirm(study: "Study", out: Path, seeds: int, jobs: int) -> None:
    """Train the best setting of each variant with fresh seeds, and print the verdict on them."""
    from normrnn.reporting.answer import group_verdict
    from normrnn.reporting.groups import Group
    from normrnn.reporting.runs import load
    from normrnn.reporting.trials import best

    config, console, arms = study.plan.config, PlainConsole(), []
    for norm in study.plan.norms:
        top = best(study.rows(), norm)
        if top is None:
            raise UserError(f"nothing to confirm: no setting trained with norm {norm}")
        chosen = with_fields(config, top["settings"])
        arms += plan_runs(replace(chosen, seed=config.seed + 1), (norm,), seeds, out / CONFIRM)
    console.print(f"confirming with {seeds} fresh seeds: {len(arms)} runs", soft_wrap=True)
    run_jobs(arms, jobs, lambda: None)
    runs = [load(arm.out) for arm in arms]
    console.print(str(group_verdict(Group(config.recipe, "", runs))), soft_wrap=True)


@contextmanager
def _display(study: "Study") -> Iterator[Callable[[], None]]:
    """A function that shows the study: a live table on a terminal, a line per trial elsewhere."""
    console = PlainConsole()
    if not console.is_terminal:
        seen: set[int] = set()
        yield lambda: _print_new(study, seen, console)
        return
    with Live(_live(study), console=console, refresh_per_second=2) as live:
        yield lambda: live.update(_live(study))


def _print_new(study: "Study", seen: set[int], console: Console) -> None:
    rows = study.rows()
    for row in rows:
        if row["trial"] not in seen:
            seen.add(row["trial"])
            arms = "  ".join(f"{arm} {_figure(result)}" for arm, result in row["arms"].items())
            settings = " ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                for k, v in row["settings"].items()
            )
            line = f"{len(seen)}/{study.count}  trial {row['trial']}  {settings}  {arms}"
            console.print(line, soft_wrap=True)


def _figure(result: dict[str, Any]) -> str:
    return "diverged" if result["diverged"] else f"{result['loss']:.4f}"


def _live(study: "Study", most: int = 12) -> Table:
    rows, norms = study.rows(), study.plan.norms
    running = sum(t.state.name == "RUNNING" for t in study.trials())
    title = f"{study.name}: {len(rows)} of {study.count} trials done, {running} running"
    table = Table(title=title, caption=f"the best {most}" if len(rows) > most else None)
    names = list(study.plan.space)
    for name in ("trial", *short(names), *(f"norm {n}" for n in norms)):
        table.add_column(name, justify="right")
    ranked = sorted(rows, key=lambda r: float("inf") if r["value"] is None else r["value"])
    for row in ranked[:most]:
        settings = [row["settings"].get(n, "") for n in names]
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in settings]
        arms = [_figure(row["arms"][n]) if n in row["arms"] else "" for n in norms]
        table.add_row(str(row["trial"]), *cells, *arms)
    return table
