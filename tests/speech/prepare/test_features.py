"""Filter banks, energy and deltas against their definitions, written out again here."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.features import add_deltas, fbank
from tests.sounds import RATE, sung


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30), st.integers(1, 3))
def test_deltas_as_kaldi_composes_them(values: list[float], columns: int) -> None:
    x = np.outer(values, np.arange(1, columns + 1)).astype(np.float32)
    scales = [np.ones(1)]
    for _ in range(2):
        previous = scales[-1]
        current = np.zeros(len(previous) + 4)
        for j in range(-2, 3):
            for k, scale in enumerate(previous):
                current[j + 2 + k] += j * scale / 10
        scales.append(current)
    expected = np.zeros((len(x), 3 * columns))
    for t in range(len(x)):
        for order, filter_ in enumerate(scales):
            reach = len(filter_) // 2
            for j, scale in enumerate(filter_):
                at = min(max(t + j - reach, 0), len(x) - 1)
                expected[t, order * columns : (order + 1) * columns] += scale * x[at]
    np.testing.assert_allclose(add_deltas(x), expected, rtol=1e-5, atol=1e-4)


def kaldi_fbank(samples: NDArray[np.int16]) -> NDArray[np.float64]:
    """Kaldi's definition in double precision: energy of the raw frame, povey window, mel bands."""
    frames = 1 + (len(samples) - 400) // 160
    n = np.arange(400)
    window = (0.5 - 0.5 * np.cos(2 * np.pi * n / 399)) ** 0.85
    mel = lambda f: 1127 * np.log(1 + np.asarray(f) / 700)  # noqa: E731
    edges = np.linspace(mel(20), mel(8000), 42)
    at = mel(np.arange(256) * RATE / 512)
    rise = (at - edges[:-2, None]) / np.diff(edges)[:-1, None]
    fall = (edges[2:, None] - at) / np.diff(edges)[1:, None]
    bank = np.maximum(np.minimum(rise, fall), 0)
    rows = []
    for t in range(frames):
        frame = samples[160 * t : 160 * t + 400].astype(np.float64)
        frame -= frame.mean()
        energy = np.log((frame**2).sum())
        frame = (frame - 0.97 * np.concatenate([frame[:1], frame[:-1]])) * window
        power = np.abs(np.fft.rfft(frame, 512)[:256]) ** 2
        rows.append([energy, *np.log(bank @ power)])
    return np.array(rows)


def test_fbank_is_kaldis() -> None:
    samples = sung()
    result = fbank(samples, RATE)
    assert result.shape == (173, 41)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, kaldi_fbank(samples), atol=2e-3)
    np.testing.assert_array_equal(result, fbank(samples, RATE))  # no dither


@pytest.mark.parametrize(("samples", "frames"), [(400, 1), (559, 1), (560, 2)])
def test_only_whole_frames_count(samples: int, frames: int) -> None:
    assert fbank(sung()[5000 : 5000 + samples], RATE).shape == (frames, 41)


def test_shorter_than_a_frame_is_unusable() -> None:
    with pytest.raises(Unusable, match=r"shorter than one frame: 24\.9 ms of 25"):
        fbank(sung()[:399], RATE)
