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
LARGEST_LABEL = "the largest label"
MOST_CLASSES = 1 << 20
"""Limit, because memory is allocated for so many."""


def read_alignments(path: Path, classes: int | None = None) -> Labels:
    """Read all labels of a directory's archives, or of one archive.

    Transition-ids count from 1 and exceed the number of pdfs; UserError for labels that do, unless
    the number of `classes` is given and the model does not contradict.
    """
    labels: Labels = {}
    files = _archives(path)
    for file in files:
        for key, values in read_vectors(file):
            if key in labels:
                raise UserError(f"{file} has an alignment of {key} a second time")
            labels[key] = values
    filled = [values for values in labels.values() if len(values)]
    if not filled:
        raise UserError(f"{path} holds no alignments: {files[0]} is empty")
    pdfs = _model_pdfs(path) or classes
    exceeds = pdfs is None or max(int(values.max()) for values in filled) >= pdfs
    if exceeds and min(int(values.min()) for values in filled) >= 1:
        folder = path if path.is_dir() else path.parent
        raise UserError(
            f"{path} holds transition-ids, not pdf-ids: they count from 1; run"
            f' ali-to-pdf {folder}/final.mdl "ark:gunzip -c {folder}/ali.*.gz |"'
            f" ark:{folder}/pdf.ark and start again, or give --classes"
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
