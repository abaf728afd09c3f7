"""Tables of the studies whose question is not one variant against one baseline.

    python -m tools.studies NAME

`make results` puts them on the page of the study.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from normrnn.reporting.page import DASH, Table
from normrnn.reporting.pictures import COLOURS, new_figure
from normrnn.reporting.runs import Row, Run, load_all
from normrnn.verdicts import verdict
from normrnn.verdicts.result import cells, verdict_of
from normrnn.verdicts.rows import PlainRun, Point
from normrnn.verdicts.verdict import Settings
from tools.tables import with_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
Values = Mapping[str, Mapping[int, float]]  # variant -> seed -> value
INTERVALS = "Paired 95 % intervals, simultaneous over the rows."


def read(root: Path, name: str, *, diverged: bool = False) -> list[Run]:
    """The finished runs of a study, or those that diverged."""
    place = root / "studies" / name
    runs = load_all(place) if any(place.glob("*/*.json")) else []
    return [run for run in runs if (run.diverged if diverged else run.finished)]


def arms(runs: Iterable[Run], label: Callable[[Run], str]) -> dict[str, dict[int, Run]]:
    """Label -> seed -> run."""
    found: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        found.setdefault(label(run), {})[run.seed] = run
    return found


def values(runs: Mapping[str, Mapping[int, Run]], value: Callable[[Run], float]) -> Values:
    """A value of every run."""
    return {name: {seed: value(run) for seed, run in some.items()} for name, some in runs.items()}


def on_test_set(run: Run, key: str = "loss") -> float:
    """What a run's saved model has on the test set: its measure, or another key of the row."""
    row = run.split("test", run.saved_statistics)[0]
    return run.measure.convert(row["loss"]) if key == "loss" else row[key]


def perplexity(rows: Sequence[Row], run: Run) -> float:
    """The measure of the last of these rows."""
    return run.measure.convert(rows[-1]["loss"])


def compared(
    values: Values, baseline: str, margin: float = 0.01
) -> dict[str, verdict.Figure | None]:
    """Every variant against the baseline, seed by seed; None without seeds in common."""
    runs = [
        PlainRun(name, seed, {"valid": [Point(1, value)]})
        for name, seeds in values.items()
        for seed, value in seeds.items()
    ]
    variants = verdict_of(runs, Settings(baseline, paired=True, margin=margin)).variants
    return {name: variants[name].quality if name in variants else None for name in values}


def against(values: Values, baseline: str) -> list[list[str]]:
    """Rows: variant, seeds, mean, difference to the baseline with its interval, answer."""
    rows = []
    for name, figure in compared(values, baseline).items():
        own = values[name].values()
        if figure is None:
            last = "baseline" if name == baseline else DASH
            rows.append([name, str(len(own)), f"{mean(own):.4g}", DASH, last])
            continue
        _, other, _, difference = cells(figure, "")
        rows.append([name, str(figure.seeds), other, difference, figure.answer])
    return rows


def schedules(root: Path) -> list[Table]:
    """All schedules against the longest one without normalisation."""
    runs = arms(
        read(root, "compressed-schedule"), lambda r: f"{r.norm}, {r.config['epochs']} epochs"
    )
    baseline = "none, 5 epochs"
    if baseline not in runs:
        return []
    rows = against(values(runs, on_test_set), baseline)
    for row in rows:
        updates = {run.updates for run in runs[row[0]].values()}
        row.insert(2, f"{max(updates):,}")
    head = ["network", "seeds", "updates", "test perplexity", f"against {baseline}", "answer"]
    return [Table("All schedules against the longest baseline", head, rows, INTERVALS)]


def permuted_mnist(root: Path) -> list[Table]:
    """Share of wrong digits on the test set, and how fast it falls."""

    def name(run: Run) -> str:
        gamma = run.settings.get("model.gamma") or run.normalisation.gamma
        return f"{run.norm}, γ {gamma}" if run.norm == "recurrent" else run.norm

    runs = arms(read(root, "permuted-mnist"), name)
    if "none" not in runs:
        return []
    rows = against(values(runs, lambda run: 100 * on_test_set(run, "error")), "none")
    for row in rows:
        running = [
            100 * test["error"]
            for run in runs[row[0]].values()
            for test in run.split("test", "running")
            if run.normalisation.keeps_statistics
        ]
        row.append(f"{mean(running):.1f}" if running else DASH)
        for epoch in (1, 3, 5):
            errors = [e for run in runs[row[0]].values() for e in _errors(run, epoch)]
            row.append(f"{mean(errors):.1f}" if errors else DASH)
    head = [
        "network",
        "seeds",
        "test error, %",
        "against none",
        "answer",
        "with running statistics",
    ]
    head += [f"validation error after epoch {epoch}" for epoch in (1, 3, 5)]
    failed = arms(read(root, "permuted-mnist", diverged=True), name)
    lost = [f"{arm}: {len(seeds)} runs diverged." for arm, seeds in failed.items()]
    return [Table("Wrong digits", head, rows, " ".join([INTERVALS, *lost]))]


def _errors(run: Run, epoch: int) -> list[float]:
    """The error rate at the end of an epoch, if it was validated."""
    rows = [r for r in run.split("valid", run.selected_by) if r["epoch"] == epoch]
    return [100 * row["error"] for row in rows[-1:]]


def depth(root: Path) -> list[Table]:
    """The gain with 1, 3, 5 and 7 layers, and its trend."""
    runs = arms(read(root, "depth"), lambda r: f"{r.settings['model.layers']} {r.norm}")
    found = values(runs, on_test_set)
    gains: dict[int, dict[int, float]] = {}
    rows = []
    for layers in sorted({int(name.split()[0]) for name in runs}):
        pair = {norm: found.get(f"{layers} {norm}", {}) for norm in ("none", "sequence")}
        figure = compared(pair, "none")["sequence"] if all(pair.values()) else None
        if figure is None:
            continue
        _, other, baseline, difference = cells(figure, "")
        rows.append([str(layers), str(figure.seeds), baseline, other, difference, figure.answer])
        seeds = pair["none"].keys() & pair["sequence"].keys()
        gains[layers] = {s: pair["sequence"][s] - pair["none"][s] for s in sorted(seeds)}
    if not rows:
        return []
    common = set.intersection(*(set(gain) for gain in gains.values()))
    if len(gains) > 1 and common:
        slopes = {s: slope({x: gain[s] for x, gain in gains.items()}) for s in sorted(common)}
        figure = compared({"zero": dict.fromkeys(slopes, 0.0), "slope": slopes}, "zero")["slope"]
        if figure is not None:
            _, _, _, difference = cells(figure, "")
            rows.append(["trend", str(figure.seeds), DASH, DASH, difference, figure.answer])
    head = ["layers", "seeds", "none", "sequence", "difference", "answer"]
    note = (
        "Test FCE of the saved model. Paired 95 % intervals, each row alone. Trend: slope of the"
        " difference per layer, by least squares within each seed; negative where the gain grows."
    )
    return [Table("Gain and depth", head, rows, note)]


def slope(points: Mapping[int, float]) -> float:
    """Slope of the least-squares line.

    >>> slope({1: 1.0, 2: 3.0, 3: 5.0})
    2.0
    """
    x, y = mean(points), mean(points.values())
    return sum((a - x) * (b - y) for a, b in points.items()) / sum((a - x) ** 2 for a in points)


def large(root: Path) -> list[Table]:
    """Validation of the large network with each kind of statistics, at its best and at the end."""
    runs = arms(read(root, "large-scaled-down"), lambda run: run.norm)
    if runs.keys() != {"none", "frame"}:
        return []

    def best(kind: str) -> Callable[[Run], float]:
        return lambda run: run.measure.convert((run.best(kind) or {})["loss"])

    def last(kind: str, split: str = "valid") -> Callable[[Run], float]:
        return lambda run: perplexity(run.split(split, kind), run)

    rows = []
    kinds = ("running", "recalibrated", "batch")
    asked = [
        ("training, at the end", [last("running", "train_eval")] * 2),
        *((f"best validation, {kind}", [best("running"), best(kind)]) for kind in kinds),
        *((f"last validation, {kind}", [last("running"), last(kind)]) for kind in kinds),
        ("test", [on_test_set] * 2),
    ]
    for name, (first, second) in asked:
        pair = {
            "none": values(runs, first)["none"],
            "frame": values({"frame": runs["frame"]}, second)["frame"],
        }
        figure = compared(pair, "none")["frame"]
        if figure is not None:
            _, other, baseline, difference = cells(figure, "")
            rows.append([name, baseline, other, difference, figure.answer])
    head = ["perplexity", "none", "frame", "difference", "answer"]
    note = "Names of statistics are those of the normalised network. Paired 95 % intervals."
    return [Table("With each kind of test statistics", head, rows, note)]


def mini_batches(root: Path) -> list[Table]:
    """What identical mini-batches in every epoch change, without and with normalisation."""
    fixed = [run for run in read(root, "compressed-schedule") if run.config["epochs"] == 5]
    runs = arms(fixed, lambda run: f"{run.norm}, fixed")
    runs |= arms(read(root, "mini-batches"), lambda run: f"{run.norm}, shifted")
    seeds = sorted(set.intersection(*(set(some) for some in runs.values()))) if runs else []
    if len(runs) < 4 or not seeds:
        return []
    runs = {name: {seed: some[seed] for seed in seeds} for name, some in runs.items()}
    kinds = {"none": "running", "frame": "batch"}

    def last(split: str, batch: bool = False) -> Callable[[Run], float]:
        def value(run: Run) -> float:
            kind = kinds[run.norm] if batch else run.selected_by
            return perplexity(run.split(split, kind if split != "train" else None), run)

        return value

    asked = {
        "training, in training mode": last("train"),
        "training, in eval mode": last("train_eval"),
        "last validation, batch statistics": last("valid", batch=True),
        "last validation": last("valid"),
        "test": on_test_set,
        "last validation minus training": lambda r: last("valid")(r) - last("train_eval")(r),
    }
    rows = []
    for name, value in asked.items():
        found = values(runs, value)
        row = [name]
        effects = {}
        for norm in ("none", "frame"):
            pair = {kind: found[f"{norm}, {kind}"] for kind in ("fixed", "shifted")}
            effects[norm] = {s: pair["shifted"][s] - pair["fixed"][s] for s in seeds}
            figure = compared(pair, "fixed")["shifted"]
            row += [DASH, DASH] if figure is None else [cells(figure, "")[2], cells(figure, "")[3]]
        figure = compared(effects, "none")["frame"]
        row.append(DASH if figure is None else cells(figure, "")[3])
        rows.append(row)
    head = ["perplexity", "none", "shifted − fixed", "frame", "shifted − fixed", "frame − none"]
    note = (
        f"{len(seeds)} seeds; `none` and `frame`: fixed mini-batches. Last column: how much more"
        " the shift changes the normalised network. Paired 95 % intervals, each alone."
    )
    return [Table("Fixed and shifted streams", head, rows, note)]


TABLES: dict[str, Callable[[Path], list[Table]]] = {
    "compressed-schedule": schedules,
    "permuted-mnist": permuted_mnist,
    "depth": depth,
    "large-scaled-down": large,
    "mini-batches": mini_batches,
}


@dataclass(frozen=True)
class Curves:
    """Values of several seeds by label and position on the x axis."""

    x: str
    y: str
    values: dict[str, dict[float, list[float]]]

    def draw(self) -> "Figure":
        """Draw means, with a band from the lowest to the highest seed."""
        picture = new_figure(figsize=(6.4, 4.1), layout="constrained")
        axes = picture.subplots()
        for colour, (label, line) in zip(COLOURS, self.values.items(), strict=False):
            x, mark = sorted(line), "o" if len(line) < 10 else ""
            middle = [mean(line[at]) for at in x]
            axes.plot(x, middle, mark, ls="-", color=colour, label=label, linewidth=1.7)
            low, high = [min(line[at]) for at in x], [max(line[at]) for at in x]
            axes.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.grid(color="#bbbbbb", linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, framealpha=0)
        return picture


def final_values(
    root: Path, name: str, x: Callable[[Run], float]
) -> dict[str, dict[float, list[float]]]:
    """Norm -> position -> test values of the saved models."""
    found: dict[str, dict[float, list[float]]] = {"none": {}}
    for run in read(root, name):
        found.setdefault(run.norm, {}).setdefault(x(run), []).append(on_test_set(run, "loss"))
    return found


def schedule_curves(root: Path) -> Curves:
    """Test perplexity against the updates of the whole run."""
    found = final_values(root, "compressed-schedule", lambda run: run.updates)
    return Curves("updates of the whole run: 3, 4 and 5 epochs", "test perplexity", found)


def depth_curves(root: Path) -> Curves:
    """Test FCE against the number of layers."""
    found = final_values(root, "depth", lambda run: run.settings["model.layers"])
    return Curves("layers", "test FCE", found)


def large_curves(root: Path) -> Curves:
    """Validation after each epoch with each kind of statistics."""
    found: dict[str, dict[float, list[float]]] = {"none": {}}
    for run in read(root, "large-scaled-down"):
        for row in run.split("valid"):
            label = run.norm if run.norm == "none" else f"{run.norm}, {row['statistics']}"
            line = found.setdefault(label, {})
            line.setdefault(row["epoch"], []).append(run.measure.convert(row["loss"]))
    return Curves("epochs", "validation perplexity", found)


CURVES: dict[str, Callable[[Path], Curves]] = {
    "compressed-schedule": schedule_curves,
    "depth": depth_curves,
    "large-scaled-down": large_curves,
}
"""Pictures of studies that are not validation against updates."""


def markdown(root: Path, name: str) -> list[str]:
    """The tables of a study, if it has some, as paragraphs."""
    return [part for table in TABLES.get(name, lambda _: [])(root) for part in with_title(table)]


if __name__ == "__main__":
    print("\n\n".join(markdown(ROOT, sys.argv[1])))
