"""Forced alignment of sung vowels: each frame gets the phone that sounds there."""

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from normrnn.errors import UserError
from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.features import fbank
from normrnn.speech.prepare.librispeech import (
    Targets,
    acoustic_model,
    align,
    align_words,
    find_utterances,
    read_lexicon,
)
from tests.sounds import PAUSE_SECONDS, RATE, TEXT, VOWEL_SECONDS, VOWELS, sung

SOUND = sung()
FRAMES = len(fbank(SOUND))


def aligned(text: str = TEXT, targets: Targets = "phone", **lexicon: str) -> NDArray[np.int32]:
    words = {word: (phones,) for word, phones in lexicon.items()}
    return align(SOUND, text, targets, words, FRAMES)


def phone_at(labels: NDArray[np.int32], seconds: float) -> str:
    """The phone whose state is the label of the frame around this moment."""
    model = acoustic_model()
    return model.phones[labels[round((seconds - 0.0125) / 0.01)] // model.states]


def test_the_model_is_the_one_known() -> None:
    model = acoustic_model()
    assert (len(model.phones), model.states, model.senones) == (42, 3, 5126)
    assert (model.phones[0], model.phones[-1]) == ("+NSN+", "ZH")
    assert (model.classes("senone"), model.classes("phone")) == (5126, 126)


def test_phones_are_where_they_sound() -> None:
    labels = aligned()
    assert labels.shape == (FRAMES,)
    assert labels.dtype == np.int32
    for number, phone in enumerate(VOWELS):
        start = PAUSE_SECONDS + number * (VOWEL_SECONDS + PAUSE_SECONDS)
        assert phone_at(labels, start + VOWEL_SECONDS / 2) == phone
        assert phone_at(labels, start + VOWEL_SECONDS + PAUSE_SECONDS / 2) == "SIL"
    states = labels % 3
    same_phone = np.diff(labels // 3) == 0
    assert set(np.diff(states)[same_phone]) == {0, 1}  # left to right through a phone


def test_senones_lie_over_the_same_phones() -> None:
    """Silence has its own senones in both numberings; everything else is a clustered state."""
    phones, senones = aligned(), aligned(targets="senone")
    silence = acoustic_model().phones.index("SIL") * 3
    assert ((phones >= silence) & (phones < silence + 3)).any()
    np.testing.assert_array_equal((senones >= 96) & (senones <= 98), phones // 3 == silence // 3)
    assert senones[phones // 3 != silence // 3].min() >= 126
    assert senones.max() < 5126


def test_labels_do_not_depend_on_what_came_before() -> None:
    first = aligned(targets="senone")
    align(sung(140.0, 3), "oh", "senone", {}, FRAMES)
    np.testing.assert_array_equal(aligned(targets="senone"), first)


def test_words_without_pronunciation_are_named() -> None:
    with pytest.raises(Unusable, match=r"no pronunciation of aahh, eehh: add it with --lexicon"):
        aligned("AAHH EEHH OH AAHH")
    labels = aligned("AAHH EEHH OH", aahh="AA", eehh="IY")
    np.testing.assert_array_equal(labels, aligned())


def test_lexicon_adds_to_what_the_dictionary_has() -> None:
    """A word of the dictionary may also sound as the lexicon says."""
    first_vowel = PAUSE_SECONDS + VOWEL_SECONDS / 2
    assert phone_at(aligned("OH E OH"), first_vowel) != "AA"
    assert phone_at(aligned("OH E OH", oh="AA"), first_vowel) == "AA"


@pytest.mark.parametrize("text", ["", "  ", "AH\0 E OH"])
def test_transcripts_that_are_empty_or_end_early(text: str) -> None:
    """The C library takes the word to end at a zero byte; looking for its variants never ended."""
    with pytest.raises(Unusable, match="transcript"):
        aligned(text)


def test_noise_and_very_short_sound() -> None:
    noise = np.random.default_rng(0).normal(size=RATE) * 1000
    for samples in (noise.astype(np.int16), SOUND[:401], SOUND[:1]):
        frames = max(0, 1 + (len(samples) - 400) // 160)
        with pytest.raises(Unusable, match="cannot be aligned"):
            align(samples, "hello world", "senone", {}, frames)


def test_alignment_and_features_must_fit() -> None:
    """One label more than frames is cut, anything else refused. There are 174 labels."""
    assert FRAMES == 173
    for frames in (173, 174):
        assert len(align(SOUND, TEXT, "phone", {}, frames)) == frames
    for frames in (172, 175):
        with pytest.raises(Unusable, match=f"has 174 frames, its features have {frames}"):
            align(SOUND, TEXT, "phone", {}, frames)


def test_logs_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    aligned()
    with pytest.raises(Unusable):
        aligned("ZZZZ")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_lexicon_files(tmp_path: Path) -> None:
    path = tmp_path / "lexicon.txt"
    path.write_text("Aahh AA\n\naahh(2) AH\neehh\tIY  IY\n")
    assert read_lexicon(path) == {"aahh": ("AA", "AH"), "eehh": ("IY IY",)}
    for number, content in ((2, "aahh AA\nb XX\n"), (1, "aahh\n")):
        path.write_text(content)
        with pytest.raises(UserError, match=f"line {number}: .* needs phones"):
            read_lexicon(path)


@pytest.mark.slow
def test_real_speech() -> None:
    """NORMRNN_LIBRISPEECH names a folder in LibriSpeech's layout."""
    folder = os.environ.get("NORMRNN_LIBRISPEECH")
    if not folder:
        pytest.skip("NORMRNN_LIBRISPEECH is not set: no real speech to align")
    done, reasons = 0, []
    for item in find_utterances(Path(folder))[:60:3]:
        try:
            features, labels = align_words(item, "senone")
        except Unusable as error:
            reasons.append(str(error))
            continue
        done += 1
        assert features.shape == (len(labels), 123)
        silence = (labels >= 96) & (labels <= 98)
        assert 0.02 < silence.mean() < 0.5
        # Energy is the first column: speech is louder than what is aligned with silence.
        energy = features[:, 0]
        assert energy[~silence].mean() > energy[silence].mean() + 1
    assert done >= 5
    assert [reason for reason in reasons if "no pronunciation" not in reason] == []
