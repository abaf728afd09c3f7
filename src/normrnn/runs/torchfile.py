"""The only call of `torch.load`: for files of `torch.save` that may come from anybody.

`weights_only=True` executes nothing, but a pickle of 400 bytes can still ask for gigabytes
(`bytearray(2**33)`), and a zip archive can be compressed. So the archive and its pickle are checked
first: no compression, and only the names and opcodes that tensors and plain values need.
"""

import pickletools
import re
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import Tensor

_OPCODES = frozenset(
    re.findall(
        r"\w+",
        """
        PROTO STOP MARK GLOBAL REDUCE BUILD BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET
        NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
        EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS
        EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
        """,
    )
)
_GLOBALS = re.compile(
    r"collections OrderedDict|torch [A-Za-z0-9]+Storage|torch\._utils _rebuild_tensor_v2"
)
_LARGEST_INTEGER = 2**63
_SHARED_TUPLES = 32
"""References to tuples at most: hashing tuples of tuples of shared tuples takes exponential time,
but with so few of them no more than 3 ** (32 / 3) steps."""


class TorchFileError(Exception):
    """Not a file of tensors and plain values."""


def load_torch_file(file: IO[bytes]) -> Any:
    """Return the tensors and plain values of a file that `torch.save` wrote.

    Memory and time are proportional to the size of the file. TorchFileError for anything else.
    """
    try:
        budget = _check_archive(file)
        file.seek(0)
        values = torch.load(file, weights_only=True)
        _check_size(values, budget)
    except TorchFileError:
        raise
    # zipfile, pickletools and torch.load raise many types, all for the same reason.
    except Exception as error:
        raise TorchFileError(type(error).__name__) from None
    return values


def _check_archive(file: IO[bytes]) -> int:
    """Check the archive without unpickling; returns the number of opcodes of its pickle."""
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = {entry.filename.lower() for entry in entries}
        if len(names) < len(entries) or min(entry.header_offset for entry in entries):
            raise TorchFileError("ambiguous archive")  # other readers might see other entries
        if any(entry.compress_size != entry.file_size for entry in entries):
            raise TorchFileError("compressed")
        if sum(entry.file_size for entry in entries) > size:
            raise TorchFileError("larger than its file")
        pickles = [entry for entry in entries if entry.filename.lower().endswith(".pkl")]
        return sum(_check_pickle(archive.read(entry)) for entry in pickles)


def _check_pickle(content: bytes) -> int:
    tuples: set[Any] = set()  # memo slots that hold one
    count = shared = 0
    before = ""
    for opcode, value, _ in pickletools.genops(content):
        name = opcode.name
        if name not in _OPCODES:
            raise TorchFileError(f"opcode {name}")
        if name == "GLOBAL" and not _GLOBALS.fullmatch(str(value)):
            raise TorchFileError("it holds other objects than tensors")
        if name == "LONG1" and abs(value or 0) > _LARGEST_INTEGER:
            raise TorchFileError("number out of range")
        if name in ("BINPUT", "LONG_BINPUT"):
            (tuples.add if before.startswith("TUPLE") else tuples.discard)(value)
        elif name in ("BINGET", "LONG_BINGET"):
            shared += value in tuples
        if shared > _SHARED_TUPLES:
            raise TorchFileError("shared tuples")
        before = name
        count += 1
    return count


def _check_size(values: Any, budget: int) -> None:
    """Refuse containers that are larger than what was written, through shared references, and
    tensors that are larger than their memory, through strides of 0."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        budget -= 1
        if budget < 0:
            raise TorchFileError("shared containers")
        if isinstance(value, Mapping):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, Tensor) and value.nbytes > value.untyped_storage().nbytes():
            raise TorchFileError("a tensor larger than its memory")
