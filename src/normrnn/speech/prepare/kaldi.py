"""Kaldi's data and alignment directories as utterances to prepare."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UsageError, UserError
from normrnn.files import ROWS, read_regular
from normrnn.speech.archive import locate, read_matrix, read_table, read_vectors
from normrnn.speech.prepare.features import add_deltas
from normrnn.speech.prepare.job import Job, Prepared, Utterance, fingerprint, split_speakers

Labels = dict[str, NDArray[np.int32]]
_NUM_PDFS = re.compile(rb"<NUMPDFS> (?:\x04(....)|(\d{1,10})\s)", re.DOTALL)
MOST_CLASSES = 1 << 20  # limit, because memory is allocated for so many


def kaldi_job(
    data: Path,
    ali: Path,
    dev_data: Path | None,
    dev_ali: Path | None,
    deltas: bool,
    classes: int | None,
    dev_speakers: Path | None,
    dev_fraction: float,
) -> Job:
    """Return the preparation of a data directory and its alignments; without those of dev,
    speakers are split."""
    if (dev_data is None) != (dev_ali is None) or (dev_data and dev_speakers):
        raise UsageError("--dev-data and --dev-ali go together, and without --dev-speakers")
    count = count_classes(ali, classes)
    utterances = _utterances(data, ali, count)
    settings = {"kind": "kaldi", "targets": "pdf", "classes": count, "deltas": deltas}
    if dev_data is None or dev_ali is None:
        utterances = split_speakers(utterances, dev_speakers, dev_fraction)
    else:
        utterances += [replace(u, split="dev") for u in _utterances(dev_data, dev_ali, count)]
        if len({u.key for u in utterances}) < len(utterances):
            raise UserError(f"{data} and {dev_data} have utterances in common")
        utterances.sort(key=lambda u: u.key)
    settings["data"] = fingerprint(utterances)
    return Job(settings, utterances, partial(read_prepared, deltas=deltas), count)


def read_prepared(utterance: Utterance, deltas: bool) -> Prepared:
    """Read the features of an utterance, add deltas on request."""
    features = read_matrix(utterance.path, utterance.offset)
    return add_deltas(features) if deltas else features, utterance.labels


def _utterances(data: Path, ali: Path, classes: int) -> list[Utterance]:
    """Return the utterances of feats.scp; without utt2spk each is a speaker."""
    labels, table = read_alignments(ali, classes), read_table(data / "feats.scp")
    speakers, texts = (
        read_table(data / name) if (data / name).is_file() else {} for name in ("utt2spk", "text")
    )
    found = []
    for key, target in sorted(table.items()):
        speaker = speakers.get(key, "") if speakers else key
        problem = "" if key in labels else f"it has no alignment in {ali}"
        if not speaker:
            problem = f"it is not in {data / 'utt2spk'}"
        source = *locate(target, data), labels.get(key, np.zeros(0, np.int32))
        found.append(Utterance(key, speaker, texts.get(key, ""), *source, problem))
    return found


def read_alignments(path: Path, classes: int) -> Labels:
    """Read all labels of a directory's archives.

    Output of ali-to-pdf comes first: the directory may also have transition-ids, which exceed the
    number of pdfs.
    """
    labels: Labels = {}
    for file in sorted(path.glob("pdf*.ark")) or sorted(path.glob("*.ark")):
        for key, values in read_vectors(file):
            if key in labels:
                raise UserError(f"{file} has an alignment of {key} a second time")
            labels[key] = values
    filled = [values for values in labels.values() if len(values)]
    if not filled:
        raise UserError(f"{path} has no archive of alignments: pdf*.ark or *.ark")
    low, high = min(v.min() for v in filled), max(v.max() for v in filled)
    if low < 0 or high >= classes:
        raise UserError(
            f"{path} has labels from {low} to {high}; those below {classes} are written by"
            ' ali-to-pdf final.mdl "ark:gunzip -c ali.*.gz |" ark:pdf.ark'
        )
    return labels


def count_classes(path: Path, classes: int | None) -> int:
    """Return the number of pdfs: `classes`, or that of the model beside the alignments."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; --ali needs one with pdf-level alignments")
    model = path / "final.mdl"
    if classes is None and model.is_file():
        match = _NUM_PDFS.search(read_regular(model, ROWS))
        if match:
            classes = int.from_bytes(match[1], "little") if match[1] else int(match[2])
    if classes is None:
        raise UsageError(f"{model} does not give the number of pdfs: --classes does")
    if not 1 <= classes <= MOST_CLASSES:
        raise UsageError(f"between 1 and {MOST_CLASSES:,} --classes are possible, not {classes:,}")
    return classes
