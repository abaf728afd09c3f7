"""Symbols, their order, their limits."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normrnn.errors import UserError
from normrnn.text.vocabulary import Level, Vocabulary, tokens


def built(lines: list[str], level: Level, limit: int = 0, unknown: bool = True) -> Vocabulary:
    counts = Counter(symbol for line in lines for symbol in tokens(line, level))
    return Vocabulary.ranked(counts, level, limit, unknown)


def test_most_frequent_first_ties_alphabetical() -> None:
    vocabulary = built(["b a c c", "c z z"], "word")
    assert vocabulary.symbols == ("c", "<eos>", "z", "a", "b", "<unk>")


def test_unknown_word_of_the_text_itself_is_not_doubled() -> None:
    vocabulary = built(["a <unk> b"], "word")
    assert sorted(vocabulary.symbols) == ["<eos>", "<unk>", "a", "b"]


@pytest.mark.parametrize("limit", [3, 4, 5, 6])
def test_limit_counts_the_special_symbols(limit: int) -> None:
    vocabulary = built(["a a a b b c d"], "word", limit=limit)
    assert len(vocabulary) == min(limit, 6)
    assert {"<eos>", "<unk>", "a"} <= set(vocabulary.symbols)


def test_limit_without_room() -> None:
    with pytest.raises(UserError, match="max_vocab 2"):
        built(["a b c"], "word", limit=2)


def test_without_unknown_class_strangers_are_an_error() -> None:
    vocabulary = built(["ab"], "char", unknown=False)
    assert vocabulary.symbols == ("<eos>", "a", "b")
    with pytest.raises(UserError, match="'z'"):
        vocabulary.encode(["az"])


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8")), min_size=1))
def test_characters_survive_a_round_trip(lines: list[str]) -> None:
    vocabulary = built(lines, "char")
    ids = vocabulary.encode(lines)
    assert len(ids) == sum(len(tokens(line, "char")) for line in lines)
    assert vocabulary.decode(ids) == "".join(f"{line}\n" for line in lines)


def test_json_round_trip() -> None:
    vocabulary = built(['ä \\ "quoted" 語'], "word")
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
