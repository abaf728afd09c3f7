"""What studies measure of runs, kept as JSON when the runs are gone."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from normrnn.reporting.tables import Table

Record = dict[str, Any]
Key = Callable[[Record], tuple[Any, ...]]


def by_kind(records: Sequence[Record], kind: Key) -> list[tuple[tuple[Any, ...], list[Record]]]:
    """Those of a kind together, in the order of their kinds."""
    kinds: dict[tuple[Any, ...], list[Record]] = {}
    for one in records:
        kinds.setdefault(kind(one), []).append(one)
    return sorted(kinds.items())


def command(
    about: str | None,
    measuring: Callable[[str], Callable[[Path], Record]],
    kind: Key,
    tables: Callable[[Sequence[Record]], Sequence[Table]],
    arguments: Sequence[str] | None = None,
) -> None:
    """`RUN... --data DIR --output FILE`: measures runs with that data, writes their records and
    prints the tables. What the file holds of others stays; a run is known by kind and seed."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    old = given.output.read_text(encoding="utf-8") if given.output.exists() else "[]"
    measure = measuring(given.data)
    every = (*json.loads(old), *map(measure, given.runs))
    latest = {(kind(one), one["seed"]): one for one in every}
    records = [latest[key] for key in sorted(latest)]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    for found in tables(records):
        print(found.markdown(), end="\n\n")
