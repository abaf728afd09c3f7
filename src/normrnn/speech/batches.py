"""Utterances in ragged batches of similar length, in an order that epoch and seed decide.

A batch is known by its epoch and number, so a run resumes without any state of the data; features
are read from disk when their batch comes, so memory does not grow with the corpus.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from normrnn.engine.ranks import ALONE, Ranks
from normrnn.speech.corpus import SpeechSplit


class Piece(NamedTuple):
    """Frames `start` to `stop` of an utterance."""

    utterance: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Frames from start to stop."""
        return self.stop - self.start


def cut(lengths: Sequence[int], longest: int = 0) -> list[Piece]:
    """Utterances in pieces of nearly equal length and at most `longest` frames; 0: whole.

    >>> cut([5, 3], 2)[:3]
    [Piece(utterance=0, start=0, stop=1), Piece(utterance=0, start=1, stop=3), \
Piece(utterance=0, start=3, stop=5)]
    """
    pieces = []
    for utterance, length in enumerate(lengths):
        parts = -(-length // longest) if longest else 1
        bounds = [length * i // parts for i in range(parts + 1)]
        pieces += [Piece(utterance, a, b) for a, b in pairwise(bounds)]
    return pieces


def shuffled_batches(
    pieces: Sequence[Piece],
    batch: int,
    pool: int,
    *,
    seed: int,
    epoch: int,
) -> list[list[Piece]]:
    """All pieces once, in batches of similar length.

    Pools of `pool` batches are drawn at random and sorted by length; their batches come in random
    order. Only the last batch drawn may be smaller; a single piece left over joins the batch before
    it, for every norm alike: frame-wise statistics need two.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(pieces), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), pool * batch):
        some = sorted((pieces[i] for i in order[start : start + pool * batch]), key=_by_length)
        batches += [some[i : i + batch] for i in range(0, len(some), batch)]
    _join_single(batches, batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def sorted_batches(pieces: Sequence[Piece], batch: int) -> list[list[Piece]]:
    """All pieces once, by length: for evaluation."""
    some = sorted(pieces, key=_by_length)
    batches = [some[i : i + batch] for i in range(0, len(some), batch)]
    _join_single(batches, batch)
    return batches


def _join_single(batches: list[list[Piece]], batch: int) -> None:
    if batch > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [batches[-2] + batches[-1]]


def _by_length(piece: Piece) -> tuple[int, Piece]:
    return piece.length, piece


def read_batch(
    split: SpeechSplit, pieces: Sequence[Piece], device: torch.device, ranks: Ranks = ALONE
) -> tuple[PackedSequence, Tensor] | None:
    """Features of the pieces, longest first, and the labels of their rows (N,).

    Of several ranks each reads its share, long and short pieces alike; None where there are fewer
    pieces than ranks, or ranks than this one's number, and nothing is left for it.
    """
    ordered = sorted(pieces, key=_by_length, reverse=True)[ranks.rank :: ranks.size]
    if not ordered or ranks.rank >= ranks.size:
        return None
    features = pack_sequence([split.features(*piece).to(device) for piece in ordered])
    labels = pack_sequence([split.labels(*piece) for piece in ordered])
    return features, labels.data.to(device)
