"""Symbols and their ids, and texts as ids: read once, encoded once, kept in a mapped file.

Symbols are numbered as they come; when the text has been read, its vocabulary is known and the
numbers are replaced by ids, in place. So memory does not grow with the text.
"""

import hashlib
import io
import json
import re
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor

from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, open_regular, resolved
from normrnn.text.config import TextConfig

EOS = "<eos>"
UNKNOWN = "<unk>"
Level = Literal["word", "char"]
SPLITS = ("train", "valid", "test")
BUILTIN = "builtin:python-topics"
# Penn Treebank's names first: the paper's experiments use them.
PATTERNS = ("ptb.{}.txt", "{}.txt")
_LONGEST_LINE = 2**25
_BLOCK = 2**22  # tokens converted at once


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
    def from_counts(
        cls, counts: Mapping[str, int], level: Level, limit: int = 0, unknown: bool = True
    ) -> "Vocabulary":
        """Build from counted symbols; with a `limit` the most frequent, ties alphabetical.

        >>> Vocabulary.from_counts({"b": 3, "<eos>": 2, "a": 2, "c": 1}, "word", limit=4).symbols
        ('b', '<eos>', 'a', '<unk>')
        """
        required = [EOS, UNKNOWN] if unknown else [EOS]
        counts = {**dict.fromkeys(required, 0), **counts}
        ranked = sorted(counts, key=lambda s: (-counts[s], s))
        if limit:
            if limit <= len(required):
                raise UsageError(f"text.max_vocab {limit} leaves no room for words")
            free = [s for s in ranked if s not in required][: limit - len(required)]
            kept = {*free, *required}
            ranked = [s for s in ranked if s in kept]
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
            is_unique = len(set(symbols)) == len(symbols) and EOS in symbols
            if level in ("word", "char") and is_unique and {*map(type, symbols)} == {str}:
                return cls(symbols, level)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise UserError("the vocabulary is damaged")


@dataclass(frozen=True)
class Corpus:
    """Ids (N,) int32 of each text."""

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: Vocabulary
    where: str = ""
    sha256: str = ""

    @property
    def summary(self) -> str:
        """Tokens of each text with the share of <unk>, and the size of the vocabulary."""
        unknown = self.vocabulary.index.get(UNKNOWN, -1)
        texts = {"train": self.train, "valid": self.valid, "test": self.test}
        shares = {name: (ids == unknown).float().mean() for name, ids in texts.items()}
        sizes = [f"{n} {len(texts[n]):,} ({share:.1%} {UNKNOWN})" for n, share in shares.items()]
        return f"tokens: {', '.join(sizes)}; vocabulary {len(self.vocabulary):,}"


def read_corpus(data: str, config: TextConfig, vocabulary: Vocabulary | None = None) -> Corpus:
    """Read a directory with three texts, one file split 90/5/5 by lines, or the builtin text.

    Ids are those of `vocabulary`, by default the training text's own.
    """
    if not data:
        raise UsageError("no text: pass --data DIR with train, valid and test text, or one file")
    paths, where = [Path(data)], data
    if data != BUILTIN:
        path = expanded(data)
        if not path.exists():
            raise UserError(f"{path} does not exist")
        where, paths = str(resolved(path)), text_files(path) if path.is_dir() else [path]
    level = config.level if vocabulary is None else vocabulary.level
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    eos, ends, digests = numbers[EOS], [], []
    # It has no name, so nothing is left behind by a process that is killed.
    with tempfile.TemporaryFile(prefix="normrnn-text-", buffering=2**20) as file:
        for path in paths:
            digests.append(hashlib.sha256())
            with io.BytesIO(python_topics()) if data == BUILTIN else open_regular(path) as text:
                for line in text_lines(text, path, digests[-1]):
                    file.write(array("i", map(numbers.__getitem__, tokens(line, level))))
            ends.append(file.tell() // 4)
        file.flush()
        ids = np.memmap(file, np.int32, "r+").view(np.ndarray)
    if len(paths) == 1:
        line_ends = np.flatnonzero(ids == eos)
        lines = len(line_ends)
        if lines < 20:
            raise UserError(
                f"{where} has {lines} lines; a split 90/5/5 by lines needs at least 20 (or give a"
                " directory with train.txt, valid.txt and test.txt)"
            )
        ends = [int(line_ends[lines * share // 100 - 1]) + 1 for share in (90, 95)]
    if vocabulary is None:
        total = np.zeros(len(numbers), np.int64)
        for some in np.array_split(ids[: ends[0]], ends[0] // _BLOCK + 1):
            total += np.bincount(some, minlength=len(numbers))
        counts = {s: n for s, n in zip(numbers, total.tolist(), strict=True) if n}
        vocabulary = Vocabulary.from_counts(counts, level, config.max_vocab, config.unknown)
        if len({*vocabulary.symbols} - {EOS, UNKNOWN}) < 2:
            raise UserError(f"the training text of {where} has one {level}: nothing to predict")
    table = vocabulary.ids(list(numbers))
    for some in np.array_split(ids, len(ids) // _BLOCK + 1):
        some[:] = table[some]
    sha256 = digests[0].hexdigest()
    if len(digests) > 1:
        sha256 = hashlib.sha256("".join(d.hexdigest() for d in digests).encode()).hexdigest()
    if level == "char" and any(map(_has_margins, paths)):
        # The same bytes under plain names are another text.
        sha256 = hashlib.sha256(f"{sha256} without margins".encode()).hexdigest()
    train, valid, test = torch.from_numpy(ids).tensor_split(ends[:2])
    return Corpus(train, valid, test, vocabulary, where, sha256)


def text_files(directory: Path) -> list[Path]:
    """Return the files of the splits, by Penn Treebank's names or plain ones."""
    choices = [[directory / name.format(split) for split in SPLITS] for name in PATTERNS]
    missing = [[file.name for file in files if not file.is_file()] for files in choices]
    fewest, files = min(zip(missing, choices, strict=True), key=lambda pair: len(pair[0]))
    if fewest:
        raise UserError(
            f"{directory} has no {' and no '.join(fewest)}; a text is {', '.join(SPLITS)}, each"
            " with the suffix .txt, or one file"
        )
    return files


def text_lines(file: IO[bytes], name: Path | str, digest: Any = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, each ended by a newline, and update a digest with its
    bytes; UserError for anything else, or an empty file."""
    has_margins, is_blank = _has_margins(Path(name)), True
    raw_lines = iter(partial(file.readline, _LONGEST_LINE), b"")
    for number, raw in enumerate(raw_lines, 1):
        if digest is not None:
            digest.update(raw)
        if b"\0" in raw:
            raise UserError(f"{name} has zero bytes: not UTF-8 (iconv -f UTF-16 -t UTF-8 converts)")
        if len(raw) == _LONGEST_LINE:
            raise UserError(f"{name}: line {number} has {_LONGEST_LINE:,} bytes or more")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{name}: line {number} is not UTF-8 text: {error}") from None
        is_blank = is_blank and not line.strip()
        line = line.removesuffix("\n").removesuffix("\r")
        yield f"{line.strip() if has_margins else line}\n"
    if is_blank:
        raise UserError(f"{name} is empty")


def _has_margins(path: Path) -> bool:
    """Whether blanks around the lines are not part of the text, as in Mikolov's Penn Treebank."""
    return path.name in {PATTERNS[0].format(split) for split in SPLITS}


def python_topics() -> bytes:
    """Return the text inside every Python."""
    from pydoc_data.topics import topics

    lines = (line for topic in sorted(topics) for line in topics[topic].split("\n"))
    return "\n".join(line for line in lines if line.strip()).encode()
