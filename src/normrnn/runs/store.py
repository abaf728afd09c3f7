"""The run directory: its files, written atomically and verified when read.

config.json, metrics.jsonl, model.safetensors (best on validation), checkpoint.pt (everything
needed to resume); evaluation.json from `normrnn evaluate`.
"""

import contextlib
import io
import json
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from normrnn import files
from normrnn.config.base import Config
from normrnn.config.registry import plain_values, read_config
from normrnn.errors import UsageError, UserError
from normrnn.runs import records
from normrnn.runs.records import CHECKPOINT, CONFIG, METRICS, MODEL, Note, read_note

C = TypeVar("C", bound=Config)


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = records.MetricsFile(path / METRICS)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory and hold its lock, as `records.locked`; UsageError if it has results
        that could not be resumed: they are not overwritten."""
        needs = {METRICS: CONFIG, CHECKPOINT: CONFIG, MODEL: CHECKPOINT}
        for name, needed in needs.items():
            if self.has(name) and not self.has(needed):
                raise UsageError(f"{self.path} has a {name} but no {needed}: not overwriting it")
        with records.locked(self.path):
            yield

    def has(self, name: str) -> bool:
        """Whether the file exists."""
        return (self.path / name).exists()

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Replace a file atomically."""
        files.write_whole(self.path / name, content)

    def read(self, name: str) -> bytes:
        """Return the content of a required file."""
        try:
            return files.read_regular(self.path / name, files.largest_tensors())
        except FileNotFoundError:
            raise UserError(f"{self.path} is not a run directory: no {name}") from None
        except OSError as error:
            raise UserError(f"{self.path / name} cannot be read: {error.strerror}") from None

    def values(self) -> dict[str, Any]:
        """Return the content of config.json."""
        try:
            return files.read_json(self.path / CONFIG)[0]
        except FileNotFoundError:
            raise UserError(f"{self.path} is not a run directory: no {CONFIG}") from None

    def config(self, kind: type[C] = Config) -> C:
        """Return the run's config; UserError if it is of another task."""
        config = read_config(self.values())
        if not isinstance(config, kind):
            raise UserError(f"{self.path} is a run of {config.recipe}, not of {kind.noun}")
        return config

    def write_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
        """Write the best model with its checksum, which is returned."""
        content, sha256 = sealed_tensors(tensors, metadata)
        self.write(MODEL, content)
        return sha256

    def read_model(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return weights and metadata of the best model; UserError if there is none, or if it is
        damaged or of another run."""
        path, note = self.path / MODEL, read_note(self.path)
        if not self.has(MODEL):
            raise UserError(f"{path} is missing: the first validation writes it")
        content = self.read(MODEL)
        end = 8 + int.from_bytes(content[:8], "little")
        try:
            if not files.is_sealed(content, path):
                raise UserError(f"{path} is damaged: its checksum is missing")
            tensors = tensors_from_bytes(content)
            metadata = json.loads(content[8:end]).get("__metadata__", {})
            config = json.loads(metadata.get(CONFIG, "null"))
        except (SafetensorError, ValueError, TypeError, RecursionError):
            raise UserError(f"{path} is damaged: not a model of this program") from None
        if note is not None and not note.owns(metadata):
            if read_note(self.path) != note:  # a training has replaced both meanwhile
                return self.read_model()
            raise UserError(
                f"{path} does not belong to the {CHECKPOINT} beside it: it is of another run, or of"
                " another update of this one"
            )
        if isinstance(config, Mapping):
            self._check_config(config, MODEL)
        self.model_metadata = metadata
        return tensors, metadata

    @cached_property
    def model_metadata(self) -> dict[str, str]:
        """The metadata of the best model when it was read last; empty if there is none."""
        return self.read_model()[1] if self.has(MODEL) else {}

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Load weights into a network; UserError if they do not fit."""
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{MODEL} of {self.path} does not fit its {CONFIG}: {reason}") from None

    def write_checkpoint(self, payload: Mapping[str, Any], note: Note) -> None:
        """Write everything needed to resume."""
        # In memory first: torch's own writer reports a full disk as an internal error.
        buffer = io.BytesIO()
        torch.save(payload, buffer)
        records.append_note(buffer, note)
        self.write(CHECKPOINT, buffer.getbuffer())

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return the checkpoint and its note, None if there is none; UserError if it is damaged or
        has another config."""
        path = self.path / CHECKPOINT
        if not self.has(CHECKPOINT):
            return None
        content = self.read(CHECKPOINT)
        note = records.note_of(content, path)
        try:
            checkpoint = {**load_torch_file(io.BytesIO(content)), "note": asdict(note)}
        except (TorchFileError, TypeError) as error:
            raise UserError(f"{path} cannot be read: not a checkpoint ({error})") from None
        self._check_config(note.config, CHECKPOINT)
        return checkpoint

    def _check_config(self, written: Any, what: str) -> None:
        """Raise UserError if config.json was changed since `what` was written."""
        old, new = plain_values(written), plain_values(self.values())
        if changed := records.changed_fields(old, new):
            raise UserError(
                f"{self.path / CONFIG} was changed since {what} was written: {changed}; restore it"
            )


def sealed_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[bytearray, str]:
    """Return a safetensors file with its checksum, and the checksum."""
    # The format has no tensors that share memory, as tied weights do.
    dense = torch.contiguous_format
    copies = {name: t.detach().cpu().clone(memory_format=dense) for name, t in tensors.items()}
    content = bytearray(tensors_to_bytes(copies, {**metadata, "sha256": files.BLANK}))
    return content, files.seal(content)


# The only call of `torch.load`: for files of `torch.save` that may come from anybody.
#
# `weights_only=True` executes nothing, but a pickle of 400 bytes can still ask for gigabytes
# (`bytearray(2**33)`), and a zip archive can be compressed. So both are refused before.

_GLOBALS = re.compile(
    r"collections OrderedDict|torch [A-Za-z0-9]+Storage|torch\._utils _rebuild_tensor_v2"
)
_NAMES = ("GLOBAL", "STACK_GLOBAL", "INST")  # opcodes that import; torch.save writes the first


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
