"""Text files: found, checked, and read in blocks of whole lines."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.files import is_stream, open_regular

SPLITS = ("train", "valid", "test")
BUILTIN = "builtin:python-topics"
# Penn Treebank's names first: the paper's experiments use them.
PATTERNS = ("ptb.{}.txt", "{}.txt")
BLOCK = 2**22


def find_files(directory: Path) -> dict[str, Path]:
    """Return the file of each split, by Penn Treebank's names or plain ones."""
    missing: list[str] = []
    for pattern in PATTERNS:
        files = {split: directory / pattern.format(split) for split in SPLITS}
        absent = [f.name for f in files.values() if not f.is_file()]
        if not absent:
            return files
        if len(absent) < len(files):
            missing = missing or absent
    if missing:
        raise UserError(f"{directory} has no {' and no '.join(missing)}")
    names = " or ".join(p.format("train") for p in PATTERNS)
    raise UserError(f"{directory} has no text: expected {names}, and valid and test likewise")


def read_blocks(path: Path, digest: Any) -> Iterator[str]:
    """Yield a UTF-8 text in blocks of whole lines, each ended by a newline, and update the digest
    with its bytes; UserError for anything else, or an empty file."""
    offset, is_blank = 0, True
    try:
        for raw in _whole_lines(path, digest):
            text = decoded(raw, path, offset)
            is_blank = is_blank and not text.strip()
            offset += len(raw)
            yield _without_margins(text) if _has_margins(path) else text
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if is_blank:
        raise UserError(f"{path} is empty")


def decoded(raw: bytes, path: Path | str, offset: int = 0) -> str:
    """Decode UTF-8 text from `offset` of a file on, with newlines alone as line ends."""
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


def python_topics() -> str:
    """Return the text inside every Python."""
    from pydoc_data.topics import topics

    lines = (line for topic in sorted(topics) for line in topics[topic].split("\n"))
    return "\n".join(line for line in lines if line.strip())


def _whole_lines(path: Path, digest: Any) -> Iterator[bytes]:
    rest: list[bytes] = []
    with path.open("rb") if is_stream(path) else open_regular(path) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if b"\0" in block:  # refuse a disk image before all of it is read
                decoded(block, path)
            cut = block.rfind(b"\n") + 1
            if cut:
                yield b"".join([*rest, block[:cut]])
                rest = []
            rest.append(block[cut:])
    if last := b"".join(rest):
        yield last + b"\n"


def _has_margins(path: Path) -> bool:
    """Whether lines begin and end with a blank that is not part of the text, as in Mikolov's
    preparation of Penn Treebank, recognised by its file names."""
    return path.name in {PATTERNS[0].format(split) for split in SPLITS}


def _without_margins(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\n"))
