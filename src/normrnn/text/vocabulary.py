"""Symbols and their ids."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from normrnn.errors import UserError

EOS = "<eos>"
UNKNOWN = "<unk>"
Level = Literal["word", "char"]


def tokens(line: str, level: Level) -> list[str]:
    """Return the symbols of a line, <eos> included; characters keep blanks and indentation.

    >>> tokens(" no it was n't ", "word")
    ['no', 'it', 'was', "n't", '<eos>']
    >>> tokens(" no", "char")
    [' ', 'n', 'o', '<eos>']
    """
    return [*(line.split() if level == "word" else line), EOS]


class UnknownSymbolError(UserError):
    """A symbol that a vocabulary without <unk> lacks."""

    def __init__(self, symbol: str) -> None:
        super().__init__(f"the text has {symbol!r}, which the vocabulary lacks, and no {UNKNOWN}")


@dataclass(frozen=True)
class Vocabulary:
    """Symbols in the order of their ids, most frequent first."""

    symbols: tuple[str, ...]
    level: Level = "word"

    @classmethod
    def ranked(
        cls, counts: Mapping[str, int], level: Level, limit: int = 0, unknown: bool = True
    ) -> "Vocabulary":
        """Build from counted symbols; with a `limit` the most frequent, ties alphabetical.

        >>> Vocabulary.ranked({"b": 3, "<eos>": 2, "a": 2, "c": 1}, "word", limit=4).symbols
        ('b', '<eos>', 'a', '<unk>')
        """
        ranked = sorted(counts, key=lambda s: (-counts[s], s))
        required = [EOS] + ([UNKNOWN] if unknown else [])
        if limit and len(ranked) + (UNKNOWN not in counts and unknown) > limit:
            if limit < len(required) + 1:
                raise UserError(f"text.max_vocab {limit} leaves no room for words", code=2)
            free = limit - len(required)
            kept = {*[s for s in ranked if s not in required][:free], *required}
            ranked = [s for s in ranked if s in kept]
        return cls((*ranked, *(s for s in required if s not in ranked)), level)

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def index(self) -> dict[str, int]:
        """Symbol -> id."""
        return {symbol: i for i, symbol in enumerate(self.symbols)}

    @property
    def eos(self) -> int:
        """Id of the end of a line."""
        return self.index[EOS]

    def encode(self, lines: Iterable[str]) -> np.ndarray:
        """Return the ids of all lines, one after another, (N,) int64; UserError for an unknown
        symbol where there is no <unk>."""
        return self._encoded([s for line in lines for s in tokens(line, self.level)])

    def begin(self, text: str) -> list[int]:
        """Return the ids of a text whose last line is incomplete: no <eos> after it.

        >>> Vocabulary(("<eos>", "a", " "), "char").begin(" a\\na ")
        [2, 1, 0, 1, 2]
        """
        *whole, last = text.split("\n")
        symbols = [s for line in whole for s in tokens(line, self.level)]
        return self._encoded([*symbols, *tokens(last, self.level)[:-1]]).tolist()

    def _encoded(self, symbols: list[str]) -> np.ndarray:
        ids = self.ids(symbols)
        if (ids < 0).any():
            raise UnknownSymbolError(symbols[int(ids.argmin())])
        return ids

    def ids(self, symbols: Sequence[str]) -> np.ndarray:
        """Return the id of each symbol (n,); <unk>'s or -1 for an unknown one."""
        index, unknown = self.index, self.index.get(UNKNOWN, -1)
        return np.array([index.get(s, unknown) for s in symbols], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`: a newline for each <eos>.

        >>> v = Vocabulary(("a", "<eos>", "b"))
        >>> v.decode([0, 2, 1, 2])
        'a b\\nb'
        """
        between = " " if self.level == "word" else ""
        lines: list[list[str]] = [[]]
        for i in ids:
            if self.symbols[i] == EOS:
                lines.append([])
            else:
                lines[-1].append(self.symbols[i])
        return "\n".join(between.join(line) for line in lines)

    def to_json(self) -> str:
        """Return the vocabulary as JSON."""
        return json.dumps({"level": self.level, "symbols": self.symbols}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Vocabulary":
        """Read what `to_json` wrote; UserError for anything else."""
        try:
            values = json.loads(text)
            symbols, level = tuple(values["symbols"]), values["level"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError("the vocabulary is damaged") from None
        if level not in ("word", "char") or not all(isinstance(s, str) for s in symbols):
            raise UserError("the vocabulary is damaged")
        if len(set(symbols)) != len(symbols) or EOS not in symbols:
            raise UserError(f"the vocabulary repeats a symbol or lacks {EOS}")
        return cls(symbols, level)
