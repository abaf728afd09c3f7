"""Arrays in every accepted form as sequences: checked, split, with integer classes."""

import gzip
import hashlib
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normrnn.arrays.config import ArrayConfig, ArraysConfig
from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, open_regular, replacing, resolved

SPLITS = ("train", "valid", "test")
_PARTS = ("x", "y", "lengths", "groups")
KEYS = {*_PARTS, *(f"{part}_{split}" for part in _PARTS for split in SPLITS)}
_PERMUTATION_SEED = 1
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Split:
    """Sequences as rows (R, F), sequence after sequence, with one target per sequence or row."""

    rows: Array
    lengths: Array
    targets: Array

    @property
    def starts(self) -> Array:
        """Return the first row of every sequence."""
        return np.cumsum(self.lengths) - self.lengths

    def take(self, chosen: Array) -> "Split":
        """Return some of the sequences: those where `chosen` (N,) is true."""
        rows = np.repeat(chosen, self.lengths)
        is_per_step = len(self.targets) != len(self.lengths)
        targets = self.targets[rows if is_per_step else chosen]
        return Split(self.rows[rows], self.lengths[chosen], targets)


@dataclass(frozen=True)
class Arrays:
    """A data set: its splits, "test" only where there is one, and what its targets are."""

    splits: Mapping[str, Split]
    per_step: bool
    labels: Array | None
    """Labels of the classes, sorted; None for values."""
    where: str
    sha256: str

    @property
    def outputs(self) -> int:
        """Return the number of classes or of values per target."""
        if self.labels is not None:
            return len(self.labels)
        return self.splits["train"].targets[:1].size

    @property
    def summary(self) -> str:
        """Return the sizes of the data set in a line."""
        train = self.splits["train"]
        sizes = [f"{len(v.lengths):,} {s}" for s, v in self.splits.items()]
        kind = "values" if self.labels is None else "classes"
        steps = " to ".join(f"{n}" for n in np.unique([train.lengths.min(), train.lengths.max()]))
        return (
            f"{self.where}: {', '.join(sizes)} sequences of {steps} steps, {train.rows.shape[1]}"
            f" features, {self.outputs} {kind} per {'step' if self.per_step else 'sequence'}"
        )


def read_arrays(config: ArrayConfig) -> Arrays:
    """Return the data set of a config; UserError for anything that cannot be trained on."""
    options = config.arrays
    if options.source == "adding":
        parts, where = _adding(options), "generated:adding"
    elif not config.data:
        wanted = "FILE.npz" if options.source == "file" else "DIR, with the four idx files"
        raise UsageError(f"{config.recipe} needs data: pass --data {wanted}")
    elif options.source == "file":
        path = resolved(expanded(config.data))
        parts, where = _npz(path), str(path)
    else:
        path = resolved(expanded(config.data))
        parts, where = _mnist(path, options.source == "permuted-mnist"), str(path)
    return prepare(parts, options, where)


def prepare(parts: Mapping[str, Any], options: ArraysConfig, where: str = "arrays") -> Arrays:
    """Check arrays and split them into training, validation and test sequences."""
    try:
        return _prepare(parts, options, where)
    except (ValueError, TypeError, IndexError) as error:  # also NumPy's, about shapes and types
        raise UserError(f"{where}: {error}") from None


def write_arrays(parts: Mapping[str, Any], options: ArraysConfig, out: Path) -> Path:
    """Check and split arrays given in Python, and write them to a file in `out`, named by their
    content, which the processes of a comparison read; return its path.

    UserError, before anything is written, for arrays that cannot be trained on.
    """
    checked = prepare(parts, options)
    path = out / f"data-{checked.sha256[:12]}.npz"
    content = {
        f"{part}_{split}": array
        for split, one in checked.splits.items()
        for part, array in (("x", one.rows), ("lengths", one.lengths), ("y", one.targets))
    }
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, **content)
    return path


def _prepare(parts: Mapping[str, Any], options: ArraysConfig, where: str) -> Arrays:
    unknown = sorted(set(parts) - KEYS)
    if unknown:
        raise ValueError(f"unknown array {unknown[0]!r}; known are x, y, lengths, groups")
    suffix = "_train" if "x_train" in parts else ""
    suffixes = {"train": suffix, "valid": "_valid", "test": "_test"}
    splits = {
        split: _split(parts, end)
        for split, end in suffixes.items()
        if split == "train" or f"x{end}" in parts
    }
    first = splits["train"]
    per_step = len(first.targets) != len(first.lengths)
    if "valid" not in splits:
        groups = parts.get(f"groups{suffix}")
        splits |= _divided(first, groups, options, "test" not in splits)
        first = splits["train"]
    is_float = first.targets.dtype.kind == "f"
    labels = None if is_float else np.unique(first.targets)
    if labels is not None and len(labels) < 2:
        raise ValueError(f"the training targets have one class only, {labels[0]!r}")
    for name, one in splits.items():
        shapes = [(v.rows.shape[1:], v.targets.shape[1:]) for v in (one, first)]
        is_same = shapes[0] == shapes[1] and (one.targets.dtype.kind == "f") == is_float
        if not is_same or len(one.targets) != len(one.rows if per_step else one.lengths):
            raise ValueError(f"x or y of {name} differ from the training data in form")
        if not len(one.lengths):
            raise ValueError(f"the {name} split is empty")
        if labels is not None:
            strange = np.setdiff1d(one.targets, labels)
            if len(strange):
                raise ValueError(
                    f"the {name} split has the label {strange[0]!r}, which the training data lacks"
                )
            splits[name] = replace(one, targets=np.searchsorted(labels, one.targets))
    digest = hashlib.sha256()
    for name, split in sorted(splits.items()):
        for array in (split.rows, split.lengths, split.targets):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return Arrays(splits, per_step, labels, where, digest.hexdigest())


def _split(parts: Mapping[str, Any], suffix: str) -> Split:
    """Return x and y of a split, in any accepted form, as rows."""
    missing = [name for name in (f"x{suffix}", f"y{suffix}") if name not in parts]
    if missing:
        raise ValueError(f"no {missing[0]}; there are {', '.join(sorted(parts))}")
    x, y = (_joined(parts[f"{part}{suffix}"]) for part in "xy")
    lengths = parts.get(f"lengths{suffix}", x.lengths)
    rows, targets, shape = x.array, y.array, x.array.shape
    if rows.ndim == 3 and (lengths is None or np.shape(lengths) == shape[:1]):
        lengths = np.full(len(rows), shape[1]) if lengths is None else np.asarray(lengths)
        used = np.arange(shape[1]) < lengths[:, None]
        targets = targets[used] if targets.shape[:2] == used.shape else targets
        rows = rows[used]
    if rows.ndim != 2 or not rows.shape[1] or lengths is None:
        raise ValueError(
            f"x{suffix} has shape {shape}, lengths {getattr(lengths, 'shape', None)}; expected"
            " (N, T, F), a list of (T_i, F) arrays, or (R, F) rows with lengths (N,) of sum R"
        )
    lengths = np.asarray(lengths)
    if lengths.dtype.kind not in "iu" or (lengths < 1).any() or lengths.sum() != len(rows):
        raise ValueError(f"lengths{suffix} must be integers of at least 1 that fit x{suffix}")
    for one in (x, y):
        if one.lengths is not None and not np.array_equal(one.lengths, lengths):
            raise ValueError(f"x{suffix}, y{suffix} and lengths{suffix} differ in length")
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    counts = len(lengths), len(rows)
    if targets.ndim not in (1, 2) or len(targets) not in counts:
        raise ValueError(
            f"y{suffix} has shape {targets.shape}; expected a target for each of {counts[0]}"
            f" sequences or of {counts[1]} steps"
        )
    if targets.dtype.kind != "f" and (targets.dtype.kind not in "iubU" or targets.ndim != 1):
        raise ValueError(f"y{suffix} must hold one label per target, or floats")
    rows = rows if rows.dtype == np.uint8 else _finite(rows, f"x{suffix}")
    targets = _finite(targets, f"y{suffix}") if targets.dtype.kind == "f" else targets
    return Split(rows, lengths.astype(np.int64), targets)


class _Joined(NamedTuple):
    array: Array
    lengths: Array | None
    """Of the arrays in a list."""


def _joined(value: Any) -> _Joined:
    """Return arrays in a list, which may differ in length, one after another; else an array."""
    value = value if isinstance(value, list | tuple) else np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _Joined(value, None)
    if not len(value) or not np.ndim(value[0]):
        return _Joined(np.asarray(list(value)), None)
    pieces = [np.asarray(one) for one in value]
    return _Joined(np.concatenate(pieces), np.array([len(piece) for piece in pieces]))


def _finite(values: Array, name: str) -> Array:
    if values.dtype.kind not in "fiub" or not np.isfinite(values).all():
        raise ValueError(f"{name} must hold numbers, none of them NaN or infinite")
    return values.astype(np.float32)


def _divided(whole: Split, groups: Any, options: ArraysConfig, with_test: bool) -> dict[str, Split]:
    """Split sequences by shares: whole groups where given, else the same share of every class."""
    random = np.random.default_rng(options.split_seed)
    count = len(whole.lengths)
    unit, stratum = np.arange(count), np.zeros(count, int)
    if groups is not None:
        if np.shape(groups) != (count,):
            raise ValueError(f"groups has shape {np.shape(groups)}, not ({count},)")
        unit = np.unique(groups, return_inverse=True)[1]
    elif whole.targets.dtype.kind != "f" and len(whole.targets) == count:
        stratum = np.unique(whole.targets, return_inverse=True)[1]
    # The groups, or the sequences of one class, of which shares are taken together.
    strata = [np.unique(unit[stratum == one]) for one in np.unique(stratum)]
    shares = {"valid": options.valid, "test": options.test if with_test else 0.0}
    chosen: dict[str, list[int]] = {split: [] for split in SPLITS}
    carry = dict.fromkeys(shares, 0.0)
    for stratum in strata:
        order, start = random.permutation(stratum), 0
        for split, share in shares.items():
            # What rounding leaves over goes to the next class.
            wanted = share * len(order) + carry[split]
            take = min(math.floor(wanted + 1e-9), len(order) - 1 - start)
            carry[split] = wanted - take
            chosen[split] += order[start : start + take].tolist()
            start += take
        chosen["train"] += order[start:].tolist()
    if not shares["test"]:
        del chosen["test"]
    return {s: whole.take(np.isin(unit, some)) for s, some in chosen.items()}


def _npz(path: Path) -> dict[str, Array]:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not an .npz file of plain arrays ({error}); save ragged sequences as"
            " concatenated rows x with lengths"
        ) from None


def _mnist(directory: Path, permuted: bool) -> dict[str, Array]:
    parts: dict[str, Array] = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = _idx(directory, f"{prefix}-images?idx3-ubyte", 3)
        pixels = images.reshape(len(images), -1)
        if permuted:
            order = np.random.default_rng(_PERMUTATION_SEED).permutation(pixels.shape[1])
            pixels = pixels[:, order]
        labels = _idx(directory, f"{prefix}-labels?idx1-ubyte", 1)
        parts |= {f"x_{split}": pixels[:, :, None], f"y_{split}": labels}
    return parts


def _idx(directory: Path, pattern: str, dimensions: int) -> Array:
    """Return the array of an idx file of bytes, gzipped or not."""
    path = next((p for p in [*directory.glob(pattern), *directory.glob(f"{pattern}.gz")]), None)
    if path is None:
        name = pattern.replace("?", "-")
        raise UserError(f"{directory} has no {name} or {name}.gz, one of the idx files of MNIST")
    try:
        with open_regular(path) as file:
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            header = stream.read(4 + 4 * dimensions)
            shape = np.frombuffer(header[4:], ">u4").tolist()
            content = stream.read(min(math.prod(shape), 2**31) + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if header[:4] != bytes((0, 0, 8, dimensions)) or len(content) != math.prod(shape):
        raise UserError(f"{path} is not an idx file of bytes with {dimensions} dimensions")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _adding(options: ArraysConfig) -> dict[str, Array]:
    """Return the adding problem: a value and a marker per step, the sum of two marked values."""
    random = np.random.default_rng(options.split_seed)
    count, steps = options.sequences, options.steps
    values = random.random((count, steps), dtype=np.float32)
    first = random.integers(0, steps // 2, count)
    second = random.integers(steps // 2, steps, count)
    markers = np.zeros_like(values)
    every = np.arange(count)
    markers[every, first] = markers[every, second] = 1
    y = values[every, first] + values[every, second]
    return {"x": np.stack([values, markers], 2), "y": y}
