"""The trials of a search: the best of each arm, the pairs, loss against learning rate (Table 3)."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normrnn.config.jsonio import flat
from normrnn.config.measure import bits
from normrnn.norms import names, of
from normrnn.recipes.paper import Paper
from normrnn.report.pictures import COLOURS, drawing
from normrnn.report.tables import DASH, Table, as_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Trial = dict[str, Any]
LR = "optimizer.lr"


def is_number(value: Any) -> bool:
    """Whether it is one that can be drawn."""
    return type(value) in (int, float) and abs(value) < 1e100


def as_csv(trials: Sequence[Trial]) -> str:
    """Trials as a spreadsheet reads them: one column per setting, and per figure of an arm."""
    rows = [
        {
            "trial": t["trial"],
            "state": t["state"],
            **t["settings"],
            **flat(t["arms"]),
        }
        for t in trials
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def arms_of(trials: Sequence[Trial]) -> list[str]:
    """The arms, the baseline first."""
    return list(dict.fromkeys(arm for t in trials for arm in t["arms"]))


def trained(trial: Trial, arm: str) -> bool:
    """Whether this arm was run and did not diverge."""
    found = trial["arms"].get(arm)
    return found is not None and not found["diverged"]


def best(trials: Sequence[Trial], arm: str) -> Trial | None:
    """The trial with the lowest validation loss of this arm."""
    good = [t for t in trials if trained(t, arm)]
    return min(good, key=lambda t: t["arms"][arm]["loss"]) if good else None


@dataclass(frozen=True)
class Pairs:
    """How two arms fared with the same settings, by trial number."""

    better: list[int]
    """Both trained, the other arm reached a lower loss than the baseline."""
    worse: list[int]
    """Both trained, and it did not."""
    only_other: list[int]
    """The baseline diverged, the other arm still trained."""
    only_baseline: list[int]
    neither: list[int]


def pairs(trials: Sequence[Trial], baseline: str, other: str) -> Pairs:
    """The paired comparison over all settings both arms were run with."""
    found = Pairs([], [], [], [], [])
    for t in trials:
        if not {baseline, other} <= t["arms"].keys():
            continue
        a, b = trained(t, baseline), trained(t, other)
        if a and b:
            lower = t["arms"][other]["loss"] < t["arms"][baseline]["loss"]
            (found.better if lower else found.worse).append(t["trial"])
        else:
            (found.only_other if b else found.only_baseline if a else found.neither).append(
                t["trial"]
            )
    return found


def sentences(trials: Sequence[Trial]) -> list[str]:
    """The result in words."""
    arms = arms_of(trials)
    said = []
    for arm in arms:
        top = best(trials, arm)
        lost = sum(arm in t["arms"] and not trained(t, arm) for t in trials)
        runs = sum(arm in t["arms"] for t in trials)
        where = "no setting trained"
        if top is not None:
            figure = top["arms"][arm]["loss"]
            where = f"best validation loss {figure:.4f}, trial {top['trial']} ({_words(top)})"
        said.append(f"norm {arm}: {where}; {lost} of {runs} diverged")
    for other in arms[1:]:
        p = pairs(trials, arms[0], other)
        both = len(p.better) + len(p.worse)
        said.append(
            f"norm {other} against {arms[0]} with the same settings: lower loss in"
            f" {len(p.better)} of {both} pairs where both trained{_median(trials, p, other)};"
            f" {len(p.only_other)} where only norm {other} trained{_lowest_lr(trials, p)},"
            f" {len(p.only_baseline)} where only {arms[0]} did, {len(p.neither)} where neither did"
        )
    if pruned := sum(t["state"] == "pruned" for t in trials):
        said.append(
            f"{pruned} of {len(trials)} trials were pruned, and the arms they did not finish are"
            " left out"
        )
    return said


def _median(trials: Sequence[Trial], p: Pairs, other: str) -> str:
    """The middle of the differences, where there are any."""
    both = [t["arms"] for t in trials if t["trial"] in {*p.better, *p.worse}]
    if not both:
        return ""
    baseline = arms_of(trials)[0]
    middle = statistics.median(arms[other]["loss"] - arms[baseline]["loss"] for arms in both)
    return f" (median difference {middle:+.4f} nats)"


def _lowest_lr(trials: Sequence[Trial], p: Pairs) -> str:
    rates = [
        t["settings"][LR]
        for t in trials
        if t["trial"] in p.only_other and is_number(t["settings"].get(LR))
    ]
    return f" (learning rates from {min(rates):.3g} on)" if rates else ""


def _words(trial: Trial) -> str:
    settings = trial["settings"]
    pairs_of = zip(short(list(settings)), settings.values(), strict=True)
    return ", ".join(f"{name} {_value(value)}" for name, value in pairs_of)


def short(names: Sequence[str]) -> list[str]:
    """Fields without the groups they are in, where that is clear.

    >>> short(["optimizer.lr", "optimizer.momentum", "model.momentum"])
    ['lr', 'optimizer.momentum', 'model.momentum']
    """
    last = [name.split(".")[-1] for name in names]
    return [name if last.count(end) > 1 else end for name, end in zip(names, last, strict=True)]


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table(trials: Sequence[Trial], *, paper: Paper | None = None) -> Table:
    """Table 3: the best of each arm, with its settings; the paper's own rows beside them."""
    names = list(dict.fromkeys(k for t in trials for k in t["settings"]))
    rows = []
    for arm in arms_of(trials):
        top = best(trials, arm)
        if top is not None:
            found = top["arms"][arm]
            rows.append(_row(_model(arm), found["train"], found["loss"], top["settings"], names))
        if paper and (figures := paper.of(arm)):
            (train, *_), (valid, *_) = figures
            settings = paper.settings.get(arm, {})
            rows.append(_row(f"{_model(arm)}, paper", train, valid, settings, names, digits=2))
    columns = ["model", "train", "valid", "valid, bits", *short(names)]
    note = "Cross entropy in nats per symbol; train is the running average of the last epoch."
    if paper:
        note += " The paper's rows: 20 epochs of Penn Treebank."
    title = "Best of each arm" + (f", in the form of the paper's {paper.table}" if paper else "")
    return Table(title, [("", columns)], rows, note)


def trials_table(trials: Sequence[Trial]) -> Table:
    """Every trial, the lowest loss first: settings, and validation loss of each arm."""
    names = list(dict.fromkeys(k for t in trials for k in t["settings"]))
    arms = arms_of(trials)
    rows = [
        [
            str(t["trial"]) + ("" if t["state"] == "complete" else f", {t['state']}"),
            *(_value(t["settings"][n]) if n in t["settings"] else DASH for n in names),
            *(_loss(t, arm) for arm in arms),
        ]
        for t in sorted(trials, key=lambda t: min(_losses(t), default=math.inf))
    ]
    columns = [("", ["trial", *short(names)])]
    columns += [("validation loss", [arm_name(arm) for arm in arms])] if arms else []
    return Table("Every trial, the lowest loss first", columns, rows)


def _losses(trial: Trial) -> list[float]:
    return [found["loss"] for arm, found in trial["arms"].items() if trained(trial, arm)]


def _loss(trial: Trial, arm: str) -> str:
    if arm not in trial["arms"]:
        return DASH
    return f"{trial['arms'][arm]['loss']:.4f}" if trained(trial, arm) else "diverged"


def arm_name(arm: str) -> str:
    """An arm in a legend or the head of a column."""
    known = arm in names()
    return of(arm).label if known and not of(arm).normalises else f"norm {arm}"


def _model(arm: str) -> str:
    return f"best {arm_name(arm)}"


def _row(
    model: str,
    train: float,
    valid: float,
    settings: Mapping[str, Any],
    names: Sequence[str],
    digits: int = 3,
) -> list[str]:
    figures = [f"{figure:.{digits}f}" for figure in (train, valid, bits(valid))]
    return [model, *figures, *(_value(settings[n]) if n in settings else DASH for n in names)]


def markdown(trials: Sequence[Trial], paper: Paper | None = None, said: str = "") -> str:
    """A summary for a results page: what was said of it, the table, then the result in words."""
    shown = table(trials, paper=paper)
    listed = "\n".join(f"- {sentence}." for sentence in sentences(trials))
    before = f"{as_markdown(said)}\n\n" if said else ""
    return f"{before}{shown.markdown()}\n\n{shown.note}\n\n{listed}\n"


def figure(trials: Sequence[Trial]) -> "Figure":
    """Validation loss against learning rate."""
    new, _ = drawing()
    drawn = new(figsize=(6.8, 4.4), layout="constrained")
    axes = drawn.subplots()
    draw(axes, trials)
    for text in axes.legend(fontsize=8).get_texts():
        text.set_parse_math(False)
    return drawn


def draw(
    axes: "Axes",
    trials: Sequence[Trial],
    colours: Sequence[str] = COLOURS,
    ink: str = "#222222",
    grid: str = "#dddddd",
) -> None:
    """A point per run and a thin line per pair; diverged runs are crosses on the top edge."""
    arms = arms_of(trials)
    top = max((loss for t in trials for loss in _losses(t)), default=1.0)
    for t in trials:
        if len(both := _losses(t)) > 1:
            x = [t["settings"][LR]] * len(both)
            axes.plot(x, both, color=ink, alpha=0.25, linewidth=0.8, zorder=1)
    for i, arm in enumerate(arms):
        colour, label = colours[i % len(colours)], arm_name(arm)
        good = [t for t in trials if trained(t, arm)]
        x, y = [t["settings"][LR] for t in good], [t["arms"][arm]["loss"] for t in good]
        axes.scatter(x, y, color=colour, s=18, label=label)
        lost = [t["settings"][LR] for t in trials if arm in t["arms"] and not trained(t, arm)]
        if lost:
            height = [top * (1.06 + 0.04 * i)] * len(lost)
            axes.scatter(lost, height, color=colour, marker="x", s=24, label=f"{label}, diverged")
    rates = [t["settings"][LR] for t in trials]
    if rates and min(rates) > 0 and max(rates) / min(rates) > 20:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("learning rate", color=ink)
    axes.set_ylabel("validation loss, nats", color=ink)
    axes.grid(color=grid, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", color=ink, labelcolor=ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)
