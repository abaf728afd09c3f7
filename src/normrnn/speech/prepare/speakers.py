"""Choice of the development speakers."""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from normrnn.errors import UsageError, UserError
from normrnn.files import read_text


def choose_dev(
    speakers: Collection[str],
    listed: Path | None,
    fraction: float,
    problems: Sequence[str] = (),
) -> set[str]:
    """Return the development speakers: those listed in a file, or a fraction of all.

    The fraction takes the speakers whose names have the smallest hashes: the same on every machine.
    `problems` say why other speakers are left out.
    """
    if listed is not None:
        return _read_listed(set(speakers), listed)
    if not 0 < fraction < 1:
        raise UsageError(f"--dev-fraction must lie between 0 and 1, not {fraction}")
    if len(speakers) < 2:
        why = f" ({len(problems):,} utterances are of no use: {problems[0]})" if problems else ""
        count = "is 1 speaker" if speakers else "are no speakers"
        raise UserError(f"there {count}{why}; train and dev need one each at the least")
    count = min(max(round(fraction * len(speakers)), 1), len(speakers) - 1)
    return set(sorted(speakers, key=lambda name: hashlib.sha256(name.encode()).digest())[:count])


def dev_settings(dev: Collection[str], listed: Path | None, fraction: float) -> dict[str, Any]:
    """Return the choice, for the settings of a preparation."""
    if listed is None:
        return {"dev_fraction": fraction}
    return {"dev_speakers": " ".join(sorted(dev))}


def _read_listed(speakers: set[str], listed: Path) -> set[str]:
    dev = set(read_text(listed).split())
    if not dev:
        raise UserError(f"{listed} names no speaker")
    if unknown := sorted(dev - speakers):
        raise UserError(f"{listed} names speakers that are not in the data: {', '.join(unknown)}")
    if dev == speakers:
        raise UserError(f"{listed} names every speaker; train needs one at the least")
    return dev
