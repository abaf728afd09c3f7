"""The only call of `torch.load`: for files of `torch.save` that may come from anybody.

`weights_only=True` executes nothing, but a pickle of 400 bytes can still ask for gigabytes
(`bytearray(2**33)`), and a zip archive can be compressed. So both are refused before.
"""

import pickletools
import re
import zipfile
from typing import IO, Any

import torch

_GLOBALS = re.compile(
    r"collections OrderedDict|torch [A-Za-z0-9]+Storage|torch\._utils _rebuild_tensor_v2"
)
_NAMES = ("GLOBAL", "STACK_GLOBAL", "INST")
"""Opcodes that import; torch.save writes only the first."""


class TorchFileError(Exception):
    """Not a file of tensors and plain values."""


def load_torch_file(file: IO[bytes]) -> Any:
    """Return the tensors and plain values of a file that `torch.save` wrote; TorchFileError for
    anything else."""
    try:
        _check_archive(file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    except TorchFileError:
        raise
    # zipfile, pickletools and torch.load raise many types, all for the same reason.
    except Exception as error:
        raise TorchFileError(type(error).__name__) from None


def _check_archive(file: IO[bytes]) -> None:
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len({entry.filename.lower() for entry in entries}) < len(entries):
            raise TorchFileError("ambiguous archive")  # other readers might see other entries
        if any(entry.compress_size != entry.file_size for entry in entries):
            raise TorchFileError("compressed")
        if sum(entry.file_size for entry in entries) > size:
            raise TorchFileError("larger than its file")
        for entry in entries:
            if entry.filename.lower().endswith(".pkl"):
                for opcode, value, _ in pickletools.genops(archive.read(entry)):
                    if opcode.name in _NAMES and not _GLOBALS.fullmatch(str(value)):
                        raise TorchFileError("it holds other objects than tensors")
