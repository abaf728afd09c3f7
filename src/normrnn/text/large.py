"""Texts that need not fit into memory: read in blocks, encoded once, mapped as ids."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normrnn.errors import UserError
from normrnn.text import cache
from normrnn.text.files import SPLITS, bounds, decoded, find_files, has_padded_lines
from normrnn.text.vocabulary import EOS, Level, StrangeError, Vocabulary, tokens

LARGE = 2**20
"""Bytes from which on a text is kept as ids."""
BLOCK = 2**22
_VOCABULARY = "vocabulary.json"


@dataclass(frozen=True)
class Lines:
    """Lines `first` to `stop` of a file."""

    path: Path
    first: int
    stop: int

    def blocks(self) -> Iterator[str]:
        """All of them, some at a time, each with its newline."""
        line, offset = 0, 0
        padded = has_padded_lines(self.path)
        for raw in _whole_lines(self.path):
            count = raw.count(b"\n")
            if line + count > self.first and line < self.stop:
                text = decoded(raw, self.path, offset)
                if line < self.first or line + count > self.stop:
                    some = text.split("\n")[:count][max(0, self.first - line) : self.stop - line]
                    text = "".join(f"{one}\n" for one in some)
                if padded:
                    text = "\n".join(one.strip() for one in text.split("\n"))
                yield text
            line, offset = line + count, offset + len(raw)


@dataclass(frozen=True)
class LargeTexts:
    """Where the three texts are, and a hash of the bytes behind them."""

    parts: Mapping[str, Lines]
    source: str
    sha256: str
    files: Mapping[Path, str]
    """The hash of each."""

    def check(self) -> None:
        """UserError if a text is no longer the one that was looked at."""
        for path, sha256 in self.files.items():
            try:
                same = _look(path)[0] == sha256
            except (OSError, UserError):
                same = False
            if not same:
                raise UserError(f"{path} changed while it was read; try again when it is whole")

    def key(self, *settings: Any) -> str:
        """Of what these texts become under some settings."""
        padded = any(map(has_padded_lines, self.files))
        about = [self.source.endswith("by lines"), padded, self.sha256, *settings]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def large(path: Path) -> LargeTexts | None:
    """The texts of a directory or file, if they are large."""
    files = find_files(path) if path.is_dir() else {"": path}
    try:
        if sum(file.stat().st_size for file in files.values()) < LARGE:
            return None
        looks = {split: _look(file) for split, file in files.items()}
        hashes = {file: looks[split][0] for split, file in files.items()}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    if path.is_dir():
        parts = {split: Lines(files[split], 0, looks[split][1]) for split in SPLITS}
        joined = "".join(looks[split][0] for split in SPLITS)
        return LargeTexts(parts, str(path), hashlib.sha256(joined.encode()).hexdigest(), hashes)
    sha256, lines = looks[""]
    a, b = bounds(lines, str(path))
    cuts = zip(SPLITS, (0, a, b), (a, b, lines), strict=True)
    parts = {split: Lines(path, first, stop) for split, first, stop in cuts}
    return LargeTexts(parts, f"{path}, split 90/5/5 by lines", sha256, hashes)


def ids_of(
    texts: LargeTexts, level: Level, vocabulary: Callable[[dict[str, int]], Vocabulary], key: str
) -> tuple[dict[str, Tensor], Vocabulary]:
    """Ids (N,) int32 of each text, mapped, and the vocabulary that was made of the counts of the
    training text's symbols when they were encoded."""

    def make(folder: Path) -> None:
        _encode(texts, level, vocabulary, folder)
        texts.check()

    found = cache.entry(key, make)
    ids = {split: _mapped(found / f"{split}.ids") for split in SPLITS}
    return ids, Vocabulary.from_json((found / _VOCABULARY).read_bytes())


def _encode(
    texts: LargeTexts,
    level: Level,
    vocabulary: Callable[[dict[str, int]], Vocabulary],
    folder: Path,
) -> None:
    """Every text is cut once: symbols are numbered as they come, and numbered anew in place when
    the vocabulary is known."""
    seen: defaultdict[str, int] = defaultdict()
    seen.default_factory = seen.__len__
    counts, chosen = np.zeros(0, np.int64), None
    for split in SPLITS:
        with (folder / f"{split}.ids").open("wb") as file:
            for block in texts.parts[split].blocks():
                symbols = _symbols(block, level)
                places = np.fromiter(map(seen.__getitem__, symbols), np.int32, len(symbols))
                places.tofile(file)
                if split == "train":
                    more = np.bincount(places, minlength=len(counts))
                    more[: len(counts)] += counts
                    counts = more
        if split == "train":
            chosen = vocabulary(dict(zip(seen, counts.tolist(), strict=True)))
    assert chosen is not None
    _renumber(folder, list(seen), chosen)
    (folder / _VOCABULARY).write_text(chosen.to_json(), encoding="utf-8")


def _renumber(folder: Path, symbols: list[str], vocabulary: Vocabulary) -> None:
    table = vocabulary.ids(symbols).astype(np.int32)
    for split in SPLITS:
        path = folder / f"{split}.ids"
        if not path.stat().st_size:
            continue
        places = np.memmap(path, np.int32, "r+")
        for start in range(0, len(places), BLOCK):
            some = table[places[start : start + BLOCK]]
            if (some < 0).any():
                raise StrangeError(symbols[int(places[start + int(some.argmin())])])
            places[start : start + BLOCK] = some
        places.flush()


def _symbols(block: str, level: Level) -> list[str]:
    if level == "word":  # blanks of any kind part words, and every line ends
        return block.replace("\n", f" {EOS} ").split()
    return [symbol for line in block.split("\n")[:-1] for symbol in tokens(line, level)]


def _mapped(path: Path) -> Tensor:
    count = path.stat().st_size // 4
    if not count:
        return torch.empty(0, dtype=torch.int32)
    return torch.from_file(str(path), size=count, dtype=torch.int32)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """A file in blocks that end with a newline, the last one also where it has none."""
    rest: list[bytes] = []
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            cut = block.rfind(b"\n") + 1
            if cut:
                yield b"".join([*rest, block[:cut]])
                rest = []
            rest.append(block[cut:])
    if last := b"".join(rest):
        yield last + b"\n"


def _look(path: Path) -> tuple[str, int]:
    """Hash and lines of a file; UserError if there is nothing in it."""
    digest, lines, last, blank = hashlib.sha256(), 0, b"\n", True
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if b"\0" in block:  # a disk image, say: nobody waits for its end
                decoded(block, path)
            digest.update(block)
            lines += block.count(b"\n")
            last = block[-1:]
            blank = blank and not block.strip()
    if blank:
        raise UserError(f"{path} is empty")
    return digest.hexdigest(), lines + (last != b"\n")
