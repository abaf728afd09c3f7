"""Read a run directory as plain data, finished, running or damaged."""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from normrnn import files
from normrnn.config.base import Measure, normalise_gamma
from normrnn.config.jsonio import flat, to_dict
from normrnn.config.registry import KIND, config_class, with_values
from normrnn.errors import UserError, notice
from normrnn.norms import Norm, get_or_unknown
from normrnn.recipes import RECIPES, recipe
from normrnn.runs import records
from normrnn.runs.records import CONFIG, ENVIRONMENT, Row


@dataclass(frozen=True, repr=False)
class Run:
    """`config.json` and the complete rows of `metrics.jsonl`.

    `environments` is where it ran, from `environment.json`: empty if that was not recorded.
    """

    path: Path
    recipe: str
    norm: str
    seed: int
    config: dict[str, Any]
    rows: list[Row]
    environments: list[dict[str, Any]] = field(default_factory=list)
    training: bool = False  # a process was training in the directory when it was read
    diverged: str = ""  # the error of a run that ended with a loss that was not finite
    problem: str = ""  # what is wrong with its rows: those before that are there
    notices: tuple[str, ...] = ()  # what is missing and does not affect the numbers
    verified: bool = True  # checksums cover all files
    ended: bool | None = None  # as its checkpoint says; None without a checkpoint

    @property
    def label(self) -> str:
        """Normalisation and seed."""
        return f"{self.norm}, seed {self.seed}"

    @cached_property
    def normalisation(self) -> Norm:
        """The entry of its norm, or a placeholder for a norm that is not registered."""
        return get_or_unknown(self.norm)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config with dotted names; missing fields have the recipe's defaults."""
        known = self.recipe in RECIPES
        defaults = to_dict(type(recipe(self.recipe))(recipe=self.recipe)) if known else {}
        return normalise_gamma({**flat(defaults), **flat(self.config)})

    @property
    def measure(self) -> Measure:
        """The measure of its task."""
        return config_class(self.config).measure(self.settings)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done: as its checkpoint says, else as the rows show."""
        if self.ended is not None:
            return self.ended
        return bool(self.split("test")) or self.epochs_done == self.settings.get("epochs")

    @property
    def epochs_done(self) -> float:
        """Number of validated epochs, and parts of the last one; of a training function, calls of
        `log`."""
        last = self.rows[-1]["epoch"] if self.rows else 0
        if self.ended or self.split("test") or self.config.get("kind") == KIND:
            return last
        parts = self.settings.get("train.segments")
        done = len({row["updates"] for row in self.split("valid")})
        return done / parts if isinstance(parts, int) and parts > 0 else done

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self.rows[-1]["updates"] if self.rows else 0

    @property
    def seconds(self) -> float:
        """Seconds spent in updates so far."""
        return self.rows[-1]["seconds"] if self.rows else 0.0

    @cached_property
    def selected_by(self) -> str:
        """Statistics that select the model: recalibrated if the run has no running ones."""
        recalibrated = self.split("valid", "recalibrated") and not self.split("valid", "running")
        return "recalibrated" if recalibrated else "running"

    @cached_property
    def saved_statistics(self) -> str:
        """The kind of statistics that the selected model was saved with."""
        saved = [row for row in self.rows if row.get("saved") is True]
        if not saved:  # not recorded: the better kind on validation data, at its best update
            at = (self.best() or {}).get("updates")
            rows = [row for row in self.split("valid") if row["updates"] == at]
            rows = [row for row in rows if row.get("statistics") != "batch"]
            saved = sorted(rows, key=lambda r: (r["loss"], r.get("statistics") != self.selected_by))
        return saved[0].get("statistics", self.selected_by) if saved else self.selected_by

    @property
    def progress(self) -> str:
        """Epochs done of those requested."""
        if self.diverged:
            return f"diverged after {self.updates:,} updates"
        if not self.epochs_done:
            return f"{self.updates:,} updates"
        asked = self.settings.get("epochs")
        return f"{self.epochs_done:g} of {asked}" if asked else f"{self.epochs_done:g} log calls"

    def best(self, statistics: str | None = None, key: str = "loss") -> Row | None:
        """Return the validation row with the lowest loss, or lowest value of another key."""
        rows = self.split("valid", statistics or self.selected_by)
        rows = [row for row in rows if type(row.get(key)) in (int, float)]
        return min(rows, key=lambda row: row[key], default=None)

    def frame(self) -> Any:
        """Return the rows as a DataFrame; pandas is needed."""
        from pandas import DataFrame  # type: ignore[import-not-found]

        return DataFrame(self.rows)

    def __repr__(self) -> str:
        return f"<Run {self.path.name!r}: {self.recipe} {self.label}, {self.updates:,} updates>"

    def split(self, name: str, statistics: str | None = None) -> list[Row]:
        """Return the rows of a split, and of one kind of statistics if given."""
        return [
            row
            for row in self.rows
            if row["split"] == name and statistics in (None, row.get("statistics"))
        ]


RunsLike = str | Path | Run | Iterable[str | Path | Run]
"""Run directories, directories that hold some, or loaded runs: one or several."""


def load(path: str | Path) -> Run:
    """Read a run directory, finished or not; an incomplete last row is left out.

    The run's `config` is a plain dict, its `rows` a list of plain dicts as in metrics.jsonl.
    """
    run = examine(Path(path))
    if run.problem:
        raise UserError(run.problem)
    _notify([run])
    return run


def load_all(runs: RunsLike) -> list[Run]:
    """Load the runs that are given as paths; UserError if one of them is damaged."""
    several = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    found, problems = find([Path(one) for one in several if not isinstance(one, Run)])
    if problems:
        raise UserError("; ".join(problems))
    return [*(one for one in several if isinstance(one, Run)), *found]


def find(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs in these directories, or one or two levels inside them, each once.

    Return the runs, and every problem: of runs of which a part is damaged, and of directories that
    are left out.
    """
    runs: list[Run] = []
    problems, seen = [], set()
    for path in paths:
        if not path.is_dir():
            what = "is a file, not a run directory" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}")
        for one in ([] if (path / CONFIG).exists() else find_run_directories(path)) or [path]:
            if files.resolved(one) not in seen:
                seen.add(files.resolved(one))
                try:
                    runs.append(examine(one))
                except UserError as error:
                    problems.append(str(error))
    _notify(runs)
    return runs, problems + [run.problem for run in runs if run.problem]


def find_run_directories(path: Path) -> list[Path]:
    """List runs one or two levels inside a directory, but not inside another run."""
    first, second = (sorted(p.parent for p in path.glob(f"{d}/{CONFIG}")) for d in ("*", "*/*"))
    return first + [run for run in second if run.parent not in first]


def _notify(runs: Sequence[Run]) -> None:
    for text in (text for run in runs for text in run.notices):
        notice(text)
    if bare := sum(not run.verified for run in runs):
        notice(f"{bare} of {len(runs)} runs have no checksums: not verified")


def examine(path: Path) -> Run:
    """Read the valid part of a run directory; UserError if nothing there can be relied on."""
    config = _config(path / CONFIG)
    if config is None:
        is_empty = path.is_dir() and not any(path.iterdir())
        why = "it is empty" if is_empty else f"{CONFIG} is missing or damaged"
        raise UserError(f"{path} is not a run directory: {why}")
    rows, problem, verified = records.read_metrics(path)
    note = records.read_note(path)
    changes = None if note is None else records.changed_fields(note.config, config)
    if changes:
        raise UserError(f"{path} is damaged or edited: {changes}")
    environments, notices, has_checksum = [], [], True
    try:
        environments, has_checksum = files.read_json(path / ENVIRONMENT, list)
    except FileNotFoundError:
        if changes is not None and config.get("kind") != KIND:
            notices.append(f"{path / ENVIRONMENT} is missing; versions and machine are left out")
    except UserError as damage:
        notices.append(f"{damage}; versions and machine are left out")
    verified = verified and has_checksum and changes is not None
    # Names that are not UTF-8 cannot be printed.
    config = json.loads(json.dumps(config, ensure_ascii=False).encode(errors="replace"))
    problem = f"{path} is damaged: {problem}" if problem else ""
    diverged = ""
    with contextlib.suppress(OSError), files.open_regular(path / records.DIVERGED) as file:
        diverged = file.read(200).decode(errors="replace").strip()
    return Run(
        path,
        *(config.get("recipe", ""), config["norm"], config["seed"]),
        config,
        with_values(config, rows),
        environments,
        files.is_held(path / records.LOCK),
        diverged,
        problem,
        tuple(notices),
        verified,
        None if note is None else note.finished > 0,
    )


def _config(path: Path) -> dict[str, Any] | None:
    """Read a config.json; None if it is invalid or lacks norm or seed."""
    try:
        config = json.loads(files.read_regular(path))
        fields = flat(config) if isinstance(config, dict) else {}
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"norm": str, "seed": int}
    if not all(isinstance(fields.get(name), kind) for name, kind in kinds.items()):
        return None
    values = [one for v in fields.values() for one in (v if isinstance(v, list) else [v])]
    plain = all(isinstance(value, str | int | float | None) for value in values)
    return config if plain and isinstance(config.get("recipe", ""), str) else None
