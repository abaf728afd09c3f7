"""Sound with known words, without a data set: three sung vowels with pauses between."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

RATE = 16_000
TEXT = "AH E OH"
# Formants (Hz) of the vowels of "ah", "e" and "oh", and their phones in the model.
VOWELS = {"AA": (730, 1090, 2440), "IY": (270, 2290, 3010), "OW": (500, 900, 2500)}
VOWEL_SECONDS = 0.25
PAUSE_SECONDS = 0.25


def sung(pitch: float = 110.0, seed: int = 0) -> NDArray[np.int16]:
    """Pause, ah, pause, e, pause, oh, pause: 1.75 s."""
    pause = np.zeros(int(PAUSE_SECONDS * RATE))
    parts = [pause]
    for formants in VOWELS.values():
        parts += [_vowel(formants, pitch), pause]
    sound = np.concatenate(parts)
    noise = np.random.default_rng(seed).normal(size=len(sound)) * 15
    return (sound / np.abs(sound).max() * 8000 + noise).astype(np.int16)


def _vowel(formants: Sequence[float], pitch: float) -> NDArray[np.float64]:
    t = np.arange(int(VOWEL_SECONDS * RATE)) / RATE
    harmonics = np.arange(1, int(7000 / pitch))
    strength = sum(1 / (1 + ((harmonics * pitch - f) / 60) ** 2) for f in formants)
    strength = strength / np.sqrt(harmonics)
    waves = np.sin(2 * np.pi * pitch * harmonics[:, None] * t)
    edge = np.minimum(1, np.minimum(t, t[::-1]) / 0.03)
    return strength @ waves * edge


def write_librispeech(
    root: Path, speakers: Sequence[str] = ("11", "12", "13"), each: int = 2
) -> Path:
    """A corpus in LibriSpeech's layout; returns the subset's folder."""
    for number, speaker in enumerate(speakers):
        folder = root / "LibriSpeech" / "train-tiny" / speaker / "7"
        folder.mkdir(parents=True)
        lines = []
        for index in range(each):
            key = f"{speaker}-7-{index:04d}"
            sound = sung(100 + 10 * number + index, seed=index)
            soundfile.write(folder / f"{key}.flac", sound, RATE)
            lines.append(f"{key} {TEXT}\n")
        (folder / f"{speaker}-7.trans.txt").write_text("".join(lines))
    return root / "LibriSpeech" / "train-tiny"
