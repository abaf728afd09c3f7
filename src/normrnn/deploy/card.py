"""Model cards of runs and exports: Markdown with the front matter that model hubs read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from normrnn.config.base import Measure
from normrnn.config.jsonio import flat
from normrnn.config.registry import KIND, config_class, plain_values, with_values
from normrnn.errors import UserError
from normrnn.files import open_regular
from normrnn.norms import get_or_unknown, statistics_shown
from normrnn.runs.records import CONFIG, MODEL, Row, read_rows
from normrnn.runs.store import RunDirectory
from normrnn.terminal import one_line
from normrnn.version import __version__

SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors", "onnx": ".onnx", "program": ".pt2"}
CARD = "README.md"
_LARGEST_CARD = 1 << 20
_START = '---\nlibrary_name: "normrnn"\n'
_TAGS = 'tags: ["normrnn", "recurrent", "batch-normalization"]\n'
_EXPORTED = (
    f" Exported by normrnn {__version__} ([Laurent et al. 2015](https://arxiv.org/abs/1510.01378))."
)


@dataclass(frozen=True)
class ModelCard:
    """The content of a model card."""

    title: str
    sections: dict[str, str]  # Markdown by heading
    settings: Mapping[str, Any] = field(default_factory=dict)

    def card(self, load: str) -> str:
        """Return the Markdown of an export; `load` is code that loads it."""
        sections = {**self.sections, "How to load": f"```python\n{load.strip()}\n```"}
        sections["Model"] += _EXPORTED
        if self.settings:
            sections["Settings"] = f"```json\n{json.dumps(self.settings, indent=2)}\n```"
        return f"{_START}{_TAGS}---\n{ModelCard(self.title, sections).short()}"

    def short(self) -> str:
        """Return the Markdown without front matter, settings and code."""
        sections = [f"## {heading}\n{text}" for heading, text in self.sections.items()]
        return "\n\n".join([f"# {one_line(self.title)}", *sections]) + "\n"


def describe_run(run: RunDirectory) -> ModelCard:
    """Describe the best model of a run; UserError if its config is not its model's."""
    settings = plain_values(run.values())
    kind, norm = config_class(settings), get_or_unknown(settings["norm"])
    measure, is_function = kind.measure(flat(settings)), settings.get("kind") == KIND
    # The path of the data is private.
    settings["data"] = name = PurePath(str(settings.get("data", ""))).name
    saved = run.model_metadata.get("statistics", "running")
    kept = f" and {saved} statistics" if norm.keeps_statistics else ""
    weights = f"The best on validation, with its weights{kept}."
    if is_function:
        weights = "Its training function keeps the weights."
    elif not run.has(MODEL):
        weights = "No model yet: the first validation writes it."
    recipe, seed = settings["recipe"], settings["seed"]
    about = f"recipe {code(recipe)}, norm {code(norm.name)}, seed {seed}"
    noun = kind.noun.capitalize()
    sections = {"Model": f"{noun}, a {one_line(norm.words)}: {about}. {weights}"}
    if name:
        sections["Data"] = f"{code(name)}, sha256 {code(str(settings.get('data_sha256')))}"
    rows = with_values(settings, _rows(run, saved) if is_function or run.has(MODEL) else [])
    if results := [_result(settings, row, measure) for row in rows]:
        table = [["set", "statistics", one_line(measure.name), "scored"], ["---"] * 4, *results]
        sections["Results"] = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return ModelCard(f"{recipe}, {norm.name}, seed {seed}", sections, settings)


def _rows(run: RunDirectory, saved: str) -> list[Row]:
    """Return the best validation and the test after it, with the statistics of the saved model."""
    rows = [row for row in read_rows(run.path) if row.get("statistics") == saved]
    best = [{**row, "split": "valid"} for row in rows if row["split"] == "best_valid"][-1:]
    valid = best or [row for row in rows if row["split"] == "valid"]
    test = [row for row in rows if row["split"] == "test"]
    return sorted(valid, key=lambda row: row["loss"])[:1] + test[-1:]


def _result(settings: Mapping[str, Any], row: Row, measure: Measure) -> list[str]:
    """Return a row of the table: set, statistics, value of the measure, number of targets."""
    text = measure.text(row["loss"])
    if measure.error_rate and isinstance(rate := row.get(measure.error_rate[0]), float):
        text += f", {100 * rate:.1f} % errors"
    names = one_line(row["split"]), one_line(str(statistics_shown(settings, row)))
    return [*names, text, f"{int(float(row['count'])):,}"]


def code(text: str) -> str:
    """Return text from a file as a code span."""
    return f"`{one_line(text).replace('`', ' ')}`"


def info(path: Path) -> str:
    """Return what is said of a run, or the card of an export, of which nothing else is read.

    An export is given by its file, its directory or its card. UserError for a path that is neither.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    folder = path if path.is_dir() else path.parent
    if (folder / CONFIG).exists():
        return describe_run(RunDirectory(folder)).short()
    own = [] if path.is_dir() else [path.with_suffix(".md")]
    for card in map(read_card, [*own, folder / CARD]):
        if card is not None:
            return card
    raise UserError(f"{path} is neither a run nor an export with its card")


def read_card(path: Path) -> str | None:
    """Return a model card; None if there is no such file, or if it is not a card."""
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            text = file.read(_LARGEST_CARD).decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    return text if text.startswith(_START) else None
