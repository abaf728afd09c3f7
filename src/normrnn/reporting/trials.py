"""Trials of a search: best setting per variant, pairs, loss against learning rate."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from normrnn.recipes.paper import Paper
from normrnn.reporting.groups import short
from normrnn.reporting.pictures import COLOURS, finish
from normrnn.reporting.tables import COLUMNS, DASH, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Trial = dict[str, Any]
LR = "optimizer.lr"


def is_number(value: Any) -> bool:
    """Whether a value can be drawn."""
    return type(value) in (int, float) and abs(value) < 1e100


def arms_of(trials: Sequence[Trial]) -> list[str]:
    """Return the variants, the baseline first."""
    return list(dict.fromkeys(arm for t in trials for arm in t["arms"]))


def counted(trials: Sequence[Trial]) -> list[Trial]:
    """Settings whose variants all ran to their full budget, or diverged.

    A setting that was pruned counts for no variant: counting the variants that had finished would
    favour those that run first.
    """
    arms = set(arms_of(trials))
    return [t for t in trials if t["state"] != "pruned" and t["arms"].keys() >= arms]


def trained(trial: Trial, arm: str) -> bool:
    """Whether this variant was run and did not diverge."""
    found = trial["arms"].get(arm)
    return found is not None and not found["diverged"]


def best(trials: Sequence[Trial], arm: str) -> Trial | None:
    """The counted trial with the lowest validation loss of this variant."""
    good = [t for t in counted(trials) if trained(t, arm)]
    return min(good, key=lambda t: t["arms"][arm]["loss"], default=None)


class Pairs(NamedTuple):
    """Two variants compared over the same settings."""

    differences: list[float]
    """Validation loss minus the baseline's, where both trained."""
    only_other: int
    """Settings at which only the baseline diverged."""
    only_baseline: int
    neither: int


def pairs(trials: Sequence[Trial], baseline: str, other: str) -> Pairs:
    """Compare two variants over all counted settings."""
    differences, only_other, only_baseline, neither = [], 0, 0, 0
    for t in counted(trials):
        a, b = trained(t, baseline), trained(t, other)
        if a and b:
            differences.append(t["arms"][other]["loss"] - t["arms"][baseline]["loss"])
        only_other, only_baseline = only_other + (b and not a), only_baseline + (a and not b)
        neither += not a and not b
    return Pairs(differences, only_other, only_baseline, neither)


def lines(trials: Sequence[Trial], width: int = COLUMNS) -> list[str]:
    """Return at most three lines per variant."""
    arms, every = arms_of(trials), counted(trials)
    texts = []
    for arm in arms:
        top, lost = best(trials, arm), sum(not trained(t, arm) for t in every)
        loss = "no setting trained"
        if top is not None:
            loss = f"best validation loss {top['arms'][arm]['loss']:.4f}, {_words(top)}"
        texts.append(f"{arm}: {loss}; diverged {lost} of {len(every)}")
    for other in arms[1:]:
        p = pairs(trials, arms[0], other)
        middle = f", median {median(p.differences):+.4f}" if p.differences else ""
        lower = sum(d < 0 for d in p.differences)
        texts.append(
            f"{other} vs {arms[0]}, same settings: lower loss in {lower} of"
            f" {len(p.differences)}{middle}; only {other} trained: {p.only_other},"
            f" only {arms[0]}: {p.only_baseline}"
        )
    if len(every) < len(trials):
        texts.append(f"pruned, not counted: {len(trials) - len(every)} of {len(trials)} settings")
    return [line for text in texts for line in textwrap.wrap(text, width, subsequent_indent="  ")]


def _words(trial: Trial) -> str:
    names, values = short(list(trial["settings"])), trial["settings"].values()
    settings = ", ".join(f"{k} {_value(v)}" for k, v in zip(names, values, strict=True))
    return f"trial {trial['trial']} ({settings})"


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _settings(trials: Sequence[Trial]) -> list[str]:
    return list(dict.fromkeys(k for t in trials for k in t["settings"]))


def table(trials: Sequence[Trial], *, paper: Paper | None = None) -> Table:
    """Return the best setting of each variant, with the paper's rows."""
    names, rows = _settings(trials), []
    for arm in arms_of(trials):
        if (top := best(trials, arm)) is not None:
            figures = (top["arms"][arm]["train"], top["arms"][arm]["loss"])
            rows.append(_row(arm, figures, top["settings"], names))
        if paper and (found := paper.of(arm)):
            settings = paper.settings.get(arm, {})
            rows.append(_row(f"{arm}, paper", (found[0][0], found[1][0]), settings, names))
    head = ["variant", "train", "valid", *short(names)]
    note = "Cross entropy in nats; train is the running average of the last epoch."
    return Table("Best setting of each variant", head, rows, note)


def _row(
    name: str, figures: tuple[float, float], settings: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    shown = [f"{figure:.3f}" for figure in figures]
    return [name, *shown, *(_value(settings[n]) if n in settings else DASH for n in names)]


def trials_table(trials: Sequence[Trial]) -> Table:
    """Return every trial, the lowest loss first."""
    names, arms = _settings(trials), arms_of(trials)
    rows = [
        [
            f"{t['trial']}{', pruned' * (t['state'] == 'pruned')}",
            *(_value(t["settings"][n]) if n in t["settings"] else DASH for n in names),
            *(_loss(t, arm) for arm in arms),
        ]
        for t in sorted(trials, key=lambda t: min(_losses(t), default=math.inf))
    ]
    head = ["trial", *short(names), *(f"loss, {arm}" for arm in arms)]
    return Table("Every trial, the lowest loss first", head, rows)


def _losses(trial: Trial) -> list[float]:
    return [found["loss"] for arm, found in trial["arms"].items() if trained(trial, arm)]


def _loss(trial: Trial, arm: str) -> str:
    if arm not in trial["arms"]:
        return DASH
    return f"{trial['arms'][arm]['loss']:.4f}" if trained(trial, arm) else "diverged"


def space_table(space: Any, trials: Sequence[Trial]) -> Table:
    """Return the search space and the values drawn from it."""
    space = space if isinstance(space, dict) else {}
    rows = []
    for name in dict.fromkeys([*space, *_settings(trials)]):
        drawn = [t["settings"][name] for t in trials if name in t["settings"]]
        numbers = len(set(map(str, drawn))) > 6 and all(map(is_number, drawn))
        shown = f"{min(drawn):.3g} to {max(drawn):.3g}" if numbers else ""
        rows.append(
            [name, _searched(space.get(name)), shown or ", ".join(sorted({*map(str, drawn)}))]
        )
    return Table("The space", ["setting", "searched", "drawn"], rows)


def _searched(values: Any) -> str:
    if not isinstance(values, dict):
        return ", ".join(map(str, values)) if isinstance(values, list) else DASH
    step = f" in steps of {values['step']}" if values.get("step") else ""
    scale = " log-uniform" if values.get("log") else ""
    return f"{values.get('low')} to {values.get('high')}{scale}{step}"


def draw(axes: "Axes", trials: Sequence[Trial]) -> None:
    """Draw a point per run and a line per pair; diverged runs are crosses at the top."""
    every = counted(trials)
    top = max((loss for t in every for loss in _losses(t)), default=1.0)
    for t in every:
        if len(both := _losses(t)) > 1:
            axes.plot([t["settings"][LR]] * len(both), both, color="k", alpha=0.25, linewidth=0.8)
    for i, arm in enumerate(arms_of(trials)):
        colour, good = COLOURS[i % len(COLOURS)], [t for t in every if trained(t, arm)]
        x, y = [t["settings"][LR] for t in good], [t["arms"][arm]["loss"] for t in good]
        axes.scatter(x, y, color=colour, s=18, label=arm)
        lost = [t["settings"][LR] for t in every if not trained(t, arm)]
        height = [top * (1.06 + 0.04 * i)] * len(lost)
        name = f"{arm}, diverged" if lost else None
        axes.scatter(lost, height, color=colour, marker="x", s=24, label=name)
    rates = [t["settings"][LR] for t in every]
    if rates and min(rates) > 0 and max(rates) / min(rates) > 20:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    finish(axes, "learning rate", "validation loss, nats")
