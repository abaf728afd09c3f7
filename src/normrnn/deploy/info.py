"""The card of a run, an export or a single file; nothing in a file is run to find it."""

import json
import os
import zipfile
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from normrnn.deploy.card import of_run
from normrnn.deploy.export import CARD
from normrnn.deploy.tensors import FORMAT
from normrnn.errors import UserError, printable
from normrnn.files import open_regular
from normrnn.runs.names import CONFIG
from normrnn.runs.store import RunDirectory

_HEADER = 100_000_000
"""Bytes of a safetensors header at most: the format's own limit."""
_CARD = 10_000_000
"""Bytes of a card at most."""


def info(path: Path) -> str:
    """Markdown, fit for a terminal; UserError for what none of us wrote."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.is_dir():
        return printable(_of_directory(path))
    read = {".pt": _of_torch, ".safetensors": _of_safetensors, ".onnx": _of_onnx}
    read |= {".pt2": _of_program, ".md": _text}
    if path.suffix not in read:
        kinds = ", ".join(read)
        raise UserError(f"{path} is neither a run nor an export: exports end in {kinds}")
    try:
        return printable(read[path.suffix](path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _of_directory(path: Path) -> str:
    if (path / CONFIG).exists():
        return of_run(RunDirectory(path)).card()
    if (path / CARD).exists():
        return _text(path / CARD)
    raise UserError(f"{path} is neither a run directory nor an export: no {CONFIG}, no {CARD}")


def _text(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(_CARD).decode(errors="replace")


def _of_torch(path: Path) -> str:
    with open_regular(path) as file:
        try:
            _not_compressed(file)
            saved = torch.load(file, weights_only=True, map_location="meta")
        # torch.load raises whatever its unpickler meets; any of it means the same to the user.
        except Exception as error:
            raise UserError(
                f"{path} cannot be read: no file of tensors and plain values"
                f" ({type(error).__name__}); nothing in it was run"
            ) from None
    kind = saved.get("format") if isinstance(saved, dict) else None
    if kind == FORMAT and isinstance(saved.get("card"), str):
        return saved["card"]
    if isinstance(kind, str) and kind.startswith("normrnn checkpoint"):
        return _of_file_in_run(path, "a checkpoint: everything needed to go on with a run")
    raise UserError(f"{path} is no export of normrnn")


def _not_compressed(file: BufferedReader) -> None:
    """ValueError if a file of torch would grow on being read: torch compresses nothing."""
    with zipfile.ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > os.fstat(file.fileno()).st_size:
            raise ValueError("compressed")
    file.seek(0)


def _of_safetensors(path: Path) -> str:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER):
            raise UserError(f"{path} is damaged: no safetensors file")
        try:
            header = json.loads(file.read(length))
            card = header.pop("__metadata__", {}).get("card")
            shapes = {name: tuple(map(int, of["shape"])) for name, of in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise UserError(f"{path} is damaged: no safetensors file") from None
    if isinstance(card, str):
        return card
    lines = [f"{name} {tuple(shape)}" for name, shape in shapes.items()]
    return _of_file_in_run(path, f"{len(lines)} tensors:\n" + "\n".join(lines))


def _of_onnx(path: Path) -> str:
    from normrnn.extras import export_extra

    onnx: Any = export_extra("onnx")
    with open_regular(path) as file:
        content = file.read()
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's, whose classes are nobody's to import
        raise UserError(f"{path} is damaged: no ONNX file ({type(error).__name__})") from None
    card = {entry.key: entry.value for entry in model.metadata_props}.get("card")
    if not isinstance(card, str):  # protobuf has bytes for what is no UTF-8
        raise UserError(f"{path} is an ONNX file, but no export of normrnn")
    return card


def _of_program(path: Path) -> str:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/extra/card.md"))
            with archive.open(name) as card:
                return card.read(_CARD).decode(errors="replace")
    except OSError:
        raise
    except Exception:  # whatever zipfile and its decompressors make of a damaged archive
        raise UserError(f"{path} is no export of normrnn") from None


def _of_file_in_run(path: Path, words: str) -> str:
    """What a file is, and the card of the run that it lies in."""
    run = _of_directory(path.parent) if (path.parent / CONFIG).exists() else ""
    return f"{path.name}: {words}\n\n{run}".rstrip() + "\n"
