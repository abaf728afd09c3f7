"""What a search found: the best of each arm, the pairs, loss against learning rate (Table 3).

Reads `trials.jsonl`, the trial table that `normrnn search` writes.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.errors import UserError
from normrnn.report.measure import bits
from normrnn.report.pictures import COLOURS, _matplotlib, save
from normrnn.report.tables import DASH, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Trial = dict[str, Any]
LR = "optimizer.lr"
PAPER = {
    # arm: train, valid, settings (Table 3 and the appendix)
    "none": (1.05, 1.10, {LR: 0.42, "optimizer.momentum": 0.95, "train.batch": 32}),
    "hidden": (1.07, 1.11, {LR: 3.71e-4, "optimizer.momentum": 0.995, "train.batch": 128}),
}


def read_trials(path: Path) -> list[Trial]:
    """The rows of a trial table."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is damaged: not one JSON object a line") from None


def as_csv(trials: Sequence[Trial]) -> str:
    """The same as a spreadsheet reads it: one column per setting, and per figure of an arm."""
    flat = [
        {
            "trial": t["trial"],
            "state": t["state"],
            **t["settings"],
            **{f"{arm}.{k}": v for arm, found in t["arms"].items() for k, v in found.items()},
        }
        for t in trials
    ]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
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
            f" {len(p.better)} of {both} pairs where both trained;"
            f" {len(p.only_other)} where only norm {other} trained{_lowest_lr(trials, p)},"
            f" {len(p.only_baseline)} where only {arms[0]} did, {len(p.neither)} where neither did"
        )
    return said


def _lowest_lr(trials: Sequence[Trial], p: Pairs) -> str:
    rates = [
        t["settings"][LR] for t in trials if t["trial"] in p.only_other and LR in t["settings"]
    ]
    return f" (learning rates from {min(rates):.3g} on)" if rates else ""


def _words(trial: Trial) -> str:
    return ", ".join(f"{k.split('.')[-1]} {_value(v)}" for k, v in trial["settings"].items())


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table(trials: Sequence[Trial], *, paper: bool = False) -> Table:
    """Table 3: the best of each arm, with its settings; the paper's own rows beside them."""
    names = list(dict.fromkeys(k for t in trials for k in t["settings"]))
    rows = []
    for arm in arms_of(trials):
        top = best(trials, arm)
        if top is not None:
            found = top["arms"][arm]
            rows.append(_row(_model(arm), found["train"], found["loss"], top["settings"], names))
        if paper and arm in PAPER:
            train, valid, settings = PAPER[arm]
            rows.append(_row(f"{_model(arm)}, paper", train, valid, settings, names, digits=2))
    columns = ["model", "train", "valid", "valid, bits", *(k.split(".")[-1] for k in names)]
    note = "Cross entropy in nats per symbol; train is the running average of the last epoch."
    return Table("Best of each arm", [("", columns)], rows, note)


def _model(arm: str) -> str:
    return "best baseline" if arm == "none" else f"best norm {arm}"


def _row(
    model: str,
    train: float,
    valid: float,
    settings: dict[str, Any],
    names: Sequence[str],
    digits: int = 3,
) -> list[str]:
    figures = [f"{figure:.{digits}f}" for figure in (train, valid, bits(valid))]
    return [model, *figures, *(_value(settings[n]) if n in settings else DASH for n in names)]


def markdown(trials: Sequence[Trial], *, paper: bool = False) -> str:
    """A summary for a results page: the table, then the result in words."""
    shown = table(trials, paper=paper)
    listed = "\n".join(f"- {sentence}." for sentence in sentences(trials))
    return f"{shown.markdown()}\n\n{shown.note}\n\n{listed}\n"


def figure(trials: Sequence[Trial], field: str = LR) -> "Figure":
    """Validation loss against a setting, a point per run and a thin line per pair.

    Runs that diverged are crosses on the top edge.
    """
    new, _ = _matplotlib()
    drawn = new(figsize=(6.8, 4.4), layout="constrained")
    axes = drawn.subplots()
    arms = arms_of(trials)
    top = max((t["arms"][a]["loss"] for t in trials for a in arms if trained(t, a)), default=1.0)
    for t in trials:
        both = [t["arms"][a]["loss"] for a in arms if trained(t, a)]
        if len(both) > 1:
            x = t["settings"][field]
            axes.plot([x] * len(both), both, color="#bbbbbb", linewidth=0.8, zorder=1)
    for arm, colour in zip(arms, COLOURS, strict=False):
        label = "baseline" if arm == "none" else f"norm {arm}"
        good = [t for t in trials if trained(t, arm)]
        x, y = [t["settings"][field] for t in good], [t["arms"][arm]["loss"] for t in good]
        axes.scatter(x, y, color=colour, s=18, label=label)
        lost = [t["settings"][field] for t in trials if arm in t["arms"] and not trained(t, arm)]
        if lost:
            height = top * (1.06 + 0.04 * arms.index(arm))
            axes.scatter(
                lost, [height] * len(lost), color=colour, marker="x", label=f"{label}, diverged"
            )
    values = [t["settings"][field] for t in trials]
    if values and min(values) > 0 and max(values) / min(values) > 20:
        axes.set_xscale("log")
    axes.set_xlabel("learning rate" if field == LR else field)
    axes.set_ylabel("validation loss, nats")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    return drawn


def write(trials: Sequence[Trial], out: Path, *, paper: bool = False) -> list[Path]:
    """trials.jsonl, trials.csv and summary.md, and a picture where there is a learning rate."""
    out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(t, allow_nan=False) + "\n" for t in trials)
    files = {
        "trials.jsonl": lines,
        "trials.csv": as_csv(trials),
        "summary.md": markdown(trials, paper=paper),
    }
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    paths = [out / name for name in files]
    if trials and all(LR in t["settings"] for t in trials):
        save(figure(trials), out / "loss-by-learning-rate.png")
        paths.append(out / "loss-by-learning-rate.png")
    return paths


def gradients_figure(records: Sequence[dict[str, Any]]) -> "Figure":
    """Of `normrnn gradients`: norms of dL/dh_t for the whole loss, for the last step's alone, and
    the spread of what the non-linearities see; a colour per record, darker in deeper layers."""
    new, _ = _matplotlib()
    drawn = new(figsize=(13, 4.1), layout="constrained")
    panels = {
        "gradient": "‖dL/dh‖, loss of all steps",
        "gradient_of_the_end": "‖dL/dh‖, loss of the last step",
        "spread": "standard deviation of pre-activations",
    }
    for axes, (what, title) in zip(drawn.subplots(1, 3), panels.items(), strict=True):
        for record, colour in zip(records, COLOURS, strict=False):
            depth = len(record["layers"])
            for k, (name, layer) in enumerate(record["layers"].items()):
                values = [v or None for v in layer[what]]
                shade = 0.35 + 0.65 * (k + 1) / depth
                label = f"{record['label']}, {name}"
                axes.plot(values, color=colour, alpha=shade, linewidth=1.2, label=label)
        axes.set_yscale("log")
        axes.set_xlabel("time step")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if what == "spread":
            axes.legend(fontsize=7)
    return drawn
