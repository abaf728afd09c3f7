"""From a path to the lines of a training, a validation and a test text."""

import codecs
import hashlib
from dataclasses import dataclass
from pathlib import Path

from normrnn.errors import UserError
from normrnn.files import expanded, is_stream, largest_tensors, open_regular, read_regular

SPLITS = ("train", "valid", "test")
BUILTIN = "builtin:python-topics"
# Penn Treebank's names first: they are what the paper's experiments use.
PATTERNS = ("ptb.{}.txt", "{}.txt")
_HEAD = 1 << 16


@dataclass(frozen=True)
class Texts:
    """Lines of the three texts, where they came from, and a hash of the bytes behind them."""

    train: list[str]
    valid: list[str]
    test: list[str]
    source: str
    sha256: str


def read_texts(data: str) -> Texts:
    """Lines of `data`: a directory with three texts, one file split 90/5/5, or the builtin."""
    if not data:
        raise UserError(
            "this recipe needs a text: pass --data DIR with train, valid and test text, or one"
            " file (`normrnn prepare ptb DIR` checks a Penn Treebank directory)",
            code=2,
        )
    if data == BUILTIN:
        text = _python_topics()
        return _split_lines(_lines(text), "Python's own documentation", _sha256(text.encode()))
    path = expanded(data)
    if path.is_dir():
        return _read_directory(path)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    raw = _read_bytes(path)
    return _split_lines(_lines(decoded(raw, path), path), str(path), _sha256(raw))


def read_lines(path: Path) -> list[str]:
    """Lines of one UTF-8 text file, with a clear error for anything else."""
    return _lines(decoded(_read_bytes(path), path), path)


def find_files(directory: Path) -> dict[str, Path]:
    """Split -> file, by Penn Treebank's names or plain ones."""
    missing: list[str] = []
    for pattern in PATTERNS:
        files = {split: directory / pattern.format(split) for split in SPLITS}
        gone = [f.name for f in files.values() if not f.is_file()]
        if not gone:
            return files
        if len(gone) < len(files):
            missing = missing or gone
    if missing:
        raise UserError(f"{directory} has no {' and no '.join(missing)}")
    names = " or ".join(p.format("train") for p in PATTERNS)
    raise UserError(f"{directory} holds no text: expected {names}, and valid and test likewise")


def _read_directory(directory: Path) -> Texts:
    files = find_files(directory)
    raw = {split: _read_bytes(path) for split, path in files.items()}
    lines = {split: _lines(decoded(raw[split], path), path) for split, path in files.items()}
    sha = _sha256("".join(_sha256(raw[s]) for s in SPLITS).encode())
    return Texts(**lines, source=str(directory), sha256=sha)


def bounds(lines: int, source: str) -> tuple[int, int]:
    """Where the validation and the test text of a single file begin."""
    if lines < 20:
        raise UserError(
            f"{source} has {lines} line{'s' * (lines != 1)}; a split 90/5/5 by lines needs at"
            " least 20 (or give a directory with train.txt, valid.txt and test.txt)"
        )
    return lines * 90 // 100, lines * 95 // 100


def _split_lines(lines: list[str], source: str, sha256: str) -> Texts:
    a, b = bounds(len(lines), source)
    source = f"{source}, split 90/5/5 by lines"
    return Texts(lines[:a], lines[a:b], lines[b:], source, sha256)


def _read_bytes(path: Path) -> bytes:
    try:
        if not is_stream(path):
            with open_regular(path) as file:
                head = file.read(_HEAD)
            if b"\0" in head:  # not text: refused before all of it is read
                decoded(head, path)
        raw = path.read_bytes() if is_stream(path) else read_regular(path, largest_tensors())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if not raw.strip():
        raise UserError(f"{path} is empty")
    return raw


def decoded(raw: bytes, path: Path | str, offset: int = 0) -> str:
    """UTF-8 text from `offset` of a file on, its lines ended by newlines alone, with a clear error
    for anything else."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is UTF-16 text, not UTF-8: iconv -f UTF-16 -t UTF-8 converts it")
    if b"\0" in raw:
        raise UserError(f"{path} is a binary file, not text: it has a zero byte")
    mark = len(codecs.BOM_UTF8) if not offset and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[mark:].decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        at = mark + error.start
        raise UserError(
            f"{path} is not UTF-8 text: byte 0x{raw[at]:02x} at offset {offset + at}"
        ) from None


def has_padded_lines(path: Path) -> bool:
    """Whether lines begin and end with a blank that is no part of the text, as in Mikolov's
    preparation of Penn Treebank; such files are known by their names."""
    return path.name in {PATTERNS[0].format(split) for split in SPLITS}


def _lines(text: str, path: Path | None = None) -> list[str]:
    """Lines without their ends; only newlines end a line, as in Mikolov's preparation."""
    lines = text.replace("\r\n", "\n").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    return [line.strip() for line in lines] if path and has_padded_lines(path) else lines


def _python_topics() -> str:
    from pydoc_data.topics import topics

    lines = (line for topic in sorted(topics) for line in topics[topic].split("\n"))
    return "\n".join(line for line in lines if line.strip())


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
