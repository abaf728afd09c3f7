"""The run directory: its files, written atomically and verified when read.

config.json, metrics.jsonl, model.safetensors (best on validation), checkpoint.pt (everything
needed to resume) and the previous one; evaluation.json from `normrnn evaluate`.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from normrnn.config.base import Config, settled
from normrnn.config.jsonio import differences, flat, to_dict
from normrnn.config.registry import read_config
from normrnn.errors import UsageError, UserError
from normrnn.files import (
    SETTINGS,
    file_state,
    largest_tensors,
    open_regular,
    read_regular,
    remove_leftovers,
    write_whole,
)
from normrnn.locks import exclusive
from normrnn.runs.checkpoints import Checkpoints
from normrnn.runs.metrics import MetricsFile
from normrnn.runs.names import (
    CHECKPOINT,
    CONFIG,
    ENVIRONMENT,
    LOCK,
    METRICS,
    MODEL,
    PREVIOUS,
)
from normrnn.runs.note import model_belongs
from normrnn.seal import BLANK, is_sealed, seal

C = TypeVar("C", bound=Config)
WRITTEN = (CONFIG, MODEL, CHECKPOINT, PREVIOUS, ENVIRONMENT)
"""Files that training replaces."""
DATA_CHANGED = "the data has changed"
_TRIES = 5


class BusyError(UserError):
    """Another process trains in this directory."""


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsFile(path / METRICS)
        self.checkpoints = Checkpoints(path)
        self._verified: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {}

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

    def write_tensors(
        self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> str:
        """Write a safetensors file with its checksum, which is returned."""
        *content, sha256 = sealed_tensors(tensors, metadata)
        write_whole(self.path / name, *content)
        return sha256

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file, verified."""
        return self._tensors(name)[0]

    def read_model(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return weights and metadata of the best model; UserError if there is none or its config
        differs."""
        if not self.has(MODEL):
            raise UserError(f"{self.path} has no {MODEL} yet: the first validation writes it")
        weights, metadata = self._tensors(MODEL)
        self._check_header(metadata)
        return weights, metadata

    def check_model(self) -> None:
        """Raise UserError if there is a best model that is not of this run."""
        if self.has(MODEL):
            self._check_header(self.tensors_metadata(MODEL))

    def _check_header(self, metadata: Mapping[str, str]) -> None:
        try:
            written = json.loads(metadata.get(CONFIG, "null"))
        except (ValueError, TypeError, RecursionError):
            raise UserError(f"{self.path / MODEL} is damaged: no config") from None
        self.check_config(self.config(), written, MODEL)

    def fill(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Load weights into a network; UserError if they do not fit."""
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{MODEL} of {self.path} does not fit its {CONFIG}: {reason}") from None

    def model_sha256(self) -> str | None:
        """Checksum of the best model; None if there is none."""
        return self.tensors_metadata(MODEL).get("sha256") if self.has(MODEL) else None

    @property
    def saved_statistics(self) -> str:
        """The kind of statistics of the best model: "running" or "recalibrated"."""
        return self.tensors_metadata(MODEL).get("statistics", "running")

    def tensors_metadata(self, name: str) -> dict[str, str]:
        """Return the metadata of a safetensors file, which is hashed once per content."""
        state = file_state(self.path / name)
        known, metadata = self._verified.get(name, ((), {}))
        return metadata if state and state == known else self._tensors(name)[1]

    def _tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return tensors and metadata; UserError if damaged or a model of another run."""
        for _ in range(_TRIES):  # a running training may replace the model and the checkpoint
            state = file_state(self.path / name)
            tensors, metadata = self._read_tensors(name)
            if name != MODEL or model_belongs(self.path, metadata):
                self._verified[name] = state, metadata
                return tensors, metadata
        raise self.foreign_model()

    def foreign_model(self) -> UserError:
        """The error for a model of another run, or of an older state of this one."""
        return UserError(
            f"{self.path / MODEL} does not belong to the {CHECKPOINT} beside it: it is of another"
            " run, or of another update of this one"
        )

    def _read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        path = self.path / name
        with contextlib.suppress(OSError):  # `read` reports it
            tensors_header(path)
        content = self.read(name)
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        sealed = is_sealed(content, path, 8, 8 + len(header))
        try:
            tensors = tensors_from_bytes(content)
            metadata = json.loads(header).get("__metadata__", {})
        except (SafetensorError, ValueError, RecursionError):
            raise UserError(f"{path} is damaged: not a safetensors file") from None
        if not sealed:
            raise UserError(f"{path} is damaged: its checksum is missing")
        return tensors, metadata

    def write_checkpoint(
        self,
        payload: Mapping[str, Any],
        config: Config,
        written: tuple[int, str] = (0, ""),
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Write everything needed to resume, with the run's config.

        `written` is the size and the hash of metrics.jsonl; `state` names the run and the update
        (`note.belongs`).
        """
        values = to_dict(config)
        note = {"config": values, "metrics_bytes": written[0], "metrics_sha256": written[1]}
        note |= state or {}
        self.checkpoints.write({"config": values, **payload}, note)

    def read_checkpoint(self, config: Config) -> dict[str, Any] | None:
        """Return the newest checkpoint, None if there is none; UserError if of another run."""
        payload = self.checkpoints.read()
        if payload is None:
            return None
        changed = changed_fields(read_config(payload.get("config", {})), config)
        if changed:
            raise UserError(f"{self.path / CHECKPOINT} belongs to another run: {changed}")
        if type(payload.setdefault("finished", 0)) is not int:
            raise UserError(f"{self.path / CHECKPOINT} is damaged: `finished` is not an integer")
        return payload

    def check_config(self, config: Config, written: Any, what: str) -> None:
        """Raise UserError if config.json was changed since `what` was written."""
        if isinstance(written, Mapping) and (
            changed := changed_fields(read_config(written), config)
        ):
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


def tensors_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file without reading the tensors; UserError if it is
    damaged or declares another size than the file has."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        try:
            if length > min(size - 8, SETTINGS):
                raise ValueError("header too large")
            header = json.loads(file.read(length))
            tensors = {name: of for name, of in header.items() if name != "__metadata__"}
            ends = [of["data_offsets"][1] for of in tensors.values()]
            if max(ends, default=0) != size - 8 - length:
                raise ValueError("another size")
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise UserError(f"{path} is damaged: not a safetensors file") from None
    return header


def changed_fields(old: Config, new: Config) -> str:
    """Describe the fields in which two configs may not differ in one run; empty if none do.

    The epochs may differ, and the data may have moved with the same content.
    """
    changed = differences(to_dict(old), to_dict(new))
    gamma = "model.gamma"
    if len({settled(flat(to_dict(config))).get(gamma) for config in (old, new)}) == 1:
        changed.pop(gamma, None)
    for name in ("epochs", "data", "shared_initialisation"):
        changed.pop(name, None)
    if "recipe" in changed:
        return changed["recipe"]
    if "data_sha256" in changed:  # the hash itself is not shown
        del changed["data_sha256"]
        changed = {"data": DATA_CHANGED, **changed}
    return ", ".join(changed.values())
