"""The card of a run, an export or a single file; nothing in a file is run to find it."""

import io
import os
import zipfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO

from normrnn.deploy.card import of_run
from normrnn.deploy.export import CARD
from normrnn.deploy.tensors import FORMAT
from normrnn.errors import UserError
from normrnn.files import open_regular
from normrnn.runs.names import CONFIG
from normrnn.runs.store import RunDirectory, tensors_header
from normrnn.runs.torchfile import TorchFileError, load_torch_file

_CARD = 1 << 20
"""Bytes of a card at most."""
_METADATA_PROPS = 14
"""The field of ONNX's ModelProto that holds metadata."""
_MOST_FIELDS = 100_000


def info(path: Path, settings: bool = False) -> str:
    """Return the card as Markdown, of a run with its settings if asked.

    Raise UserError for a file that normrnn did not write.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if settings and (path / CONFIG).exists():
        return of_run(RunDirectory(path)).card()
    if path.is_dir():
        return _of_directory(path)
    read = {".pt": _of_torch, ".safetensors": _of_safetensors, ".onnx": _of_onnx}
    read |= {".pt2": _of_program, ".md": _text}
    if path.suffix not in read:
        kinds = ", ".join(read)
        raise UserError(f"{path} is neither a run nor an export: exports end in {kinds}")
    try:
        return read[path.suffix](path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _of_directory(path: Path) -> str:
    if (path / CONFIG).exists():
        return of_run(RunDirectory(path)).short()
    if (path / CARD).exists():
        return _text(path / CARD)
    raise UserError(f"{path} is neither a run directory nor an export: no {CONFIG}, no {CARD}")


def _text(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(_CARD).decode(errors="replace")


def _of_torch(path: Path) -> str:
    with open_regular(path) as file:
        try:
            saved = load_torch_file(file, device="meta")
        except TorchFileError as error:
            raise UserError(
                f"{path} cannot be read: not a file of tensors and plain values ({error});"
                " nothing in it was run"
            ) from None
    kind = saved.get("format") if isinstance(saved, dict) else None
    if kind == FORMAT and isinstance(saved.get("card"), str):
        return saved["card"]
    if isinstance(kind, str) and kind.startswith("normrnn checkpoint"):
        return _of_file_in_run(path, "a checkpoint: everything needed to go on with a run")
    raise UserError(f"{path} is no export of normrnn")


def _of_safetensors(path: Path) -> str:
    header = tensors_header(path)
    try:
        card = header.pop("__metadata__", {}).get("card")
        shapes = {name: tuple(map(int, of["shape"])) for name, of in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise UserError(f"{path} is damaged: no safetensors file") from None
    if isinstance(card, str):
        return card
    lines = [f"{name} {tuple(shape)}" for name, shape in shapes.items()]
    return _of_file_in_run(path, f"{len(lines)} tensors:\n" + "\n".join(lines))


def _of_onnx(path: Path) -> str:
    with open_regular(path) as file:
        try:
            card = _onnx_metadata(file).get(b"card", b"")
        except ValueError:
            raise UserError(f"{path} is damaged: not an ONNX file") from None
    try:
        text = card.decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise UserError(f"{path} is an ONNX file, but no export of normrnn")
    return text


def _onnx_metadata(file: BufferedReader) -> dict[bytes, bytes]:
    """The metadata of an ONNX file, a protobuf message. The weights are skipped, not read."""
    metadata: dict[bytes, bytes] = {}
    size = os.fstat(file.fileno()).st_size
    for _, content in _protobuf_fields(file, size, _METADATA_PROPS):
        entry = dict(_protobuf_fields(io.BytesIO(content), len(content), 1, 2))
        metadata[entry.get(1, b"")] = entry.get(2, b"")
    return metadata


def _protobuf_fields(file: IO[bytes], size: int, *wanted: int) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of the wanted fields of a message; ValueError if it is none."""
    for _ in range(_MOST_FIELDS):
        if file.tell() >= size:
            return
        tag = _varint(file)
        field, kind = tag >> 3, tag & 7
        if not field or kind not in (0, 1, 2, 5):
            raise ValueError(f"field {field} of kind {kind}")
        if kind == 0:
            _varint(file)
            continue
        length = {1: 8, 5: 4}.get(kind) or _varint(file)
        end = file.tell() + length
        if end > size:
            raise ValueError("a field larger than its message")
        if kind == 2 and field in wanted and length <= _CARD:
            yield field, file.read(length)
        file.seek(end)
    raise ValueError("too many fields")


def _varint(file: IO[bytes]) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            break
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
    raise ValueError("no number")


def _of_program(path: Path) -> str:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            (entry,) = (e for e in archive.infolist() if e.filename.endswith("/extra/card.md"))
            if entry.compress_size != entry.file_size:
                raise ValueError("compressed")  # torch compresses nothing
            with archive.open(entry) as card:
                return card.read(_CARD).decode(errors="replace")
    except OSError:
        raise
    except Exception:  # whatever zipfile and its decompressors make of a damaged archive
        raise UserError(f"{path} is no export of normrnn") from None


def _of_file_in_run(path: Path, words: str) -> str:
    """What a file is, and the card of the run that it lies in."""
    run = _of_directory(path.parent) if (path.parent / CONFIG).exists() else ""
    return f"{path.name}: {words}\n\n{run}".rstrip() + "\n"
