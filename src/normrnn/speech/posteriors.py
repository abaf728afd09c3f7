"""Posteriors of a trained acoustic model, for a hybrid decoder."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from normrnn.errors import UsageError, UserError
from normrnn.files import replacing, resolved, utf8_name
from normrnn.runs.environment import named_device
from normrnn.runs.store import RunDirectory
from normrnn.speech.archive import write_matrix
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import Features
from normrnn.speech.model import AcousticModel
from normrnn.speech.task import SpeechTask

FRAMES = 16_384  # that run through the network together: a dozen utterances or two


@torch.no_grad()
def write_posteriors(
    run: Path,
    data: Path,
    prefix: Path,
    prior_floor: float | None = None,
    device: str = "cpu",
    show_size: Callable[[int], None] = lambda _: None,
) -> tuple[int, int]:
    """Write log posteriors of every utterance of `data` to `prefix`.ark and `prefix`.scp.

    With a `prior_floor`, scaled log-likelihoods: minus the log priors of the training labels, each
    state counted as seen in at least so many frames. `show_size` is called with the bytes that the
    archive will take, before anything is computed. Both files are replaced at the end. Return the
    numbers of utterances and frames.
    """
    if prior_floor is not None and not 0 < prior_floor < math.inf:
        raise UsageError(f"--prior-floor must be positive and finite, not {prior_floor}")
    utf8_name(prefix, "--out")
    if prefix.name in ("", ".."):
        raise UsageError(f"--out {prefix} is a directory: the archive needs a name in it")
    place = named_device(device)
    directory = RunDirectory(run)
    directory.config(SpeechConfig)
    model: AcousticModel = SpeechTask.load(directory, place)
    minus = 0.0 if prior_floor is None else model.log_priors(prior_floor)
    ark, scp = (prefix.with_name(f"{prefix.name}.{kind}") for kind in ("ark", "scp"))
    features = Features(data)
    taken = features.files() & {resolved(ark), resolved(scp)}
    if taken:
        raise UsageError(f"--out {prefix} would overwrite {min(taken)}, which is read")
    show_size(features.count_frames() * len(model.label_counts) * 4)
    utterances = frames = 0
    ark.parent.mkdir(parents=True, exist_ok=True)
    with replacing(scp) as table, replacing(ark) as archive:  # the archive comes first
        for some in _together(_checked(features, len(model.mean))):
            keys, values = zip(*some, strict=True)
            batch = model.each_log_posteriors([x.to(place) for x in values])
            for key, rows in zip(keys, batch, strict=True):
                offset = write_matrix(archive, key, (rows - minus).cpu().numpy())
                table.write(f"{key} {resolved(ark)}:{offset}\n".encode())
                utterances, frames = utterances + 1, frames + len(rows)
        if not utterances:
            raise UserError(f"{data / 'feats.scp'} lists no utterances")
        # A full disk is noticed here, before either file is replaced.
        for file in (archive, table):
            file.flush()
            os.fsync(file.fileno())
    return utterances, frames


def _checked(utterances: Features, dim: int) -> Iterator[tuple[str, Tensor]]:
    for key, features in utterances:
        where = f"{key} of {utterances.path}"
        if features.shape[1] != dim:
            raise UserError(
                f"{where} has {features.shape[1]} features a frame; the network was trained on"
                f" {dim}"
            )
        if not features.isfinite().all():
            raise UserError(f"{where} has features that are not finite")
        yield key, features


def _together(utterances: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield utterances in groups of up to `FRAMES` frames, at least one each."""
    some: list[tuple[str, Tensor]] = []
    frames = 0
    for key, features in utterances:
        if some and frames + len(features) > FRAMES:
            yield some
            some, frames = [], 0
        some.append((key, features))
        frames += len(features)
    if some:
        yield some
