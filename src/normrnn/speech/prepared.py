"""The files of a directory of prepared speech.

    train, dev       feats.scp feats.ark labels.scp labels.ark utt2spk text utt2num_frames
    summary.json     what it is and how it was made; written last: without it, not finished
    statistics.json  mean and variance of the training features, label counts
    skipped.tsv      utterance, reason

`preparation` writes it, `speech` reads it. Features are not normalised.
"""

import json
from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.files import write_whole

FORMAT = "normrnn speech 1"
SPLITS = ("train", "dev")
SUMMARY = "summary.json"
STATISTICS = "statistics.json"
SKIPPED = "skipped.tsv"


def read_summary(path: Path) -> dict[str, Any]:
    """What a finished directory says about itself."""
    if not (path / SUMMARY).is_file():
        raise UserError(
            f"{path} is no finished directory of prepared speech: it has no {SUMMARY}"
            " (normrnn prepare librispeech or kaldi makes one)"
        )
    summary = read_json(path / SUMMARY)
    if summary.get("format") != FORMAT:
        raise UserError(f"{path / SUMMARY} is of format {summary.get('format')!r}, not {FORMAT!r}")
    return summary


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} lacks {path.name}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is damaged: not JSON") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: no JSON object")
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """A JSON file, replaced whole or not at all."""
    write_text(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """A text file, replaced whole or not at all."""
    write_whole(path, text.encode())
