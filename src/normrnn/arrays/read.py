"""Arrays in every accepted form as sequences: checked, split, with integer classes."""

import gzip
import hashlib
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from normrnn.arrays.config import ArrayConfig, ArraysConfig
from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, largest_tensors, open_regular, replacing, resolved

SPLITS = ("train", "valid", "test")
KEYS = {
    f"{part}{end}"
    for part in ("x", "y", "lengths")
    for end in ("", *(f"_{split}" for split in SPLITS))
} | {"groups", "groups_train"}
_PERMUTATION_SEED = 1
_UNREADABLE = (OSError, EOFError, ValueError, MemoryError)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Split:
    """Sequences as rows (R, F), sequence after sequence, with one target per sequence or row."""

    rows: Array
    lengths: Array
    targets: Array

    @property
    def per_step(self) -> bool:
        """Whether every row has a target, not every sequence."""
        return len(self.targets) != len(self.lengths)

    @property
    def starts(self) -> Array:
        """Return the first row of every sequence."""
        return np.cumsum(self.lengths) - self.lengths

    def take(self, chosen: Array) -> "Split":
        """Return some of the sequences: those where `chosen` (N,) is true."""
        rows = np.repeat(chosen, self.lengths)
        targets = self.targets[rows if self.per_step else chosen]
        return Split(self.rows[rows], self.lengths[chosen], targets)


@dataclass(frozen=True)
class Arrays:
    """A data set: its splits, "test" only where there is one, and what its targets are."""

    splits: Mapping[str, Split]
    labels: Array | None  # labels of the classes, sorted; None for values
    where: str
    sha256: str

    @property
    def per_step(self) -> bool:
        """Whether every step has a target, not every sequence."""
        return self.splits["train"].per_step

    @property
    def outputs(self) -> int:
        """Return the number of classes or of values per target."""
        targets = self.splits["train"].targets
        return targets[:1].size if self.labels is None else len(self.labels)

    @property
    def summary(self) -> str:
        """Return the sizes of the data set in a line."""
        rows, lengths = self.splits["train"].rows, self.splits["train"].lengths
        sizes = ", ".join(f"{len(v.lengths):,} {s}" for s, v in self.splits.items())
        steps = " to ".join(str(n) for n in np.unique([lengths.min(), lengths.max()]))
        kind = "values" if self.labels is None else "classes"
        return (
            f"{self.where}: {sizes} sequences of {steps} steps, {rows.shape[1]} features,"
            f" {self.outputs} {kind} per {'step' if self.per_step else 'sequence'}"
        )


def read_arrays(config: ArrayConfig) -> Arrays:
    """Return the data set of a config; UserError for anything that cannot be trained on."""
    options, source = config.arrays, config.arrays.source
    if source == "adding":
        if config.data != "generated:adding":
            raise UsageError(f"{config.recipe} generates its data: it takes no --data")
        return prepare(_adding(options), options, "generated:adding")
    if not config.data:
        wanted = "FILE.npz" if source == "file" else "DIR, with the four idx files"
        raise UsageError(f"{config.recipe} needs data: pass --data {wanted}")
    path = resolved(expanded(config.data))
    parts = _npz(path) if source == "file" else _mnist(path, source == "permuted-mnist")
    return prepare(parts, options, str(path))


def prepare(parts: Mapping[str, Any], options: ArraysConfig, where: str = "arrays") -> Arrays:
    """Check arrays and split them into training, validation and test sequences."""
    try:
        return _prepare(parts, options, where)
    # Also NumPy's, about shapes and types, and torch's, about tensors that require gradients.
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(f"{where}: {error}") from None


def write_arrays(parts: Mapping[str, Any], options: ArraysConfig, out: Path) -> Path:
    """Check and split arrays given in Python, and write them to a file in `out`, named by their
    content, which the processes of a comparison read; return its path.

    UserError, before anything is written, for arrays that cannot be trained on.
    """
    checked = prepare(parts, options)
    path = out / f"data-{checked.sha256[:12]}.npz"
    content: dict[str, Array] = {}
    for split, one in checked.splits.items():
        y = one.targets if checked.labels is None else checked.labels[one.targets]
        content |= {f"x_{split}": one.rows, f"lengths_{split}": one.lengths, f"y_{split}": y}
    out.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **content)
    return path


def _prepare(parts: Mapping[str, Any], options: ArraysConfig, where: str) -> Arrays:
    if unknown := set(parts) - KEYS:
        raise ValueError(
            f"unknown array {min(unknown)!r}; known are groups, groups_train, and x, y and lengths,"
            " alone or with _train, _valid and _test"
        )
    if "x" in parts and "x_train" in parts:
        raise ValueError("x and x_train are both there: give one of them")
    for name in parts:
        if (needed := f"x{name.removeprefix(name.partition('_')[0])}") not in parts:
            raise ValueError(f"{name} is there without {needed}")
    has_lengths = any(f"lengths_{split}" in parts for split in SPLITS)
    for x in (f"x_{split}" for split in SPLITS if has_lengths):
        if getattr(parts.get(x), "ndim", 0) == 3 and f"lengths{x[1:]}" not in parts:
            raise ValueError(f"{x} has no lengths{x[1:]}, but another split has lengths")
    suffix = "_train" if "x_train" in parts else ""
    splits = {"train": _split(parts, suffix)}
    splits |= {s: _split(parts, f"_{s}") for s in SPLITS[1:] if f"x_{s}" in parts}
    groups = parts.get(f"groups{suffix}")
    if "valid" not in splits:
        splits |= _split_by_share(splits["train"], groups, options, "test" not in splits)
    elif groups is not None:
        raise ValueError("groups and x_valid are both there: groups are for splits by share")
    train = splits["train"]
    is_float, per_step = train.targets.dtype.kind == "f", train.per_step
    labels = None if is_float else np.unique(train.targets)
    if labels is not None and labels.dtype.kind == "i" and labels[0] == -100:
        raise ValueError("y has the label -100: targets cannot be left out; leave out the steps")
    most = math.inf if per_step else max(20, len(train.targets) / 2)
    if labels is not None and labels.dtype.kind in "iu" and len(labels) > most:
        raise ValueError(
            f"y has {len(labels)} labels in {len(train.targets)} training sequences; if they are"
            " values, not classes, give them as floats"
        )
    if labels is not None and len(labels) < 2:
        raise ValueError(f"the training targets have one class only, {labels[0].item()!r}")
    digest = hashlib.sha256()
    if labels is not None and labels.tolist() != [*range(len(labels))]:
        digest.update(repr(labels.tolist()).encode())
    for name, one in sorted(splits.items()):
        shapes = [(v.rows.shape[1:], v.targets.shape[1:]) for v in (one, train)]
        is_same = shapes[0] == shapes[1] and (one.targets.dtype.kind == "f") == is_float
        if not is_same or len(one.targets) != len(one.rows if per_step else one.lengths):
            raise ValueError(f"x or y of {name} differ from the training data in form")
        if not len(one.lengths):
            raise ValueError(f"the {name} split is empty")
        if labels is not None:
            if len(strange := np.setdiff1d(one.targets, labels)):
                label = strange[0].item()
                raise ValueError(f"the training data lacks the label {label!r} of the {name} split")
            splits[name] = one = replace(one, targets=np.searchsorted(labels, one.targets))
        for array in (one.rows, one.lengths, one.targets):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return Arrays(splits, labels, where, digest.hexdigest())


def _split(parts: Mapping[str, Any], suffix: str) -> Split:
    """Return x and y of a split, in any accepted form, as rows."""
    names = [f"x{suffix}", f"y{suffix}"]
    if missing := [name for name in names if name not in parts]:
        raise ValueError(f"no {missing[0]}; there are {', '.join(sorted(parts))}")
    (x, x_lengths), (y, y_lengths) = (_concatenate(parts[name]) for name in names)
    shape, lengths = x.shape, parts.get(f"lengths{suffix}", x_lengths)
    if x.ndim == 3 and x.size:
        lengths = np.full(len(x), shape[1]) if lengths is None else np.asarray(lengths)
        if lengths.shape == (len(x),):
            if lengths.max() > shape[1]:
                raise ValueError(f"lengths{suffix} has {lengths.max()}, x{suffix} {shape[1]} steps")
            is_used = np.arange(shape[1]) < lengths[:, None]
            y = y[is_used] if y.shape[:2] == is_used.shape else y
            x = x[is_used]
    lengths = np.asarray(lengths)
    if lengths.ndim == 1 and lengths.dtype.kind in "iuf" and not (lengths > 0).all():
        n = int((lengths <= 0).argmax())
        raise ValueError(f"lengths{suffix} of sequence {n} is {lengths[n]}, not above 0")
    is_count = lengths.ndim == 1 and lengths.dtype.kind in "iu" and (lengths > 0).all()
    if x.ndim != 2 or not x.shape[1] or not is_count or lengths.sum() != len(x):
        raise ValueError(
            f"x{suffix} has shape {shape}, lengths{suffix} {lengths.shape}; expected (N, T, F), if"
            " padded with integer lengths of 1 to T, a list of (T_i, F) arrays, or (R, F) rows with"
            " integer lengths (N,) of sum R; sequences of one feature need x[..., None]"
        )
    for name, own in (("x", x_lengths), ("y", y_lengths)):
        if own is not None and not np.array_equal(own, lengths):
            n = int((own != lengths).argmax()) if len(own) == len(lengths) else "0 or a later one"
            raise ValueError(
                f"{name}{suffix} and lengths{suffix} or x{suffix} differ: sequence {n}"
            )
    y = np.char.decode(y, "utf-8") if y.dtype.kind == "S" else y
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    is_float, is_labels = y.dtype.kind == "f", y.dtype.kind in "iubU"
    is_form = (is_float and y.ndim in (1, 2)) or (is_labels and y.ndim == 1)
    if not is_form or len(y) not in (len(lengths), len(x)):
        raise ValueError(
            f"y{suffix} has shape {y.shape} and type {y.dtype}; expected one label, or floats, for"
            f" each of {len(lengths)} sequences or of {len(x)} steps"
        )
    x = x if x.dtype == np.uint8 else _finite(x, f"x{suffix}", lengths)
    y = _finite(y, f"y{suffix}", lengths) if is_float else y
    return Split(x, lengths.astype(np.int64), y)


def _concatenate(value: Any) -> tuple[Array, Array | None]:
    """Return an array; of arrays in a list, these one after another, and their lengths."""
    value = value if isinstance(value, list | tuple) else np.asarray(value)
    if isinstance(value, np.ndarray) and not value.ndim:
        raise ValueError(f"expected an array or a list of arrays, not {value!r:.60}")
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value, None
    pieces = [np.asarray(one) for one in value]
    if not pieces or not pieces[0].ndim:
        return np.asarray(list(value)), None
    if len(shapes := {piece.shape[1:] for piece in pieces}) > 1:
        raise ValueError(f"arrays of one list have steps of different shapes: {sorted(shapes)}")
    return np.concatenate(pieces), np.array([len(piece) for piece in pieces])


def _finite(values: Array, name: str, lengths: Array) -> Array:
    if values.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold numbers, not {values.dtype}")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    is_wrong = ~np.isfinite(values).all(tuple(range(1, values.ndim)))
    if is_wrong.any():
        row = n = int(is_wrong.argmax())
        if len(values) != len(lengths):
            n = int(np.searchsorted(np.cumsum(lengths), row, "right"))
        raise ValueError(f"{name} has NaN or inf in sequence {n}; padded sequences need lengths")
    return values


def _split_by_share(
    whole: Split, groups: Any, options: ArraysConfig, with_test: bool
) -> dict[str, Split]:
    """Split sequences by shares: whole groups where given, else the same share of every class."""
    count = len(whole.lengths)
    unit, labels = np.arange(count), np.zeros(count)
    if groups is not None:
        if np.shape(groups) != (count,):
            raise ValueError(f"groups has shape {np.shape(groups)}, not ({count},)")
        unit = np.unique(groups, return_inverse=True)[1]
    elif whole.targets.dtype.kind != "f" and not whole.per_step:
        labels = whole.targets
    order = np.random.default_rng(options.split_seed).permutation(unit.max(initial=-1) + 1)
    order = order[np.argsort(labels[order], kind="stable")]
    splits = {}
    shares = {"valid": options.valid, "test": options.test / (1 - options.valid) * with_test}
    for split, share in shares.items():
        if share:
            # At equal distances, so that each label has its share; its first stays in training.
            is_taken = np.diff(np.floor(np.arange(len(order) + 1) * share + 1e-9)) > 0
            first = np.unique(labels[order], return_index=True)[1]
            is_taken[first] = False
            if not is_taken.any() and len(order) > len(first):
                is_taken[np.delete(np.arange(len(order)), first)[-1]] = True
            splits[split] = whole.take(np.isin(unit, order[is_taken]))
            order = order[~is_taken]
    return {**splits, "train": whole.take(np.isin(unit, order))}


def _npz(path: Path) -> dict[str, Array]:
    try:
        with open_regular(path) as file:
            # BadZipFile for anything else, as a .npy file
            size = sum(member.file_size for member in zipfile.ZipFile(file).infolist())
            if size > (limit := largest_tensors()):
                raise ValueError(f"its arrays have {size:,} bytes, the limit is {limit:,}")
            file.seek(0)
            content = np.load(file, allow_pickle=False)
            return {name: content[name] for name in content.files}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (*_UNREADABLE, zipfile.BadZipFile, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not an .npz file of plain arrays ({error}); save ragged sequences as"
            " concatenated rows x with lengths"
        ) from None


def _mnist(directory: Path, permuted: bool) -> dict[str, Array]:
    parts: dict[str, Array] = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        images = _idx(directory, f"{prefix}-images?idx3-ubyte", 3)
        pixels = images.reshape(len(images), -1, 1)
        if permuted:
            random = np.random.default_rng(_PERMUTATION_SEED)
            pixels = pixels[:, random.permutation(pixels.shape[1])]
        parts |= {f"x_{split}": pixels}
        parts |= {f"y_{split}": _idx(directory, f"{prefix}-labels?idx1-ubyte", 1)}
    return parts


def _idx(directory: Path, pattern: str, dimensions: int) -> Array:
    """Return the array of an idx file of bytes, gzipped or not."""
    path = next((p for end in ("", ".gz") for p in directory.glob(pattern + end)), None)
    if path is None:
        name = pattern.replace("?", "-")
        raise UserError(f"{directory} has no {name} or {name}.gz, one of the idx files of MNIST")
    try:
        with open_regular(path) as file:
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            is_bytes = stream.read(4) == bytes((0, 0, 8, dimensions))
            shape = np.frombuffer(stream.read(4 * dimensions), ">u4").tolist()
            content = stream.read(min(math.prod(shape), 2**31) + 1 if is_bytes else 0)
            return np.frombuffer(content, np.uint8).reshape(shape)
    except (*_UNREADABLE, zlib.error) as error:
        raise UserError(f"{path} is not an idx file of {dimensions} dimensions: {error}") from None


def _adding(options: ArraysConfig) -> dict[str, Array]:
    """Return the adding problem: a value and a marker per step, the sum of two marked values."""
    random = np.random.default_rng(options.split_seed)
    count, steps = options.sequences, options.steps
    x = np.zeros((count, steps, 2), np.float32)
    x[:, :, 0] = random.random((count, steps), dtype=np.float32)
    first = np.arange(count), random.integers(0, steps // 2, count)
    second = np.arange(count), random.integers(steps // 2, steps, count)
    x[:, :, 1][first] = x[:, :, 1][second] = 1
    return {"x": x, "y": x[:, :, 0][first] + x[:, :, 0][second]}
