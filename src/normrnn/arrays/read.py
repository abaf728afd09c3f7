"""Arrays in every accepted form as sequences: checked, split, with integer classes."""

import gzip
import hashlib
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normrnn.arrays.config import ArrayConfig, ArraysConfig
from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, open_regular, resolved

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

    def take(self, which: Array) -> "Split":
        """Return some of the sequences, in this order."""
        ends = np.cumsum(self.lengths)
        spans = [(int(ends[i] - self.lengths[i]), int(ends[i])) for i in which]
        row = np.concatenate([np.arange(start, stop) for start, stop in spans])
        targets = self.targets[which] if len(self.targets) == len(self.lengths) else None
        return Split(
            self.rows[row],
            self.lengths[which],
            self.targets[row] if targets is None else targets,
        )


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
        targets = self.splits["train"].targets
        return 1 if targets.ndim == 1 else targets.shape[1]


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
    unknown = sorted(set(parts) - KEYS)
    if unknown:
        raise UserError(f"{where}: unknown array {unknown[0]!r}; known are x, y, lengths, groups")
    train = "x_train" if "x_train" in parts else "x"
    if train not in parts or train.replace("x", "y") not in parts:
        raise UserError(f"{where}: needs x and y, or x_train and y_train, has {sorted(parts)}")
    suffixes = {
        split: suffix
        for split, suffix in zip(SPLITS, (train[1:], "_valid", "_test"), strict=True)
        if f"x{suffix}" in parts
    }
    splits = {split: _sequences(parts, suffix, where) for split, suffix in suffixes.items()}
    per_step = {s: len(v.targets) == len(v.rows) > len(v.lengths) for s, v in splits.items()}
    if len(set(per_step.values())) > 1:
        raise UserError(f"{where}: targets are per step in some splits only")
    first = splits["train"]
    for split, one in splits.items():
        if _form(one) != _form(first):
            raise UserError(f"{where}: x or y of {split} differ from the training data in form")
    if "valid" not in splits:
        groups = parts.get(f"groups{suffixes['train']}")
        splits |= _divided(first, groups, options, "test" not in splits, where)
    for split, one in splits.items():
        if not len(one.lengths):
            raise UserError(f"{where}: the {split} split is empty")
    labels = None
    if first.targets.dtype.kind != "f":
        labels, splits = _classes(splits, where)
    digest = hashlib.sha256()
    for name, split in sorted(splits.items()):
        for array in (split.rows, split.lengths, split.targets):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return Arrays(splits, per_step["train"], labels, where, digest.hexdigest())


def _form(split: Split) -> tuple[Any, ...]:
    return split.rows.shape[1:], split.targets.shape[1:], split.targets.dtype.kind == "f"


def _sequences(parts: Mapping[str, Any], suffix: str, where: str) -> Split:
    """Return x and y of a split as rows and lengths."""
    name = f"x{suffix}"
    if f"y{suffix}" not in parts:
        raise UserError(f"{where}: there is {name} but no y{suffix}")
    x, lengths = parts[name], parts.get(f"lengths{suffix}")
    if lengths is not None:
        lengths = np.asarray(lengths)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 1).any():
            raise UserError(f"{where}: lengths{suffix} must be (N,) integers of at least 1")
        lengths = lengths.astype(np.int64)
    padded = None  # (N, T) of padded input
    if _is_list(x):
        if lengths is not None:
            raise UserError(f"{where}: {name} is a list of sequences, so lengths are not needed")
        pieces = [np.asarray(one) for one in x]
        if not pieces or any(p.ndim != 2 for p in pieces) or len({p.shape[1] for p in pieces}) > 1:
            raise UserError(f"{where}: {name} must hold (T_i, F) arrays with one F")
        lengths, rows = np.array([len(p) for p in pieces]), np.concatenate(pieces)
        if not lengths.all():
            raise UserError(f"{where}: {name} holds a sequence without steps")
    elif (x := np.asarray(x)).ndim == 3:
        padded = x.shape[:2]
        lengths = np.full(len(x), x.shape[1]) if lengths is None else lengths
        if len(lengths) != len(x) or (len(x) and lengths.max() > x.shape[1]):
            raise UserError(f"{where}: lengths{suffix} do not fit {name} of shape {x.shape}")
        rows = x[_used(padded, lengths)]
    elif x.ndim == 2 and lengths is not None and lengths.sum() == len(x):
        rows = x
    else:
        raise UserError(
            f"{where}: {name} has shape {x.shape}; expected (N, T, F), a list of (T_i, F)"
            " arrays, or (R, F) rows with lengths whose sum is R"
        )
    if rows.dtype.kind not in "fiub" or not rows.shape[1]:
        raise UserError(f"{where}: {name} must hold numbers, with at least one feature")
    if rows.dtype != np.uint8:  # pixels take a quarter of the memory
        rows = _finite(rows, f"{where}: {name}")
    targets = _targets(parts[f"y{suffix}"], lengths, padded, f"{where}: y{suffix}")
    return Split(rows, lengths, targets)


def _targets(y: Any, lengths: Array, padded: tuple[int, int] | None, name: str) -> Array:
    """Return targets with one entry per sequence or per row."""
    count, total = len(lengths), int(lengths.sum())
    if _is_list(y) and len(y) and np.ndim(y[0]):
        pieces = [np.asarray(one) for one in y]
        if [len(p) for p in pieces] != lengths.tolist():
            raise UserError(f"{name} must have as many steps as x in every sequence")
        y = np.concatenate(pieces)
    else:
        y = np.asarray(list(y) if _is_list(y) else y)
        if padded is not None and y.shape[:2] == padded:
            y = y[_used(padded, lengths)]
    if y.ndim not in (1, 2) or len(y) not in (count, total):
        raise UserError(
            f"{name} has shape {y.shape}; expected a target for each of {count} sequences or of"
            f" {total} steps"
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dtype.kind == "f":
        return _finite(y, name)
    if y.dtype.kind not in "iubU" or y.ndim != 1:
        raise UserError(f"{name} must hold one label per target, or floats; it has {y.dtype}")
    return y


def _used(padded: tuple[int, int], lengths: Array) -> Array:
    """Return which steps (N, T) of padded input are not padding."""
    return np.arange(padded[1]) < lengths[:, None]


def _finite(values: Array, name: str) -> Array:
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"{name} has NaN or infinite values")
    return values


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (
        isinstance(value, np.ndarray) and value.dtype == object
    )


def _divided(
    whole: Split, groups: Any, options: ArraysConfig, with_test: bool, where: str
) -> dict[str, Split]:
    """Split sequences by shares: whole groups where given, else the same share of every class."""
    random = np.random.default_rng(options.split_seed)
    count = len(whole.lengths)
    unit, stratum = np.arange(count), np.zeros(count, int)
    if groups is not None:
        if np.shape(groups) != (count,):
            raise UserError(f"{where}: groups has shape {np.shape(groups)}, not ({count},)")
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
    parts = {}
    for split, some in chosen.items():
        if split == "test" and not shares["test"]:
            continue
        if not some:
            few = f"{len(np.unique(unit))} sequences or groups are too few"
            raise UserError(f"{where}: the {split} split is empty: {few}")
        parts[split] = whole.take(np.flatnonzero(np.isin(unit, some)))
    return parts


def _classes(splits: Mapping[str, Split], where: str) -> tuple[Array, dict[str, Split]]:
    """Return the labels of the training data, and the splits with class numbers as targets."""
    labels = np.unique(splits["train"].targets)
    if len(labels) < 2:
        raise UserError(f"{where}: the training targets have one class only, {labels[0]!r}")
    numbered = {}
    for name, split in splits.items():
        strange = np.setdiff1d(split.targets, labels)
        if len(strange):
            raise UserError(
                f"{where}: the {name} split has the label {strange[0]!r}, which the training data"
                " lacks"
            )
        numbers = np.searchsorted(labels, split.targets)
        numbered[name] = Split(split.rows, split.lengths, numbers)
    return labels, numbered


def _npz(path: Path) -> dict[str, Array]:
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as content:
            if not hasattr(content, "files"):
                raise UserError(f"{path} is a single array; expected an .npz file with x and y")
            return {name: content[name] for name in content.files}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise UserError(
            f"{path} is not an .npz file of plain arrays ({error}); save ragged sequences as"
            " concatenated rows x with lengths"
        ) from None


def _mnist(directory: Path, permuted: bool) -> dict[str, Array]:
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory with the four idx files of MNIST")
    parts: dict[str, Array] = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = _idx(directory, f"{prefix}-images-idx3-ubyte", 3)
        labels = _idx(directory, f"{prefix}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            raise UserError(f"{directory}: {len(images)} {split} images, {len(labels)} labels")
        pixels = images.reshape(len(images), -1)
        if permuted:
            order = np.random.default_rng(_PERMUTATION_SEED).permutation(pixels.shape[1])
            pixels = pixels[:, order]
        parts |= {f"x_{split}": pixels[:, :, None], f"y_{split}": labels}
    return parts


def _idx(directory: Path, name: str, dimensions: int) -> Array:
    """Return the array of an idx file of bytes, gzipped or not."""
    names = (name, f"{name}.gz", name.replace("-idx", ".idx"), f"{name.replace('-idx', '.idx')}.gz")
    path = next((directory / n for n in names if (directory / n).is_file()), None)
    if path is None:
        raise UserError(f"{directory} has no {name} or {name}.gz")
    try:
        with open_regular(path) as file:
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            header = stream.read(4 + 4 * dimensions)
            shape = tuple(np.frombuffer(header[4:], ">u4").astype(int).tolist())
            if header[:4] != bytes((0, 0, 8, dimensions)) or math.prod(shape) > 2**31:
                raise UserError(f"{path} is not an idx file of bytes with {dimensions} dimensions")
            content = stream.read(math.prod(shape) + 1)
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise UserError(f"{path} cannot be read: {error}") from None
    if len(content) != math.prod(shape):
        raise UserError(f"{path} is damaged: it does not hold {shape} bytes")
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


def describe(arrays: Arrays) -> str:
    """Return the sizes of a data set in a line."""
    train = arrays.splits["train"]
    sizes: Sequence[str] = [f"{len(v.lengths):,} {s}" for s, v in arrays.splits.items()]
    kind = "values" if arrays.labels is None else "classes"
    low, high = int(train.lengths.min()), int(train.lengths.max())
    steps = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"{arrays.where}: {', '.join(sizes)} sequences of {steps} steps, {train.rows.shape[1]}"
        f" features, {arrays.outputs} {kind} per {'step' if arrays.per_step else 'sequence'}"
    )
