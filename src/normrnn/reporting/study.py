"""A search on disk: `trials.jsonl`, a row per trial, and `study.json`, its plan."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normrnn.errors import UserError, notice
from normrnn.files import (
    BLANK,
    ROWS,
    is_sealed,
    read_regular,
    resolved,
    sealed,
    sealed_json,
    write_whole,
)
from normrnn.recipes.paper import PAPER, Paper
from normrnn.reporting.runs import inside
from normrnn.reporting.tables import as_markdown
from normrnn.reporting.trials import LR, Trial, arms_of, best, is_number, lines, table

TRIALS, ABOUT = "trials.jsonl", "study.json"
SAID = "sentence"
"""Key of a plan: the chosen values and the work behind them, as text."""


@dataclass(frozen=True)
class RecordedStudy:
    """The trials of a search, and a problem with its files."""

    path: Path
    trials: list[Trial]
    about: dict[str, Any] = field(default_factory=dict)
    """The plan: study, trials, space, norms, sampler, pruner, config; empty if not recorded."""
    problem: str = ""
    verified: bool = True
    """Whether checksums cover the files."""

    @property
    def name(self) -> str:
        """Name of the directory."""
        return resolved(self.path).name

    @property
    def recipe(self) -> str:
        """Name of the recipe, if recorded."""
        return str(self.about.get("config", {}).get("recipe", ""))

    @property
    def said(self) -> str:
        """Text on the chosen values, if recorded."""
        said = self.about.get(SAID, "")
        return said if isinstance(said, str) else ""

    @property
    def paper(self) -> Paper | None:
        """The paper's search that this one repeats."""
        paper = PAPER.get(self.recipe)
        return paper if paper and paper.settings else None

    @property
    def drawable(self) -> bool:
        """Whether every trial has a learning rate."""
        return bool(self.trials) and all(is_number(t["settings"].get(LR)) for t in self.trials)

    @property
    def title(self) -> str:
        """Title of the study."""
        return f"Study {self.name}" + (f" of {self.recipe}" if self.recipe else "")

    @property
    def state(self) -> str:
        """Whether it is damaged or unfinished, as text; empty if neither."""
        if self.problem:
            return self.problem + ("; the trials before that are shown" if self.trials else "")
        asked, done = self.about.get("trials"), len(self.trials)
        unfinished = isinstance(asked, int) and done < asked
        return f"is not finished: {done} of {asked} trials are done" if unfinished else ""

    @property
    def budget(self) -> str:
        """Number of settings, runs, updates and seconds, as far as recorded."""
        arms = [found for t in self.trials for found in t["arms"].values()]
        parts = [f"{len(self.trials)} settings, {len(arms)} runs"]
        for key in ("updates", "seconds"):
            values = [found.get(key) for found in arms]
            if total := sum(v for v in values if is_number(v)):
                parts.append(f"{total:,.0f} {key}")
        about = [(k, self.about.get(k)) for k in ("sampler", "pruner")]
        parts += [f"{key} {value}" for key, value in about if value]
        return ", ".join(parts)

    def markdown(self) -> str:
        """Return a summary for a results page."""
        shown, said = table(self.trials, paper=self.paper), as_markdown(self.said)
        answer = "\n".join(["```", *lines(self.trials), "```"])
        parts = [said, answer, shown.markdown(), shown.note]
        return "\n\n".join(part for part in parts if part) + "\n"

    def runs(self) -> list[Path]:
        """List the run directories beside the trials and of the best trials."""
        found = sorted(p.parent for p in self.path.glob("*/config.json"))
        tops = [best(self.trials, arm) for arm in arms_of(self.trials)]
        for number in dict.fromkeys(t["trial"] for t in tops if t is not None):
            found += sorted(p.parent for p in self.path.glob(f"trials/{number:04d}/*/config.json"))
        return found


def read_study(path: Path) -> RecordedStudy:
    """Read the valid part of a study's directory."""
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
    about = about if known else {}
    about.pop("sha256", None)
    return RecordedStudy(path, trials, about, problem or wrong or unreadable, sure and certain)


def find_studies(paths: Sequence[Path]) -> tuple[list[RecordedStudy], list[Path]]:
    """Read studies in or directly inside these directories; also return where runs may be."""
    found: dict[Path, RecordedStudy] = {}
    rest = []
    for path in paths:
        below = sorted(p.parent for p in path.glob(f"*/{TRIALS}"))
        own = (path / TRIALS).is_file()
        for one in [path] if own else below:
            if resolved(one) not in found:
                study = found[resolved(one)] = read_study(one)
                rest += study.runs()
        if not own and (not below or inside(path)):
            rest.append(path)
    for study in found.values():
        if not (study.path / ABOUT).exists():
            notice(f"{study.path / ABOUT} is missing; the search space is left out")
        if not study.verified:
            notice(f"{study.path} has no checksums: not verified")
    return list(found.values()), rest


def _content(path: Path) -> tuple[bytes, str, bool]:
    """Read a file: content, problem, and whether a checksum covers it."""
    try:
        content = read_regular(path, ROWS)
        return content, "", is_sealed(content, path)
    except OSError as error:
        return b"", f"cannot be read: {error.strerror}", True
    except UserError:
        return b"", f"is damaged: {path.name} has a wrong checksum", True


def _trials(content: bytes) -> tuple[list[Trial], str]:
    """Return the rows up to the first invalid one, and its problem."""
    trials: list[Trial] = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        trial: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            trial = json.loads(line)
        if not _is_trial(trial):
            return trials, f"is damaged: line {number} of {TRIALS} is not a trial"
        trial.pop("sha256", None)
        trials.append(trial)
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
    return arm["diverged"] or all(is_number(arm.get(key)) for key in ("loss", "train"))


def _sealed_rows(trials: Sequence[Trial]) -> bytes:
    """Return a line per trial; the first holds the checksum."""
    rows = [{"sha256": BLANK, **trials[0]}, *trials[1:]] if trials else []
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    return sealed(text) if rows else b""


def write(study: RecordedStudy) -> None:
    """Write trials.jsonl and study.json."""
    study.path.mkdir(parents=True, exist_ok=True)
    write_whole(study.path / TRIALS, _sealed_rows(study.trials))
    write_whole(study.path / ABOUT, sealed_json(study.about))
