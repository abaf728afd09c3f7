"""What a search found: the best of each arm, the pairs, loss against learning rate (Table 3).

Reads what `normrnn search` writes: `trials.jsonl`, the trial table, and `study.json`, the plan.
"""

import contextlib
import csv
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normrnn.config.jsonio import flat
from normrnn.config.measure import bits
from normrnn.errors import UserError, notice
from normrnn.files import read_regular, resolved, write_whole
from normrnn.norms import names, of
from normrnn.recipes.paper import PAPER, Paper
from normrnn.report.pictures import COLOURS, drawing, save
from normrnn.report.tables import DASH, Table
from normrnn.seal import is_sealed, sealed, sealed_json, with_place, without_hash

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Trial = dict[str, Any]
LR = "optimizer.lr"
TRIALS, ABOUT, PICTURE = "trials.jsonl", "study.json", "loss-by-learning-rate.png"


@dataclass(frozen=True)
class RecordedStudy:
    """The output of a search, or what was kept of it, and what is wrong with it."""

    path: Path
    trials: list[Trial]
    about: dict[str, Any] = field(default_factory=dict)
    """The plan: study, trials, space, norms, sampler, pruner, config; empty if not recorded."""
    problem: str = ""
    verified: bool = True
    """Whether checksums vouch for it."""

    @property
    def name(self) -> str:
        """The directory's."""
        return resolved(self.path).name

    @property
    def recipe(self) -> str:
        """The experiment, if recorded."""
        return str(self.about.get("config", {}).get("recipe", ""))

    @property
    def paper(self) -> Paper | None:
        """The paper's search, where this is one; without a plan, one of the same arms and
        settings."""
        if self.recipe:
            beside = PAPER.get(self.recipe)
            return beside if beside and beside.settings else None
        searches = (paper for paper in PAPER.values() if paper.settings)
        return next((paper for paper in searches if self._same_settings(paper)), None)

    def _same_settings(self, paper: Paper) -> bool:
        fields = next(iter(paper.settings.values())).keys()
        return set(arms_of(self.trials)) == paper.settings.keys() and all(
            t["settings"].keys() == fields for t in self.trials
        )

    @property
    def drawable(self) -> bool:
        """Whether every trial has a learning rate."""
        return bool(self.trials) and all(_number(t["settings"].get(LR)) for t in self.trials)

    def runs(self) -> list[Path]:
        """The runs that are here: those kept beside the trials, and all of the best trials."""
        found = sorted(p.parent for p in self.path.glob("*/config.json"))
        tops = [best(self.trials, arm) for arm in arms_of(self.trials)]
        for number in dict.fromkeys(t["trial"] for t in tops if t is not None):
            found += sorted(p.parent for p in self.path.glob(f"trials/{number:04d}/*/config.json"))
        return found


def read_study(path: Path) -> RecordedStudy:
    """What can be read of a study's directory."""
    content, problem, sure = _content(path / TRIALS)
    trials, wrong = _trials(content)
    plan, unreadable, certain = (
        _content(path / ABOUT) if (path / ABOUT).exists() else (b"", "", True)
    )
    try:
        about = json.loads(plan or b"{}")
    except (ValueError, RecursionError):
        about, unreadable = {}, f"is damaged: {ABOUT} is not JSON"
    known = isinstance(about, dict) and isinstance(about.get("config"), dict)
    about = without_hash(about) if known else {}
    return RecordedStudy(path, trials, about, problem or wrong or unreadable, sure and certain)


def find_studies(paths: Sequence[Path]) -> tuple[list[RecordedStudy], list[Path]]:
    """Studies in these directories, or right inside them, each once; and where runs may be."""
    found: dict[Path, RecordedStudy] = {}
    rest = []
    for path in paths:
        inside = sorted(p.parent for p in path.glob(f"*/{TRIALS}"))
        own = (path / TRIALS).is_file()
        for one in [path] if own else inside:
            if resolved(one) not in found:
                study = found[resolved(one)] = read_study(one)
                rest += study.runs()
        if not own and (not inside or any(path.glob("*/config.json"))):
            rest.append(path)
    for study in found.values():
        if not (study.path / ABOUT).exists():
            notice(f"{study.path / ABOUT} is missing; what was searched is left out")
        if not study.verified:
            notice(f"{study.path} has no checksums: not verified")
    return list(found.values()), rest


def _content(path: Path) -> tuple[bytes, str, bool]:
    """A file, what is wrong with it, and whether a checksum vouches for it."""
    try:
        content = read_regular(path)
        return content, "", is_sealed(content, path)
    except OSError as error:
        return b"", f"cannot be read: {error.strerror}", True
    except UserError:
        return b"", f"is damaged: {path.name} is not what was written", True


def _trials(content: bytes) -> tuple[list[Trial], str]:
    """The rows up to the first that is none, and what is wrong with that."""
    trials: list[Trial] = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        trial: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            trial = json.loads(line)
        if not _is_trial(trial):
            return trials, f"is damaged: line {number} of {TRIALS} is no trial"
        trials.append(without_hash(trial))
    return trials, ""


def _is_trial(trial: Any) -> bool:
    if not isinstance(trial, dict) or type(trial.get("trial")) is not int:
        return False
    settings, arms = trial.get("settings"), trial.get("arms")
    if not isinstance(settings, dict) or not isinstance(arms, dict):
        return False
    return isinstance(trial.get("state"), str) and all(map(_is_arm, arms.values()))


def _is_arm(arm: Any) -> bool:
    if not isinstance(arm, dict) or type(arm.get("diverged")) is not bool:
        return False
    return arm["diverged"] or all(_number(arm.get(key)) for key in ("loss", "train"))


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def as_csv(trials: Sequence[Trial]) -> str:
    """The same as a spreadsheet reads it: one column per setting, and per figure of an arm."""
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
        if t["trial"] in p.only_other and _number(t["settings"].get(LR))
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


def markdown(trials: Sequence[Trial], *, paper: Paper | None = None) -> str:
    """A summary for a results page: the table, then the result in words."""
    shown = table(trials, paper=paper)
    listed = "\n".join(f"- {sentence}." for sentence in sentences(trials))
    return f"{shown.markdown()}\n\n{shown.note}\n\n{listed}\n"


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


def _sealed_rows(trials: Sequence[Trial]) -> bytes:
    """A line per trial; the first holds the checksum of all."""
    rows = [with_place(trials[0]), *trials[1:]] if trials else []
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    return sealed(text) if rows else b""


def write(study: RecordedStudy) -> list[Path]:
    """trials.jsonl, study.json, trials.csv and summary.md, and a picture where there is a learning
    rate, in the study's directory."""
    trials, out = study.trials, study.path
    out.mkdir(parents=True, exist_ok=True)
    files = {
        TRIALS: _sealed_rows(trials),
        ABOUT: sealed_json(study.about),
        "trials.csv": as_csv(trials).encode(errors="backslashreplace"),
        "summary.md": markdown(trials, paper=study.paper).encode(errors="backslashreplace"),
    }
    for name, content in files.items():
        write_whole(out / name, content)
    paths = [out / name for name in files]
    if study.drawable:
        save(figure(trials), out / PICTURE)
        paths.append(out / PICTURE)
    return paths
