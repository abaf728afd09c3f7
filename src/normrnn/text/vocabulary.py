"""Symbols and their ids."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from normrnn.errors import UserError

EOS = "<eos>"
UNKNOWN = "<unk>"
Level = Literal["word", "char"]


def tokens(text: str, level: Level) -> list[str]:
    """Return the symbols of a text: <eos> for a newline; characters keep blanks and indentation.

    >>> tokens(" no it was n't \\n", "word")
    ['no', 'it', 'was', "n't", '<eos>']
    >>> tokens(" no", "char")
    [' ', 'n', 'o']
    """
    if level == "word":
        return text.replace("\n", f" {EOS} ").split()
    return [EOS if c == "\n" else c for c in text]


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
        required = [EOS, UNKNOWN] if unknown else [EOS]
        counts = {**dict.fromkeys(required, 0), **counts}
        ranked = sorted(counts, key=lambda s: (-counts[s], s))
        if limit:
            if limit <= len(required):
                raise UserError(f"text.max_vocab {limit} leaves no room for words", code=2)
            free = [s for s in ranked if s not in required][: limit - len(required)]
            ranked = [s for s in ranked if s in {*free, *required}]
        return cls(tuple(ranked), level)

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

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        >>> Vocabulary(("<eos>", "a", " "), "char").encode(" a\\na ")
        [2, 1, 0, 1, 2]
        """
        return self.ids(tokens(text, self.level)).tolist()

    def ids(self, symbols: Sequence[str]) -> np.ndarray:
        """Return the id of each symbol (n,) int32, <unk>'s for an unknown one; UserError for an
        unknown symbol where there is no <unk>."""
        index, unknown = self.index, self.index.get(UNKNOWN, -1)
        ids = np.array([index.get(s, unknown) for s in symbols], np.int32)
        if (ids < 0).any():
            raise UserError(
                f"the text has {symbols[int(ids.argmin())]!r}, which the vocabulary lacks:"
                f" --text.unknown keeps a class {UNKNOWN} for what is unknown"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`: a newline for each <eos>.

        >>> Vocabulary(("a", "<eos>", "b")).decode([0, 2, 1, 2])
        'a b\\nb'
        """
        symbols = ["\n" if self.symbols[i] == EOS else self.symbols[i] for i in ids]
        if self.level == "char":
            return "".join(symbols)
        return re.sub(" ?\n ?", "\n", " ".join(symbols))

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
            symbols, level = (), "word"
        is_text = level in ("word", "char") and all(isinstance(s, str) for s in symbols)
        if not is_text or len(set(symbols)) != len(symbols) or EOS not in symbols:
            raise UserError("the vocabulary is damaged")
        return cls(symbols, level)
