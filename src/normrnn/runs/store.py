"""The run directory: its files, written atomically and verified when read.

config.json, metrics.jsonl, model.safetensors (best on validation), checkpoint.pt (everything
needed to resume) and the previous one; evaluation.json from `normrnn evaluate`.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from normrnn.config.base import Config
from normrnn.config.jsonio import to_dict
from normrnn.config.registry import read_config
from normrnn.errors import UsageError, UserError
from normrnn.files import (
    SETTINGS,
    file_state,
    largest_tensors,
    read_regular,
    remove_leftovers,
    write_whole,
)
from normrnn.locks import exclusive
from normrnn.runs.checkpoints import Checkpoints
from normrnn.runs.names import (
    CHECKPOINT,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    METRICS,
    MODEL,
    PREVIOUS,
)
from normrnn.runs.note import Note, changed_fields, is_intact, read_note
from normrnn.runs.rows import MetricsFile
from normrnn.seal import BLANK, is_sealed, seal

C = TypeVar("C", bound=Config)
WRITTEN = (CONFIG, MODEL, CHECKPOINT, PREVIOUS, ENVIRONMENT)
"""Files that training replaces."""
_TRIES = 5


class BusyError(UserError):
    """Another process trains in this directory."""


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsFile(path / METRICS)
        self.checkpoints = Checkpoints(path)
        self._verified: tuple[tuple[int, ...], dict[str, str]] = ((), {})

    def create(self) -> None:
        """Make the directory; refuse one with files of these names but no config."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "a file is in the way" if self.path.exists() else error.strerror
            raise UsageError(f"{self.path} cannot be created: {reason}") from None
        if not (self.path / CONFIG).exists():
            for name in (METRICS, MODEL, CHECKPOINT, PREVIOUS):
                if (self.path / name).exists():
                    raise UsageError(
                        f"{self.path} has a {name} but no {CONFIG}: not overwriting it"
                    )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory; BusyError if another process trains there."""
        busy = BusyError(f"another process is training in {self.path}")
        with exclusive(self.path / LOCK, busy):
            remove_leftovers(self.path, *WRITTEN)
            yield

    def write(self, name: str, content: bytes | bytearray | memoryview) -> None:
        """Replace a file atomically."""
        write_whole(self.path / name, content)

    def read(self, name: str) -> bytes:
        """Return the content of a required file."""
        try:
            limit = largest_tensors() if name.endswith(".safetensors") else SETTINGS
            return read_regular(self.path / name, limit)
        except FileNotFoundError:
            raise UserError(f"{self.path} is not a run directory: no {name}") from None
        except OSError as error:
            raise UserError(f"{self.path / name} cannot be read: {error.strerror}") from None

    def write_config(self, config: Config) -> None:
        """Save the config."""
        text = json.dumps(to_dict(config), indent=2, allow_nan=False)
        self.write(CONFIG, f"{text}\n".encode())

    def config(self, kind: type[C] = Config) -> C:
        """Return the run's config; UserError if it is of another task."""
        try:
            values = json.loads(self.read(CONFIG))
        except (ValueError, RecursionError):
            raise UserError(f"{self.path / CONFIG} is damaged: not JSON") from None
        config = read_config(values)
        if not isinstance(config, kind):
            raise UserError(f"{self.path} is a run of {config.recipe}, not of {kind.noun}")
        return config

    def has(self, name: str) -> bool:
        """Whether the file exists."""
        return (self.path / name).exists()

    def write_model(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
        """Write the best model with its checksum, which is returned."""
        *content, sha256 = sealed_tensors(tensors, metadata)
        write_whole(self.path / MODEL, *content)
        return sha256

    def read_model(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return weights and metadata of the best model; UserError if there is none, or if it is
        damaged or of another run."""
        if not self.has(MODEL):
            raise UserError(f"{self.path} has no {MODEL} yet: the first validation writes it")
        for _ in range(_TRIES):  # a running training may replace the model and the checkpoint
            state = file_state(self.path / MODEL)
            tensors, metadata = self._read_tensors()
            note = read_note(self.path)
            if note is None or note.owns(metadata) or not is_intact(self.path):
                break
        else:
            raise self.foreign_model()
        try:
            written = json.loads(metadata.get(CONFIG, "null"))
        except (ValueError, TypeError, RecursionError):
            raise UserError(f"{self.path / MODEL} is damaged: no config") from None
        if isinstance(written, Mapping):
            self._check_config(written, MODEL)
        self._verified = state, metadata
        return tensors, metadata

    def model_metadata(self) -> dict[str, str]:
        """Return the metadata of the best model, empty if there is none. The file is hashed once
        per content."""
        state, metadata = self._verified
        if file_state(self.path / MODEL) == state:
            return metadata
        return self.read_model()[1] if self.has(MODEL) else {}

    @property
    def saved_statistics(self) -> str:
        """The kind of statistics of the best model: "running" or "recalibrated"."""
        return self.model_metadata().get("statistics", "running")

    def fill(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Load weights into a network; UserError if they do not fit."""
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{MODEL} of {self.path} does not fit its {CONFIG}: {reason}") from None

    def foreign_model(self) -> UserError:
        """The error for a model of another run, or of an older state of this one."""
        return UserError(
            f"{self.path / MODEL} does not belong to the {CHECKPOINT} beside it: it is of another"
            " run, or of another update of this one"
        )

    def _read_tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        path = self.path / MODEL
        content = self.read(MODEL)
        end = 8 + int.from_bytes(content[:8], "little")
        sealed = is_sealed(content, path, 8, end)
        try:
            tensors = tensors_from_bytes(content)
            metadata = json.loads(content[8:end]).get("__metadata__", {})
        except (SafetensorError, ValueError, RecursionError):
            raise UserError(f"{path} is damaged: not a safetensors file") from None
        if not sealed:
            raise UserError(f"{path} is damaged: its checksum is missing")
        return tensors, metadata

    def write_checkpoint(self, payload: Mapping[str, Any], note: Note) -> None:
        """Write everything needed to resume."""
        self.checkpoints.write({"config": note.config, **payload}, asdict(note))

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return the newest checkpoint, None if there is none; UserError if it has another
        config."""
        payload = self.checkpoints.read()
        if payload is None:
            return None
        self._check_config(payload.get("config", {}), CHECKPOINT)
        if type(payload.setdefault("finished", 0)) is not int:
            raise UserError(f"{self.path / CHECKPOINT} is damaged: `finished` is not an integer")
        return payload

    def _check_config(self, written: Any, what: str) -> None:
        """Raise UserError if config.json was changed since `what` was written."""
        changed = changed_fields(to_dict(read_config(written)), to_dict(self.config())).refused
        if changed:
            raise UserError(
                f"{self.path / CONFIG} was changed since {what} was written: {changed}; restore it"
            )


def sealed_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[bytearray, memoryview, str]:
    """Return the header of a safetensors file with its checksum, the rest, and the checksum."""
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    content = memoryview(tensors_to_bytes(contiguous, {**metadata, "sha256": BLANK}))
    start = 8 + int.from_bytes(content[:8], "little")
    header, rest = bytearray(content[:start]), content[start:]
    return header, rest, seal(header, rest=rest)
