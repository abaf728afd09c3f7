"""Texts as ids: read once, encoded once, kept in a mapped file.

Symbols are numbered as they come; when the text has been read, its vocabulary is known and the
numbers are replaced by ids, in place. So memory does not grow with the text.
"""

import hashlib
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normrnn.errors import UserError
from normrnn.files import expanded, is_stream, resolved
from normrnn.text.config import TextConfig
from normrnn.text.files import BLOCK, BUILTIN, SPLITS, find_files, python_topics, read_blocks
from normrnn.text.vocabulary import EOS, UNKNOWN, Level, UnknownSymbolError, Vocabulary

# No text has a zero byte, so this is not a word of it, as "<eos>" may be.
_LINE_END = {"word": "\0", "char": "\n"}
_CODE_POINTS = 0x110000
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Corpus:
    """Ids (N,) int32 of each text."""

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: Vocabulary
    where: str = ""
    source: str = ""
    sha256: str = ""

    @property
    def summary(self) -> str:
        """Tokens of each text with the share of <unk>, and the size of the vocabulary."""
        unknown = self.vocabulary.index.get(UNKNOWN, -1)
        sizes = []
        for name in SPLITS:
            ids = getattr(self, name)
            share = (ids == unknown).float().mean().item() if unknown >= 0 else 0.0
            sizes.append(f"{name} {len(ids):,} ({share:.1%} {UNKNOWN})")
        return f"tokens: {', '.join(sizes)}; vocabulary {len(self.vocabulary):,}"


def read_corpus(data: str, config: TextConfig, vocabulary: Vocabulary | None = None) -> Corpus:
    """Read a directory with three texts, one file split 90/5/5 by lines, or the builtin text.

    Ids are those of `vocabulary`, by default the training text's own.
    """
    if not data:
        raise UserError(
            "this recipe needs a text: pass --data DIR with train, valid and test text, or one"
            " file (`normrnn prepare ptb DIR` checks a Penn Treebank directory)",
            code=2,
        )
    level = config.level if vocabulary is None else vocabulary.level
    where, source = data, data
    digests: list[str] = []
    with tempfile.TemporaryFile(prefix="normrnn-text-") as file:
        numbers = _Numbers(level, file)
        if data == BUILTIN:
            text, source = python_topics(), "Python's own documentation"
            numbers.add([f"{text}\n"])
            digests.append(hashlib.sha256(text.encode()).hexdigest())
        else:
            path = expanded(data)
            if not path.exists():
                raise UserError(f"{path} does not exist")
            where = data if is_stream(data) else str(resolved(path))
            source = str(path)
            for one in find_files(path).values() if path.is_dir() else [path]:
                digest = hashlib.sha256()
                numbers.add(read_blocks(one, digest))
                digests.append(digest.hexdigest())
        ids = numbers.mapped()
    ends = numbers.ends
    if len(ends) == 1:
        ends = [*numbers.split(ids, source), ends[0]]
        source = f"{source}, split 90/5/5 by lines"
    counts = numbers.counts(ids[: ends[0]])
    chosen = _vocabulary(counts, source, config) if vocabulary is None else vocabulary
    try:
        numbers.replace(ids, chosen)
    except UnknownSymbolError as error:
        hint = ": --text.unknown keeps a class for what is unknown" if vocabulary is None else ""
        raise UserError(f"{error}{hint}") from None
    tensor = torch.from_numpy(ids)
    train, valid, test = tensor.tensor_split(ends[:2])
    joined = "".join(digests)
    sha256 = joined if len(digests) == 1 else hashlib.sha256(joined.encode()).hexdigest()
    return Corpus(train, valid, test, chosen, where, source, sha256)


class _Numbers:
    """Symbols of texts, numbered as they first appear (characters by code point), in a file."""

    def __init__(self, level: Level, file: IO[bytes]) -> None:
        self.level, self.file = level, file
        self.words: defaultdict[str, int] = defaultdict()
        self.words.default_factory = self.words.__len__
        self.line_end = self._numbered(_LINE_END[level])[0]
        self.length, self.lines = 0, 0
        self.ends: list[int] = []
        """Where each text ends."""
        self._blocks: list[tuple[int, int]] = []
        """Lines and symbols before each block."""

    def add(self, blocks: Iterable[str]) -> None:
        """Append a text."""
        for block in blocks:
            self._blocks.append((self.lines, self.length))
            numbers = self._numbered(block)
            try:
                self.file.write(numbers.data)
            except OSError as error:
                raise UserError(
                    f"{tempfile.gettempdir()} cannot hold the text as ids: {error.strerror};"
                    " TMPDIR names another place"
                ) from None
            self.lines += block.count("\n")
            self.length += len(numbers)
        self.ends.append(self.length)

    def _numbered(self, block: str) -> Ids:
        if self.level == "char":
            return np.frombuffer(block.encode("utf-32-le"), "<u4").astype(np.int32)
        symbols = block.replace("\n", f" {_LINE_END['word']} ").split()
        return np.fromiter(map(self.words.__getitem__, symbols), np.int32, len(symbols))

    def mapped(self) -> Ids:
        """Return all numbers, mapped from the file."""
        self.file.flush()
        return np.memmap(self.file, np.int32, "r+").view(np.ndarray)  # type: ignore[return-value]

    def split(self, ids: Ids, source: str) -> list[int]:
        """Return where the validation and the test text of a single text begin."""
        if self.lines < 20:
            raise UserError(
                f"{source} has {self.lines} line{'s' * (self.lines != 1)}; a split 90/5/5 by lines"
                " needs at least 20 (or give a directory with train.txt, valid.txt and test.txt)"
            )
        starts = []
        first = [lines for lines, _ in self._blocks]
        for line in (self.lines * 90 // 100, self.lines * 95 // 100):
            block = bisect_right(first, line - 1) - 1
            before, start = self._blocks[block]
            stop = self._blocks[block + 1][1] if block + 1 < len(first) else self.length
            line_ends = np.flatnonzero(ids[start:stop] == self.line_end)
            starts.append(start + int(line_ends[line - before - 1]) + 1)
        return starts

    def counts(self, ids: Ids) -> dict[str, int]:
        """Return how often each symbol occurs."""
        total = np.zeros(0, np.int64)
        for start in range(0, len(ids), BLOCK):
            some = np.bincount(ids[start : start + BLOCK], minlength=len(total))
            some[: len(total)] += total
            total = some
        words = list(self.words)
        name = chr if self.level == "char" else words.__getitem__
        counts = {name(n): int(total[n]) for n in np.flatnonzero(total).tolist()}
        counts[EOS] = counts.get(EOS, 0) + counts.pop(_LINE_END[self.level])
        return counts

    def replace(self, ids: Ids, vocabulary: Vocabulary) -> None:
        """Replace numbers by ids, in place."""
        words = list(self.words)
        if self.level == "char":
            table = np.full(_CODE_POINTS, vocabulary.index.get(UNKNOWN, -1), np.int32)
            for symbol, number in vocabulary.index.items():
                if len(symbol) == 1:
                    table[ord(symbol)] = number
        else:
            table = vocabulary.ids(words).astype(np.int32)
        table[self.line_end] = vocabulary.eos
        for start in range(0, len(ids), BLOCK):
            some = ids[start : start + BLOCK]
            replaced = table[some]
            if (replaced < 0).any():
                number = int(some[replaced.argmin()])
                raise UnknownSymbolError(chr(number) if self.level == "char" else words[number])
            some[:] = replaced


def _vocabulary(counts: dict[str, int], source: str, config: TextConfig) -> Vocabulary:
    vocabulary = Vocabulary.ranked(counts, config.level, config.max_vocab, config.unknown)
    words = set(vocabulary.symbols) - {EOS, UNKNOWN}
    if len(words) < 2:
        kept = "" if not config.max_vocab else f" within text.max_vocab {config.max_vocab}"
        raise UserError(
            f"the training text of {source} has nothing to predict: its only"
            f" {'word' if config.level == 'word' else 'character'}{kept} is"
            f" {next(iter(words), EOS)!r}"
        )
    return vocabulary
