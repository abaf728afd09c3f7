"""The trials of a search: `trials.jsonl`, a row per trial, and `study.json`, its plan."""

import contextlib
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from normrnn import files
from normrnn.config.base import Measure
from normrnn.config.jsonio import flat
from normrnn.config.registry import config_class
from normrnn.errors import UserError, notice
from normrnn.reporting.groups import short
from normrnn.reporting.pictures import COLOURS, format_axes
from normrnn.reporting.runs import find_run_directories

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRIALS, ABOUT = "trials.jsonl", "study.json"
SUMMARY = "sentence"  # key of a plan: the chosen values and the work behind them, as text
LR = "optimizer.lr"
COLUMNS = 80
Trial = dict[str, Any]


@dataclass(frozen=True)
class RecordedStudy:
    """The trials of a search, and a problem with its files."""

    path: Path
    trials: list[Trial]
    about: dict[str, Any] = field(default_factory=dict)
    """The plan: study, trials, space, norms, sampler, config; empty if not recorded."""
    problem: str = ""
    verified: bool = True  # checksums cover the files

    @property
    def recipe(self) -> str:
        """Name of the recipe, if recorded."""
        return str(self.about.get("config", {}).get("recipe", ""))

    @property
    def summary(self) -> str:
        """Text on the chosen values, if recorded."""
        return str(self.about.get(SUMMARY, ""))

    @property
    def measure(self) -> Measure:
        """The measure of the losses; the loss itself where what is shown of it is not known."""
        config = flat(self.about.get("config", {}))
        is_known = "recipe" in config and "shown.name" not in config
        return config_class(config).measure(config) if is_known else Measure(name="loss")

    @property
    def title(self) -> str:
        """Title of the study."""
        of_recipe = f" of {self.recipe}" if self.recipe else ""
        return f"Study {files.resolved(self.path).name}{of_recipe}"

    @property
    def state(self) -> str:
        """Whether it is damaged or unfinished, as text; empty if neither."""
        if self.problem:
            return self.problem + ("; the trials before that are shown" if self.trials else "")
        asked, done = self.about.get("trials"), len(self.trials)
        unfinished = isinstance(asked, int) and done < asked
        return f"{self.title} is not finished: {done} of {asked} trials" if unfinished else ""

    @property
    def budget(self) -> str:
        """Number of settings, runs and updates, as far as recorded."""
        results = [result for t in self.trials for result in t["arms"].values()]
        updates = sum(r["updates"] for r in results if is_number(r.get("updates")))
        return f"{len(self.trials)} settings, {len(results)} runs, {updates:,.0f} updates"

    def runs(self) -> list[Path]:
        """List the run directories beside the trials and of the best trials."""
        places = ("*/config.json", "confirm/*/config.json")
        found = [p.parent for place in places for p in sorted(self.path.glob(place))]
        tops = [best(self.trials, arm) for arm in arms_of(self.trials)]
        for number in dict.fromkeys(t["trial"] for t in tops if t is not None):
            found += sorted(p.parent for p in self.path.glob(f"trials/{number:04d}/*/config.json"))
        return found


def read_study(path: Path) -> RecordedStudy:
    """Read the valid part of a study's directory."""
    trials, problem, is_verified = _read_trials(path / TRIALS)
    about: dict[str, Any] = {}
    try:
        plan, has_hash = files.read_json(path / ABOUT)
        str(flat(plan))  # RecursionError if it is nested too deeply to be shown
        is_verified = is_verified and has_hash
        about = plan if isinstance(plan.get("config"), dict) else {}
    except FileNotFoundError:
        pass
    except (UserError, RecursionError) as error:
        problem = problem or str(error)
    return RecordedStudy(path, trials, about, problem, is_verified)


def find_studies(paths: Sequence[Path]) -> tuple[list[RecordedStudy], list[Path]]:
    """Read studies in or directly inside these directories; also return where runs may be."""
    studies: dict[Path, RecordedStudy] = {}
    runs = []
    for path in paths:
        is_study = (path / TRIALS).is_file()
        below = [path] if is_study else sorted(p.parent for p in path.glob(f"*/{TRIALS}"))
        for one in below:
            if files.resolved(one) not in studies:
                study = studies[files.resolved(one)] = read_study(one)
                runs += study.runs()
        if not is_study and (not below or find_run_directories(path)):
            runs.append(path)
    for study in studies.values():
        if not (study.path / ABOUT).exists():
            notice(f"{study.path / ABOUT} is missing; the search space is left out")
        if not study.verified:
            notice(f"{study.path} has no checksums: not verified")
    return list(studies.values()), runs


def _read_trials(path: Path) -> tuple[list[Trial], str, bool]:
    """Return the rows up to the first invalid one, its problem, and whether a checksum covers
    them."""
    trials: list[Trial] = []
    try:
        content = files.read_regular(path, files.ROWS)
        has_hash = files.is_sealed(content, path)
    except OSError as error:
        return [], f"{path} cannot be read: {error.strerror}", True
    except UserError as error:
        return [], str(error), True
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        trial: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            trial = json.loads(line)
        if not _is_trial(trial):
            return trials, f"{path} is damaged: line {number} is not a trial", has_hash
        trial.pop("sha256", None)
        trials.append(trial)
    return trials, "", has_hash


def _is_trial(trial: Any) -> bool:
    kinds = {"trial": int, "settings": dict, "arms": dict, "state": str}
    if not isinstance(trial, dict) or not all(type(trial.get(k)) is v for k, v in kinds.items()):
        return False
    return all(
        isinstance(result, dict)
        and type(result.get("diverged")) is bool
        and (result["diverged"] or all(is_number(result.get(key)) for key in ("loss", "train")))
        for result in trial["arms"].values()
    )


def is_number(value: Any) -> bool:
    """Whether a value can be drawn."""
    return type(value) in (int, float) and abs(value) < 1e100


def write(study: RecordedStudy) -> None:
    """Write trials.jsonl, whose first line holds the checksum, and study.json."""
    study.path.mkdir(parents=True, exist_ok=True)
    trials = study.trials
    rows = [{"sha256": files.BLANK, **trials[0]}, *trials[1:]] if trials else []
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    files.write_whole(study.path / TRIALS, files.sealed(text) if rows else b"")
    files.write_whole(study.path / ABOUT, files.sealed_json(study.about))


def arms_of(trials: Sequence[Trial]) -> list[str]:
    """Return the variants, the baseline first."""
    return list(dict.fromkeys(arm for t in trials for arm in t["arms"]))


def settings_of(trials: Sequence[Trial]) -> list[str]:
    """Return the names of the settings that were drawn."""
    return list(dict.fromkeys(k for t in trials for k in t["settings"]))


def counted(trials: Sequence[Trial]) -> list[Trial]:
    """Settings whose variants all ran to their full budget, or diverged.

    A setting that was pruned counts for no variant: counting the variants that had finished would
    favour those that run first.
    """
    arms = set(arms_of(trials))
    return [t for t in trials if t["state"] != "pruned" and t["arms"].keys() >= arms]


def trained(trial: Trial, arm: str) -> bool:
    """Whether this variant was run and did not diverge."""
    return arm in trial["arms"] and not trial["arms"][arm]["diverged"]


def losses(trial: Trial) -> list[float]:
    """Return the validation losses of the variants that did not diverge."""
    return [result["loss"] for arm, result in trial["arms"].items() if trained(trial, arm)]


def best(trials: Sequence[Trial], arm: str) -> Trial | None:
    """The counted trial with the lowest validation loss of this variant."""
    good = [t for t in counted(trials) if trained(t, arm)]
    return min(good, key=lambda t: t["arms"][arm]["loss"], default=None)


def pairs(
    trials: Sequence[Trial], baseline: str, other: str
) -> tuple[list[float], tuple[int, int]]:
    """Return validation loss minus the baseline's of all counted settings at which both trained,
    and at how many only the other one or only the baseline did."""
    every = [(t, trained(t, baseline), trained(t, other)) for t in counted(trials)]
    both = [t["arms"] for t, a, b in every if a and b]
    only = sum(b and not a for _, a, b in every), sum(a and not b for _, a, b in every)
    return [arms[other]["loss"] - arms[baseline]["loss"] for arms in both], only


def lines(trials: Sequence[Trial]) -> list[str]:
    """Return at most three lines per variant."""
    arms, every = arms_of(trials), counted(trials)
    texts = []
    for arm in arms:
        top, lost = best(trials, arm), sum(not trained(t, arm) for t in every)
        loss = "no setting trained"
        if top is not None:
            names = zip(short(list(top["settings"])), top["settings"].values(), strict=True)
            settings = ", ".join(f"{name} {value_text(value)}" for name, value in names)
            loss = f"best validation loss {top['arms'][arm]['loss']:.4f}"
            loss += f", trial {top['trial']} ({settings})"
        texts.append(f"{arm}: {loss}; diverged {lost} of {len(every)}")
    for other in arms[1:]:
        differences, only = pairs(trials, arms[0], other)
        middle = f", median {median(differences):+.4f}" if differences else ""
        lower = sum(d < 0 for d in differences)
        texts.append(
            f"{other} vs {arms[0]}, same settings: lower loss in {lower} of"
            f" {len(differences)}{middle}; only {other} trained: {only[0]},"
            f" only {arms[0]}: {only[1]}"
        )
    if len(every) < len(trials):
        texts.append(f"pruned, not counted: {len(trials) - len(every)} of {len(trials)} settings")
    return [line for text in texts for line in textwrap.wrap(text, COLUMNS, subsequent_indent="  ")]


def value_text(value: Any) -> str:
    """Return the value of a setting, rounded."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw(axes: "Axes", study: RecordedStudy) -> None:
    """Draw validation against learning rates: a point per run and a line per pair; diverged runs
    are crosses at the top."""
    every, measure = counted(study.trials), study.measure
    values = [[measure.convert(loss) for loss in losses(t)] for t in every]
    top = max((value for some in values for value in some), default=1.0)
    for t, both in zip(every, values, strict=True):
        if len(both) > 1:
            axes.plot([t["settings"][LR]] * len(both), both, color="k", alpha=0.25, linewidth=0.8)
    for i, arm in enumerate(arms_of(study.trials)):
        colour, good = COLOURS[i % len(COLOURS)], [t for t in every if trained(t, arm)]
        x = [t["settings"][LR] for t in good]
        y = [measure.convert(t["arms"][arm]["loss"]) for t in good]
        axes.scatter(x, y, color=colour, s=18, label=arm)
        if lost := [t["settings"][LR] for t in every if not trained(t, arm)]:
            height = [top * (1.06 + 0.04 * i)] * len(lost)
            name = f"{arm}, diverged"
            axes.scatter(lost, height, color=colour, marker="x", s=24, label=name)
    rates = [t["settings"][LR] for t in every]
    if rates and min(rates) > 0 and max(rates) / min(rates) > 20:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    format_axes(axes, "learning rate", measure)
