"""`normrnn compare RECIPE`."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, get_args

from rich.console import Console
from rich.live import Live
from rich.table import Table
from tyro.conf import arg

from normrnn.commands.arms import Arm, Arms, plan
from normrnn.commands.options import parse, split_recipe
from normrnn.errors import UsageError
from normrnn.recipes.config import Config, Norm


def run(arguments: list[str]) -> int:
    """Train a recipe with several normalisations and compare them."""
    default, rest = split_recipe("compare", arguments)

    def options(
        config: Annotated[Config, arg(name="")] = default,
        norms: str = "none,frame",
        seeds: int = 1,
        jobs: int = 0,
        out: Annotated[Path | None, arg(metavar="DIR")] = None,
    ) -> tuple[Config, str, int, int, Path | None]:
        """Train every normalisation with every seed, one process each, and compare them.

        Args:
            config: The experiment; its norm and threads are set per process.
            norms: Normalisations to compare, comma-separated; none is the baseline.
            seeds: How many seeds, from --seed on.
            jobs: Processes at a time; 0 for as many as there are cores.
            out: Holds one run directory per process; runs/RECIPE unless given.
        """
        return config, norms, seeds, jobs, out

    config, norms, seeds, jobs, out = parse(options, f"compare {default.recipe}", rest)
    if config.norm != default.norm:
        raise UsageError(f"compare takes --norms, as in --norms none,{config.norm}, not --norm")
    names = list(dict.fromkeys(norms.split(",")))
    unknown = [name for name in names if name not in get_args(Norm)]
    if unknown:
        raise UsageError(f"--norms has {unknown[0]!r}, not one of {', '.join(get_args(Norm))}")
    if seeds < 1 or jobs < 0:
        raise UsageError(f"--seeds must be at least 1 and --jobs 0, not {seeds} and {jobs}")
    out = out or Path("runs") / config.recipe
    _compare(plan(config, names, seeds, out), jobs or os.cpu_count() or 1, out)
    return 0


def _compare(arms: list[Arm], jobs: int, out: Path) -> None:
    from normrnn.report.compare import verdict
    from normrnn.report.runs import load
    from normrnn.report.show import curves, table

    console = Console(highlight=False)
    try:
        with _watching(arms, console) as watch:
            Arms(arms, jobs).run(watch)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on from the checkpoints in {out}")
        raise
    runs = [load(arm.out) for arm in arms]
    console.print(table(runs))
    curves(runs, out / "curves.png")
    console.print(f"curves: {out / 'curves.png'}")
    for sentence in verdict(runs):
        console.print(sentence)


@contextlib.contextmanager
def _watching(arms: list[Arm], console: Console) -> Iterator[Callable[[], None]]:
    """A function that shows all arms: a live table on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield _line_printer(arms, console)
        return
    with Live(_live_table(arms), console=console, refresh_per_second=4) as live:
        yield lambda: live.update(_live_table(arms))


def _line_printer(arms: list[Arm], console: Console) -> Callable[[], None]:
    from normrnn.report.runs import read_rows
    from normrnn.train.display import describe

    shown = dict.fromkeys((arm.out for arm in arms), 0)

    def watch() -> None:
        for arm in arms:
            rows = read_rows(arm.out / "metrics.jsonl")
            fresh = rows[shown[arm.out] :]
            shown[arm.out] = len(rows)
            last = [row for row in fresh if row["split"] == "train"][-1:]
            for row in [*last, *(row for row in fresh if row["split"] != "train")]:
                console.print(f"{arm.out.name}: {describe(row, arm.config.epochs)}", soft_wrap=True)

    return watch


def _live_table(arms: list[Arm]) -> Table:
    from normrnn.report.runs import read_rows

    table = Table()
    for name in ("arm", "state", "epoch", "updates", "train ppl", "valid ppl", "lr", "seconds"):
        table.add_column(name, justify="left" if name in ("arm", "state") else "right")
    for arm in arms:
        rows = read_rows(arm.out / "metrics.jsonl")
        train = next((r for r in reversed(rows) if r["split"] == "train"), None)
        serving = [r for r in rows if r["split"] == "valid" and r["statistics"] != "batch"]
        valid = serving[-1] if serving else None
        cells = ["", "", "", "", ""]
        if train:
            cells = [
                f"{train['epoch']}/{arm.config.epochs}",
                f"{train['updates']:,}",
                f"{math.exp(train['loss']):,.1f}",
                f"{math.exp(valid['loss']):,.1f}" if valid else "",
                f"{train['lr']:g}",
            ]
        seconds = f"{train['seconds']:,.0f}" if train else ""
        table.add_row(arm.out.name, arm.state, *cells, seconds)
    return table
