"""Utterances cut into pieces and read in ragged batches."""

import tracemalloc
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from normrnn.engine.ranks import ALONE, Ranks
from normrnn.engine.task import shuffled_batches
from normrnn.speech.archive import write_matrix, write_vector
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import Entry, SpeechSplit, digest
from normrnn.speech.task import Piece, SpeechTask, cut


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 60))
def test_pieces_cover_every_frame_once(lengths: list[int], longest: int) -> None:
    pieces = cut(lengths, longest)
    frames = [(p.utterance, t) for p in pieces for t in range(p.start, p.stop)]
    assert frames == [(u, t) for u, n in enumerate(lengths) for t in range(n)]
    assert all(1 <= p.length <= longest for p in pieces)
    for u in range(len(lengths)):
        sizes = [p.length for p in pieces if p.utterance == u]
        assert max(sizes) - min(sizes) <= 1


def test_a_batch_is_the_rows_of_its_pieces(tiny_speech: SpeechConfig) -> None:
    task = SpeechTask(tiny_speech)
    split = task.corpus.train
    task.pieces["train"] = [Piece(1, 2, 7), Piece(3, 0, 9), Piece(0, 30, 31)]
    task.lengths = {"train": [5, 9, 1]}
    batch = task.batch("train", [0, 1, 2], ALONE)
    assert batch.inputs.batch_sizes.tolist() == [3, 2, 2, 2, 2, 1, 1, 1, 1]
    x = {u: split.features(u) for u in (0, 1, 3)}
    y = {u: split.labels(u) for u in (0, 1, 3)}
    order = [(3, 0), (1, 2), (0, 30)]  # longest first
    at = [(u, s + t) for t in range(9) for (u, s), n in zip(order, (9, 5, 1), strict=True) if t < n]
    assert torch.equal(batch.inputs.data, torch.stack([x[u][t] for u, t in at]))
    assert batch.targets.tolist() == [int(y[u][t]) for u, t in at]
    assert (batch.count, batch.sequences) == (15, 3)
    shares = [task.batch("train", [0, 1, 2], Ranks(rank, 4)) for rank in range(4)]
    assert [len(s.inputs.data) for s in shares[:3]] == [9, 5, 1]
    assert shares[3].inputs is None
    assert {share.count for share in shares} == {15}


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """An epoch over eight times the speech peaks where the small one did."""
    peaks = []
    for utterances in (16, 128):
        split = _written(tmp_path / str(utterances), utterances, frames=250)
        tracemalloc.start()
        for batch in shuffled_batches(split.lengths, 8, 2, seed=1, epoch=1):
            torch.cat([split.features(i) for i in batch])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    one = 250 * 64 * 4
    assert 8 * one < peaks[0] < 16 * one
    assert peaks[1] < 1.1 * peaks[0]


def _written(path: Path, utterances: int, frames: int) -> SpeechSplit:
    """A split of noise, 64 features wide, on disk."""
    path.mkdir()
    x = np.random.default_rng(1).normal(size=(frames, 64)).astype(np.float32)
    y = np.ones(frames, np.int32)
    with (path / "feats.ark").open("wb") as feats, (path / "labels.ark").open("wb") as ali:
        places = [
            (write_matrix(feats, f"{n}", x), write_vector(ali, f"{n}", y))
            for n in range(utterances)
        ]
    hashes = digest(x), digest(y)
    return SpeechSplit(path, [Entry("", "", frames, place, (0, 0), hashes) for place in places])
