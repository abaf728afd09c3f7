"""Ragged batches: everything once, similar lengths, one order per seed and epoch."""

import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from normrnn.speech.archive import Entry, write_matrix, write_vector
from normrnn.speech.batches import Piece, cut, read_batch, shuffled_batches, sorted_batches
from normrnn.speech.corpus import SpeechSplit, read_speech
from tests.tiny_speech import write_speech

lengths = st.lists(st.integers(1, 200), min_size=1, max_size=40)


@given(lengths, st.integers(1, 60))
def test_pieces_cover_every_frame_once(lengths: list[int], longest: int) -> None:
    pieces = cut(lengths, longest)
    frames = [(p.utterance, t) for p in pieces for t in range(p.start, p.stop)]
    assert frames == [(u, t) for u, n in enumerate(lengths) for t in range(n)]
    assert all(1 <= p.length <= longest for p in pieces)
    for u in range(len(lengths)):
        sizes = [p.length for p in pieces if p.utterance == u]
        assert max(sizes) - min(sizes) <= 1


def test_no_limit_keeps_utterances_whole() -> None:
    assert cut([1300, 7]) == [Piece(0, 0, 1300), Piece(1, 0, 7)]


@given(lengths, st.integers(2, 9), st.integers(1, 5))
def test_a_last_piece_joins_others(lengths: list[int], batch: int, pool: int) -> None:
    pieces = cut(lengths)
    for batches in (
        shuffled_batches(pieces, batch, pool, seed=1, epoch=0),
        sorted_batches(pieces, batch),
    ):
        assert sorted(p for b in batches for p in b) == pieces
        assert all(2 <= len(b) <= batch + 1 for b in batches) or len(pieces) == 1


@given(lengths, st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_has_every_piece_once(
    lengths: list[int], batch: int, pool: int, epoch: int
) -> None:
    pieces = cut(lengths)
    batches = shuffled_batches(pieces, batch, pool, seed=1, epoch=epoch)
    assert sorted(p for b in batches for p in b) == pieces
    full, rest = divmod(len(pieces), batch)
    joined = rest == 1 and full and batch > 1
    sizes = [batch] * (full - 1) + [batch + 1] if joined else [batch] * full + [rest] * (rest > 0)
    assert sorted(len(b) for b in batches) == sorted(sizes)
    assert batches == shuffled_batches(pieces, batch, pool, seed=1, epoch=epoch)


def test_order_changes_with_epoch_and_seed() -> None:
    pieces = cut(list(range(1, 41)))
    orders = [
        shuffled_batches(pieces, 4, 3, seed=seed, epoch=epoch)
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_batches_hold_similar_lengths_but_come_in_random_order() -> None:
    pieces = cut(torch.randperm(400).add(1).tolist())
    batches = shuffled_batches(pieces, 4, 25, seed=1, epoch=0)
    spreads = [max(p.length for p in b) - min(p.length for p in b) for b in batches]
    assert sum(spreads) / len(spreads) < 20  # four drawn from all would spread over about 240
    longest = [max(p.length for p in b) for b in batches]
    assert any(a > b for a, b in pairwise(longest))
    assert any(a < b for a, b in pairwise(longest))


def test_evaluation_goes_by_length() -> None:
    batches = list(sorted_batches(cut([5, 2, 9, 1, 7]), 3))
    assert [[p.length for p in b] for b in batches] == [[1, 2, 5], [7, 9]]
    batches = list(sorted_batches(cut([5, 2, 9, 1]), 3))
    assert [[p.length for p in b] for b in batches] == [[1, 2, 5, 9]]


def test_a_batch_is_the_rows_of_its_pieces(tmp_path: Path) -> None:
    write_speech(tmp_path / "speech")
    split = read_speech(tmp_path / "speech").train
    pieces = [Piece(1, 2, 7), Piece(3, 0, 9), Piece(0, 30, 31)]
    found = read_batch(split, pieces, torch.device("cpu"))
    assert found is not None
    utterances, labels = found
    assert utterances.batch_sizes.tolist() == [3, 2, 2, 2, 2, 1, 1, 1, 1]
    x = {u: split.features(u) for u in (0, 1, 3)}
    y = {u: split.labels(u) for u in (0, 1, 3)}
    order = [(3, 0), (1, 2), (0, 30)]  # longest first
    at = [(u, s + t) for t in range(9) for (u, s), n in zip(order, (9, 5, 1), strict=True) if t < n]
    assert torch.equal(utterances.data, torch.stack([x[u][t] for u, t in at]))
    assert labels.tolist() == [int(y[u][t]) for u, t in at]


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """An epoch over eight times the speech peaks where the small one did."""
    peaks = []
    for utterances in (16, 128):
        split = _written(tmp_path / str(utterances), utterances, frames=250)
        tracemalloc.start()
        for batch in shuffled_batches(cut(split.lengths), 8, 2, seed=1, epoch=1):
            read_batch(split, batch, torch.device("cpu"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    one = 250 * 64 * 4
    assert 8 * one < peaks[0] < peaks[1] < 1.1 * peaks[0] < 16 * one


def _written(path: Path, utterances: int, frames: int) -> SpeechSplit:
    """A split of noise, 64 features wide, on disk."""
    path.mkdir()
    keys = [f"{n:03}" for n in range(utterances)]
    x = np.random.default_rng(1).normal(size=(frames, 64)).astype(np.float32)
    features, labels = [], []
    with (path / "feats.ark").open("wb") as feats, (path / "labels.ark").open("wb") as ali:
        for key in keys:
            features.append(Entry(path / "feats.ark", write_matrix(feats, key, x)))
            labels.append(
                Entry(path / "labels.ark", write_vector(ali, key, np.ones(frames, np.int32)))
            )
    return SpeechSplit(keys, [frames] * utterances, path, 2, 64, features, labels)
