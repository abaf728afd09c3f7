"""Symbols, their order, their limits."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normrnn.errors import UserError
from normrnn.text.corpus import Level, Vocabulary, tokens


def built(text: str, level: Level = "word", limit: int = 0, unknown: bool = True) -> Vocabulary:
    return Vocabulary.from_counts(Counter(tokens(text, level)), level, limit, unknown)


def test_most_frequent_first_ties_alphabetical() -> None:
    assert built("b a c c\nc z z\n").symbols == ("c", "<eos>", "z", "a", "b", "<unk>")
    # The text's own <unk> is not doubled, and one is not made where it is not wanted.
    assert sorted(built("a <unk> b\n").symbols) == ["<eos>", "<unk>", "a", "b"]
    assert built("ab\n", "char", unknown=False).symbols == ("<eos>", "a", "b")


@given(st.text(st.characters(exclude_characters="\r", codec="utf-8")))
def test_characters_survive_a_round_trip(text: str) -> None:
    vocabulary = built(text, "char")
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"symbols": ["a"], "level": "word"}',
        '{"symbols": [1], "level": "word"}',
        '{"symbols": ["<eos>", "<eos>"], "level": "word"}',
        '{"symbols": ["<eos>"], "level": "x"}',
    ],
)
def test_damaged_json(text: str) -> None:
    with pytest.raises(UserError, match="the vocabulary"):
        Vocabulary.from_json(text)
