"""A run directory as plain data."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normrnn.errors import UserError

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """`config.json` and the complete rows of `metrics.jsonl`."""

    path: Path
    config: dict[str, Any]
    rows: list[Row]

    @property
    def norm(self) -> str:
        """The arm of the comparison."""
        return self.config["norm"]

    @property
    def label(self) -> str:
        """Arm and seed."""
        return f"{'baseline' if self.norm == 'none' else self.norm}, seed {self.config['seed']}"

    def split(self, name: str, statistics: str | None = None) -> list[Row]:
        """Rows of one split, and of one kind of statistics if given."""
        wanted = (None, statistics) if statistics is None else (statistics,)
        return [
            row
            for row in self.rows
            if row["split"] == name and (statistics is None or row.get("statistics") in wanted)
        ]


def load(path: str | Path) -> Run:
    """Read a run directory, finished, running or broken off; a torn last line is left out."""
    path = Path(path)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{path} is no run directory: config.json is missing or damaged") from None
    return Run(path, config, read_rows(path / "metrics.jsonl"))


def read_rows(path: Path) -> list[Row]:
    """The complete rows of a metrics file; none if there is no file yet."""
    if not path.exists():
        return []
    *complete, _torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        return [json.loads(line) for line in complete]
    except ValueError:
        raise UserError(f"{path} is damaged: not one JSON object a line") from None
