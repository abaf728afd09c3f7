"""Posteriors of a trained acoustic model, for a hybrid decoder."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, replacing, resolved, utf8_name
from normrnn.runs.environment import named_device
from normrnn.runs.store import RunDirectory
from normrnn.speech.archive import locate, read_matrix, read_table, write_matrix
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import INDEX, digest, read_index
from normrnn.speech.task import AcousticModel, SpeechTask


@torch.no_grad()
def write_posteriors(
    run: Path, data: Path, prefix: Path, floor: float | None = None, device: str = "cpu"
) -> tuple[int, int]:
    """Write log posteriors of every utterance of `data` to `prefix`.ark and `prefix`.scp.

    With a `floor`, scaled log-likelihoods: minus the log priors of the training labels, each state
    counted as seen in at least so many frames. Both files are replaced at the end. Return the
    numbers of utterances and frames.
    """
    if floor is not None and not 0 < floor < math.inf:
        raise UsageError(f"--prior-floor must be positive and finite, not {floor}")
    utf8_name(prefix, "--out")
    if prefix.name in ("", ".."):
        raise UsageError(f"--out {prefix} is a directory: the archive needs a name in it")
    place = named_device(device)
    directory = RunDirectory(run)
    directory.config(SpeechConfig)
    model: AcousticModel = SpeechTask.load(directory, place)
    minus = 0.0 if floor is None else model.log_priors(floor)
    ark, scp = (prefix.with_name(f"{prefix.name}.{kind}") for kind in ("ark", "scp"))
    data, table = expanded(data), expanded(data) / "feats.scp"
    entries = {key: locate(target, data) for key, target in read_table(table).items()}
    read = {resolved(path) for path in (table, *(path for path, _ in entries.values()))}
    if taken := read & {resolved(ark), resolved(scp)}:
        raise UsageError(f"--out {prefix} would overwrite {min(taken)}, which is read")
    frames = 0
    ark.parent.mkdir(parents=True, exist_ok=True)
    with replacing(scp) as lines, replacing(ark) as archive:  # the archive comes first
        for key, features in _features(data, entries, len(model.mean)):
            rows = model.log_posteriors(features.to(place)) - minus
            offset = write_matrix(archive, key, rows.cpu().numpy())
            lines.write(f"{key} {resolved(ark)}:{offset}\n".encode())
            frames += len(rows)
        # A full disk is noticed here, before either file is replaced.
        for file in (archive, lines):
            file.flush()
            os.fsync(file.fileno())
    return len(entries), frames


def _features(
    data: Path, entries: dict[str, tuple[Path, int]], dim: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield key and features of every utterance; those of a prepared directory are verified."""
    index = read_index(data) if (data / INDEX).is_file() else []
    hashes = {entry.key: entry.hashes[0] for entry in index}
    for key, (path, offset) in entries.items():
        values = read_matrix(path, offset)
        if hashes.get(key) not in (None, digest(values)):
            raise UserError(f"{path} is damaged: {key} is not what was written")
        features = torch.from_numpy(values)
        if features.shape[1] != dim or not features.isfinite().all():
            raise UserError(
                f"{key} of {data} has {features.shape[1]} features a frame, or some that are not"
                f" finite; the network was trained on {dim}"
            )
        yield key, features
