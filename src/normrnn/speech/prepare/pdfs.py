"""Alignments at the level of pdfs, as Kaldi's `ali-to-pdf` writes them."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UsageError, UserError
from normrnn.files import ROWS, read_regular
from normrnn.speech.archive import read_vectors, whole_number

Labels = dict[str, NDArray[np.int32]]

# Output of ali-to-pdf first: an alignment directory also has transition-ids.
PATTERNS = ("pdf*.ark", "pdf*.gz", "ali.*.ark", "ali.*.gz", "*.ark", "*.gz")
_NUM_PDFS = re.compile(rb"<NUMPDFS> (?:\x04(....)|(\d{1,10})\s)", re.DOTALL)
_NEAR = 4  # ids of the transitions of one state follow each other; Kaldi's silence has most
_SHARE = 0.75
LARGEST_LABEL = "the largest label"
MOST_CLASSES = 1 << 20
"""Limit, because memory is allocated for so many."""


def read_alignments(path: Path) -> Labels:
    """Read all labels of a directory's archives, or of one archive."""
    labels: Labels = {}
    files = _archives(path)
    for file in files:
        for key, values in read_vectors(file):
            if key in labels:
                raise UserError(f"{file} has an alignment of {key} a second time")
            labels[key] = values
    if not any(map(len, labels.values())):
        raise UserError(f"{path} holds no alignments: {files[0]} is empty")
    if _transition_ids(path, labels):
        folder = path if path.is_dir() else path.parent
        raise UserError(
            f"{path} holds transition-ids, not pdf-ids; run"
            f' ali-to-pdf {folder}/final.mdl "{_rspecifier(files)}" ark:{folder}/pdf.ark'
            " and start again"
        )
    return labels


def class_count(given: int | None, alignments: Mapping[Path, Labels]) -> tuple[int, str]:
    """Return the number of pdfs and its source: the option, the model, or the largest label."""
    if given is not None:
        if not 1 <= given <= MOST_CLASSES:
            raise UsageError(f"--classes must lie between 1 and {MOST_CLASSES:,}, not {given:,}")
        return given, "--classes"
    for path in alignments:
        if (count := _model_pdfs(path)) is not None:
            if not 1 <= count <= MOST_CLASSES:
                raise UserError(
                    f"the model beside {path} declares {count:,} classes; between 1 and"
                    f" {MOST_CLASSES:,} are possible; --classes sets the number"
                )
            return count, "the alignment directory's model"
    largest, whose = max(
        (int(values.max()), key)
        for labels in alignments.values()
        for key, values in labels.items()
        if len(values)
    )
    if largest >= MOST_CLASSES:
        raise UserError(
            f"the alignment of {whose} has the label {largest:,}; at most {MOST_CLASSES:,} classes"
            " are possible; --classes sets the number"
        )
    return largest + 1, LARGEST_LABEL


def _archives(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} does not exist; --ali needs a directory with pdf-level alignments")
    for pattern in PATTERNS:
        if files := sorted(path.glob(pattern), key=_natural):
            return files
    raise UserError(f"{path} holds no alignments: none of {', '.join(PATTERNS)} in it")


def _natural(path: Path) -> list[int | str]:
    """Return a sort key with ali.2.gz before ali.10.gz."""
    parts = re.split(r"([0-9]{1,18})", path.name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _model_pdfs(path: Path) -> int | None:
    """Read the number of pdfs from `num_pdfs` or a Gaussian `final.mdl`."""
    folder = path if path.is_dir() else path.parent
    if (folder / "num_pdfs").is_file():
        text = read_regular(folder / "num_pdfs").decode("utf-8", "replace").strip()
        if (count := whole_number(text)) is not None:
            return count
    if (folder / "final.mdl").is_file():
        match = _NUM_PDFS.search(read_regular(folder / "final.mdl", ROWS))
        if match:
            return int.from_bytes(match[1], "little") if match[1] else int(match[2])
    return None


def _rspecifier(files: list[Path]) -> str:
    if len(files) == 1 and files[0].suffix != ".gz":
        return f"ark:{files[0]}"
    program = "gunzip -c" if files[0].suffix == ".gz" else "cat"
    if len(files) == 1:
        return f"ark:{program} {files[0]} |"
    pattern = next(p for p in PATTERNS if all(file.match(p) for file in files))
    return f"ark:{program} {files[0].parent}/{pattern} |"


def _transition_ids(path: Path, labels: Labels) -> bool:
    """Return whether these are transition-ids.

    They count from 1 and exceed the number of pdfs, where that is known. And they have a pattern: a
    stay in a state is one frame of the transition that leaves it and, before or after that, any
    number of frames of its self-loop, whose id is near.
    """
    filled = [values for values in labels.values() if len(values)]
    if not filled or min(int(values.min()) for values in filled) < 1:
        return False
    pdfs = _model_pdfs(path)
    if pdfs is not None and max(int(values.max()) for values in filled) >= pdfs:
        return True
    long_runs, after, before = 0, 0, 0
    for values in filled:
        edges = np.flatnonzero(np.diff(values)) + 1
        starts = np.concatenate([[0], edges])
        lengths = np.diff(np.concatenate([starts, [len(values)]]))
        ids = values[starts]
        near = np.abs(np.diff(ids)) <= _NEAR
        long_runs += int((lengths > 1).sum())
        after += int(((lengths[1:] > 1) & (lengths[:-1] == 1) & near).sum())
        before += int(((lengths[:-1] > 1) & (lengths[1:] == 1) & near).sum())
    return long_runs > 0 and max(after, before) >= _SHARE * long_runs
