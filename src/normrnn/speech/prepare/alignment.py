"""Frame labels by forced alignment with pocketsphinx's English model."""

import re
import struct
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normrnn.errors import UserError
from normrnn.extras import import_extra
from normrnn.files import read_text
from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.features import SAMPLE_RATE

Targets = Literal["senone", "phone"]
Lexicon = Mapping[str, tuple[str, ...]]
"""Word -> pronunciations, each phones with spaces between."""

_VARIANT = re.compile(r"\(\d+\)$")
_FILLERS = frozenset({"<s>", "</s>", "<sil>", "[NOISE]", "[SPEECH]"})


class Model(NamedTuple):
    """Phones and states of the acoustic model."""

    phones: tuple[str, ...]
    states: int
    """Per phone."""
    senones: int

    def classes(self, targets: Targets) -> int:
        """Return the number of states of the model."""
        return self.senones if targets == "senone" else len(self.phones) * self.states


@cache
def acoustic_model() -> Model:
    """Read phones and numbers of states from the model's definition file."""
    pocketsphinx = import_extra("pocketsphinx")
    path = Path(pocketsphinx.get_model_path("en-us/en-us")) / "mdef"
    raw = path.read_bytes()
    if raw[:4] != b"BMDF":
        raise UserError(f"{path} is not a binary model definition")
    _, comment = struct.unpack_from("<ii", raw, 4)
    numbers = struct.unpack_from("<10i", raw, 12 + comment)
    phones, _, states, _, senones = numbers[:5]
    names = raw[12 + comment + 40 :].split(b"\0", phones)[:phones]
    return Model(tuple(name.decode() for name in names), states, senones)


def read_lexicon(path: Path) -> dict[str, tuple[str, ...]]:
    """Read lines `word PHONE PHONE ...`; a word may have several."""
    known = set(acoustic_model().phones)
    lexicon: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        word, *phones = line.split()
        if not phones or not known.issuperset(phones):
            raise UserError(
                f"{path} line {number}: {word!r} needs phones of {' '.join(sorted(known))}"
            )
        word = _VARIANT.sub("", word.lower())
        lexicon[word] = (*lexicon.get(word, ()), " ".join(phones))
    return lexicon


def align(
    samples: NDArray[np.int16], text: str, targets: Targets, lexicon: Lexicon, frames: int
) -> NDArray[np.int32]:
    """Return a label for each of the `frames` frames of a sound at 16 kHz with these words.

    Every call makes a new decoder, so that labels do not depend on earlier utterances.
    """
    words = text.lower().split()
    if not words or "\0" in text:  # C code would loop on a zero byte
        raise Unusable("its transcript is empty, or has a zero byte")
    pocketsphinx = import_extra("pocketsphinx")
    # bestpath would search a lattice instead of following the given words.
    decoder = pocketsphinx.Decoder(lm=None, samprate=SAMPLE_RATE, bestpath=False, loglevel="FATAL")
    _add_words(decoder, words, lexicon)
    sound = samples.tobytes()
    try:
        decoder.set_align_text(" ".join(words))
        _decode(decoder, sound)
        decoder.set_alignment()
        _decode(decoder, sound)
        alignment = decoder.get_alignment()
    except RuntimeError:
        alignment = None
    if alignment is None:
        raise Unusable("its words cannot be aligned with its sound")
    found = [_VARIANT.sub("", word.name) for word in alignment if word.name not in _FILLERS]
    if found != words:
        raise Unusable(f"its words cannot be aligned with its sound: {len(found)} of {len(words)}")
    labels = np.array(_labels(alignment, targets), dtype=np.int32)
    if len(labels) - frames not in (0, 1):
        raise Unusable(f"its alignment has {len(labels)} frames, its features have {frames}")
    return labels[:frames]


def _decode(decoder: Any, sound: bytes) -> None:
    decoder.start_utt()
    decoder.process_raw(sound, full_utt=True)
    decoder.end_utt()


def _add_words(decoder: Any, words: Iterable[str], lexicon: Lexicon) -> None:
    missing = []
    for word in dict.fromkeys(words):
        known: dict[str, None] = {}
        name = word
        while (phones := decoder.lookup_word(name)) is not None:
            known[phones] = None
            name = f"{word}({len(known) + 1})"
        for phones in lexicon.get(word, ()):
            if phones not in known:
                name = f"{word}({len(known) + 1})" if known else word
                decoder.add_word(name, phones, False)
                known[phones] = None
        if not known:
            missing.append(word)
    if missing:
        raise Unusable(f"no pronunciation of {', '.join(missing)}: add it with --lexicon")


def _labels(alignment: Any, targets: Targets) -> list[int]:
    """Return a label per frame; Unusable for an alignment with gaps."""
    model = acoustic_model()
    phone_index = {name: index for index, name in enumerate(model.phones)}
    labels: list[int] = []
    for phone in (phone for word in alignment for phone in word):
        for position, state in enumerate(phone):
            if state.start != len(labels):
                raise Unusable(f"its alignment has a gap at frame {len(labels)}")
            label = phone_index[phone.name] * model.states + position
            labels += [int(state.name) if targets == "senone" else label] * state.duration
    return labels
