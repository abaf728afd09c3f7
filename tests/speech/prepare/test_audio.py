"""Sound files: formats that are read, and the reasons for those that are not."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile

from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.audio import read_sound
from tests.sounds import RATE, sung


@pytest.mark.parametrize(
    ("suffix", "subtype"), [("flac", "PCM_16"), ("wav", "PCM_16"), ("wav", "FLOAT")]
)
def test_samples_come_back_exactly(tmp_path: Path, suffix: str, subtype: str) -> None:
    path = tmp_path / f"a.{suffix}"
    samples = sung()
    values = samples if subtype == "PCM_16" else samples / np.float32(32768)
    soundfile.write(path, values, RATE, subtype=subtype)
    sound = read_sound(path)
    np.testing.assert_array_equal(sound.samples, samples)
    assert sound.samples.dtype == np.int16
    assert (sound.rate, sound.channels) == (RATE, 1)
    np.testing.assert_array_equal(read_sound(io.BytesIO(path.read_bytes())).samples, samples)


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = np.array([100, -50, 7], "i2"), np.array([200, 50, 9], "i2")
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], 1), RATE)
    sound = read_sound(tmp_path / "a.wav")
    assert sound.samples.tolist() == [150, 0, 8]
    assert sound.channels == 2


def test_loud_float_sound_is_clipped(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([1.5, -2.0, 0.5], "f4"), RATE, subtype="FLOAT")
    assert read_sound(tmp_path / "a.wav").samples.tolist() == [32767, -32768, 16384]


@pytest.mark.parametrize("rate", [8000, 44100])
def test_other_rates_are_refused(tmp_path: Path, rate: int) -> None:
    soundfile.write(tmp_path / "a.flac", sung(), rate)
    with pytest.raises(Unusable, match=rf"sample rate is {rate} Hz; 16000 Hz is needed"):
        read_sound(tmp_path / "a.flac")
    assert read_sound(tmp_path / "a.flac", rate).rate == rate


@pytest.mark.parametrize("suffix", ["flac", "wav"])
@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_truncated_files(tmp_path: Path, suffix: str, kept: float) -> None:
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, sung(), RATE)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(Unusable, match=r"truncated|cannot be read"):
        read_sound(path)


@pytest.mark.parametrize("size", [0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF - 36])
def test_wav_headers_that_were_written_before_the_end_was_known(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.wav"
    sound = sung()
    soundfile.write(path, sound, RATE)
    content = path.read_bytes()
    at = content.index(b"data") + 4
    head = content[:4] + struct.pack("<I", size + 36) + content[8:at] + struct.pack("<I", size)
    path.write_bytes(head + content[at + 4 :])
    np.testing.assert_array_equal(read_sound(path).samples, sound)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"no sound at all, but some bytes", "cannot be read"),
        (b"fLaC", "cannot be read"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "truncated"),
    ],
)
def test_no_sound(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.flac").write_bytes(content)
    with pytest.raises(Unusable, match=said):
        read_sound(tmp_path / "a.flac")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="cannot be read: No such file"):
        read_sound(tmp_path / "a.flac")
    soundfile.write(tmp_path / "a.wav", np.zeros(0, "i2"), RATE)
    with pytest.raises(Unusable, match="sound is empty"):
        read_sound(tmp_path / "a.wav")


@pytest.mark.parametrize("level", [0, 77])
def test_silence(tmp_path: Path, level: int) -> None:
    soundfile.write(tmp_path / "a.flac", np.full(16000, level, "i2"), RATE)
    with pytest.raises(Unusable, match="silent"):
        read_sound(tmp_path / "a.flac")


def test_no_numbers(tmp_path: Path) -> None:
    values = np.array([0.1, np.nan, 0.2], "f4")
    soundfile.write(tmp_path / "a.wav", values, RATE, subtype="FLOAT")
    with pytest.raises(Unusable, match="not finite"):
        read_sound(tmp_path / "a.wav")
