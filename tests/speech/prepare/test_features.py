"""Sound files; filter banks, energy and deltas against their definitions, written out again."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.features import add_deltas, fbank, read_sound
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
    result = fbank(samples)
    assert result.shape == (173, 41)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, kaldi_fbank(samples), atol=2e-3)
    np.testing.assert_array_equal(result, fbank(samples))  # no dither


@pytest.mark.parametrize(("samples", "frames"), [(400, 1), (559, 1), (560, 2)])
def test_only_whole_frames_count(samples: int, frames: int) -> None:
    assert fbank(sung()[5000 : 5000 + samples]).shape == (frames, 41)
    with pytest.raises(Unusable, match="shorter than one frame: 399 samples"):
        fbank(sung()[:399])


def test_samples_come_back_exactly(tmp_path: Path) -> None:
    samples = sung()
    soundfile.write(tmp_path / "a.flac", samples, RATE)
    sound = read_sound(tmp_path / "a.flac")
    np.testing.assert_array_equal(sound, samples)
    assert sound.dtype == np.int16
    left, right = np.array([100, -50, 7], "i2"), np.array([200, 50, 9], "i2")
    soundfile.write(tmp_path / "a.flac", np.stack([left, right], 1), RATE)
    assert read_sound(tmp_path / "a.flac").tolist() == [150, 0, 8]


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_truncated_files(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, sung(), RATE)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(Unusable, match=r"truncated|cannot be read"):
        read_sound(path)


@pytest.mark.parametrize("content", [b"", b"no sound at all, but some bytes", b"fLaC", None])
def test_no_sound(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.flac"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Unusable, match="cannot be read"):
        read_sound(path)
    soundfile.write(path, sung(), RATE, format="WAV")
    with pytest.raises(Unusable, match="WAV"):
        read_sound(path)
    soundfile.write(path, np.zeros(0, "i2"), RATE, format="FLAC")
    with pytest.raises(Unusable, match="sound"):
        read_sound(path)
