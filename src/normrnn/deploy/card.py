"""Model cards of runs and exports: Markdown with the front matter that model hubs read."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from normrnn.config.jsonio import to_dict
from normrnn.config.measure import Measure
from normrnn.errors import UserError, notice
from normrnn.files import open_regular
from normrnn.norms import statistics_shown
from normrnn.runs.names import CONFIG, EVALUATION, MODEL
from normrnn.runs.note import config_changes
from normrnn.runs.rows import Row, read_rows
from normrnn.runs.store import RunDirectory
from normrnn.seal import read_json
from normrnn.version import __version__

SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors", "onnx": ".onnx", "program": ".pt2"}
CARD = "README.md"
_LARGEST_CARD = 1 << 20
PAPER = "https://arxiv.org/abs/1510.01378"


@dataclass(frozen=True)
class About:
    """The content of a model card."""

    title: str
    summary: str
    task: str = ""
    """As model hubs call it."""
    dataset: str = ""
    data_sha256: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    measure: str = ""
    results: Sequence[Sequence[str]] = ()
    """Rows of the table: set, statistics, value of the measure, number of targets."""

    def card(self, load: str = "") -> str:
        """Return the Markdown; `load` is code that loads the export."""
        sections = self._sections(exported=bool(load))
        if load:
            sections["How to load"] = f"```python\n{load.strip()}\n```"
        if self.settings:
            sections["Settings"] = f"```json\n{json.dumps(self.settings, indent=2)}\n```"
        return f"{self._front()}\n{self._body(sections)}"

    def short(self) -> str:
        """Return the Markdown without front matter and settings."""
        return self._body(self._sections(exported=False))

    def _sections(self, exported: bool) -> dict[str, str]:
        by = f" Exported by normrnn {__version__} ([Laurent et al. 2015]({PAPER}))."
        sections = {"Model": self.summary + (by if exported else "")}
        if self.dataset:
            sections["Data"] = f"{code(self.dataset)}, sha256 {code(self.data_sha256)}"
        if self.results:
            sections["Results"] = self._table()
        return sections

    def _body(self, sections: Mapping[str, str]) -> str:
        body = "\n\n".join(f"## {heading}\n{text}" for heading, text in sections.items())
        return f"# {one_line(self.title)}\n\n{body}\n"

    @staticmethod
    def is_card(text: str) -> bool:
        """Whether a text is such a card."""
        return text.startswith('---\nlibrary_name: "normrnn"\n')

    def _front(self) -> str:
        """Return the front matter; JSON is valid YAML and quotes any name."""
        front: dict[str, Any] = {
            "library_name": "normrnn",
            "tags": ["normrnn", "recurrent", "batch-normalization"],
        }
        if self.task:
            front["pipeline_tag"] = self.task
        lines = (f"{name}: {json.dumps(value)}" for name, value in front.items())
        return "\n".join(["---", *lines, "---"])

    def _table(self) -> str:
        rows = [["set", "statistics", self.measure, "scored"], ["---"] * 4, *self.results]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def of_run(run: RunDirectory) -> About:
    """Describe the best model of a run; UserError if its config is not its checkpoint's."""
    config = run.config()
    _check(run)
    settings = to_dict(config)
    # The path of the data is private.
    settings["data"] = name = PurePath(config.data).name
    measure, norm = config.loss_measure, config.normalisation
    saved = run.model_metadata.get("statistics", "running")
    kept = f" and {saved} statistics" if norm.keeps_statistics else ""
    weights = f"The best on validation, with its weights{kept}."
    if not run.has(MODEL):
        weights = "No model yet: the first validation writes it."
    recipe = f"recipe {code(config.recipe)}, norm {code(config.norm)}, seed {config.seed}"
    return About(
        title=f"{config.recipe}, {norm.name}, seed {config.seed}",
        summary=(f"{type(config).noun.capitalize()}, a {norm.words}: {recipe}. {weights}"),
        task=type(config).hub_task,
        dataset=name,
        data_sha256=config.data_sha256,
        settings=settings,
        measure=measure.name,
        results=[_result(settings, row, measure) for row in _rows(run, saved)],
    )


def _check(run: RunDirectory) -> None:
    changes = config_changes(run.path, json.loads(run.read(CONFIG)))
    if changes:
        raise UserError(f"{run.path}: {changes}; restore it")
    if changes is None:
        notice(f"{run.path} has no checksum of its {CONFIG}: not verified")


def _rows(run: RunDirectory, saved: str) -> list[Row]:
    """Rows of evaluation.json, else the best validation in training and the test after it."""
    if run.has(EVALUATION):
        path = run.path / EVALUATION
        evaluation, _ = read_json(path)
        try:
            rows = [row for row in evaluation["rows"] if _is_row(row)]
            # Only rows of the exported network: with other statistics it is another one.
            rows = [row for row in rows if row["statistics"] == saved]
            current = evaluation.get("model_sha256") == run.model_metadata.get("sha256")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise UserError(f"{path} is damaged") from None
        if current:
            return rows
        notice(f"{path} is of an older model: left out; run `normrnn evaluate` again")
    rows = [row for row in read_rows(run.path) if row.get("statistics") == saved]
    valid = [row for row in rows if row["split"] == "best_valid"]
    valid = [{**valid[-1], "split": "valid"}] if valid else _of(rows, "valid")
    if valid and not run.has(MODEL):
        notice(f"{run.path / MODEL} is missing; its figures are left out")
    best = [min(valid, key=lambda row: row["loss"])] if valid and run.has(MODEL) else []
    return best + _of(rows, "test")[-1:]


def _of(rows: list[Row], split: str) -> list[Row]:
    return [row for row in rows if row["split"] == split]


def _is_row(row: Any) -> bool:
    numbers = [row[name] for name in ("loss", "count")]
    are_finite = all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
    return are_finite and isinstance(row["split"], str)


def _result(settings: Mapping[str, Any], row: Row, measure: Measure) -> list[str]:
    text = measure.text(row["loss"])
    text += ", read as one stream" if row.get("streams") == 1 else ""
    if measure.error_rate and isinstance(rate := row.get(measure.error_rate[0]), float):
        text += f", {100 * rate:.1f} % errors"
    names = one_line(row["split"]), one_line(str(statistics_shown(settings, row)))
    return [*names, text, f"{int(row['count']):,}"]


def one_line(text: str) -> str:
    """Return text from a file as one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)


def code(text: str) -> str:
    """Return text from a file as a code span."""
    return f"`{one_line(text).replace('`', ' ')}`"


def info(path: Path, settings: bool = False) -> str:
    """Return the card of a run or an export as Markdown, of a run with its settings if asked.

    Of an export only the card beside it is read. UserError for a path that is neither.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    folder = path if path.is_dir() else path.parent
    if (folder / CONFIG).exists():
        about = of_run(RunDirectory(folder))
        return about.card() if settings else about.short()
    if path.is_dir():
        cards = [path / CARD]
    elif path.suffix in SUFFIXES.values():
        cards = [path.with_suffix(".md"), folder / CARD]
    else:
        cards = [path]
    for card in cards:
        if card.exists() and About.is_card(text := _read(card)):
            return text
    raise UserError(f"{path} is neither a run nor an export with its card ({cards[0].name})")


def _read(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read(_LARGEST_CARD).decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
