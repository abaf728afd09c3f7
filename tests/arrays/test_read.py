"""Arrays in every accepted form, their splits, and errors before training."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normrnn.arrays.config import ArraysConfig
from normrnn.arrays.read import prepare, read_arrays, write_arrays
from normrnn.config.registry import with_settings
from normrnn.errors import UsageError, UserError
from normrnn.recipes import recipe

RANDOM = np.random.default_rng(1)
LENGTHS = np.array([3, 5, 4, 2] * 10)
PIECES = [RANDOM.normal(size=(n, 2)).astype(np.float32) for n in LENGTHS]
Y = np.arange(40) % 2


def padded(pieces: list[np.ndarray[Any, Any]], fill: float = np.nan) -> np.ndarray[Any, Any]:
    x = np.full((len(pieces), 5, *pieces[0].shape[1:]), fill, pieces[0].dtype)
    for row, piece in zip(x, pieces, strict=True):
        row[: len(piece)] = piece
    return x


FORMS = {
    "list": {"x": PIECES},
    "object array": {"x": np.array([*PIECES, None], object)[:-1]},
    "padded": {"x": padded(PIECES), "lengths": LENGTHS},
    "rows": {"x": np.concatenate(PIECES), "lengths": LENGTHS},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_input_are_the_same_data(form: str) -> None:
    found = prepare({**FORMS[form], "y": Y}, ArraysConfig())
    assert found.sha256 == prepare({"x": PIECES, "y": Y}, ArraysConfig()).sha256
    assert not found.per_step
    assert found.outputs == 2
    sizes = {s: len(v.lengths) for s, v in found.splits.items()}
    assert sizes == {"train": 28, "valid": 6, "test": 6}
    assert all(abs(v.targets.mean() - 0.5) < 0.01 for v in found.splits.values())


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_targets_per_step(kind: type) -> None:
    steps = [(piece[:, 0] > 0).astype(kind) for piece in PIECES]
    forms = [steps, np.concatenate(steps), padded(steps, 0)]
    found = [prepare({**FORMS["padded"], "y": y}, ArraysConfig()) for y in forms]
    assert len({one.sha256 for one in found}) == 1
    assert found[0].per_step
    assert (found[0].labels is None) == (kind is np.float32)
    several = prepare({"x": PIECES, "y": RANDOM.normal(size=(40, 3))}, ArraysConfig())
    assert (several.outputs, several.per_step, several.labels) == (3, False, None)


def test_labels_may_be_words_and_classes_keep_their_shares(tmp_path: Path) -> None:
    words = np.array([b"rare", b"often", b"often", b"often"] * 10)
    found, other = (
        prepare({"x": PIECES, "y": y}, ArraysConfig(valid=0.2, test=0.2))
        for y in (words, words == b"rare")
    )
    assert found.labels is not None
    assert found.labels.tolist() == ["often", "rare"]
    assert other.sha256 != found.sha256
    shares = {split: np.bincount(v.targets).tolist() for split, v in found.splits.items()}
    assert shares == {"train": [18, 6], "valid": [6, 2], "test": [6, 2]}
    file = write_arrays({"x": PIECES, "y": words}, ArraysConfig(), tmp_path)
    again = read_arrays(replace(recipe("arrays"), data=str(file)))  # type: ignore
    assert again.labels is not None
    assert again.labels.tolist() == ["often", "rare"]


def test_groups_stay_together() -> None:
    x = [np.full((3, 1), i // 4, np.float32) for i in range(40)]
    found = prepare({"x": x, "y": Y, "groups": np.arange(40) // 4}, ArraysConfig(valid=0.2))
    groups = [set(np.unique(split.rows)) for split in found.splits.values()]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 10
    few = prepare({"x": x, "y": Y, "groups": np.arange(40) // 8}, ArraysConfig())  # 15 % of 5
    assert [len(split.lengths) for split in few.splits.values()] == [24, 8, 8]


def test_given_splits_and_split_seed() -> None:
    given = {f"{k}_{s}": v for s in ("train", "valid") for k, v in (("x", PIECES), ("y", Y))}
    assert list(prepare(given, ArraysConfig()).splits) == ["train", "valid"]
    one, other = (prepare({"x": PIECES, "y": Y}, ArraysConfig(split_seed=s)) for s in (0, 1))
    assert one.sha256 != other.sha256


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no y": ({"y": None}, "y"),
    "flat x": ({"x": np.zeros((40, 3))}, "(40, 3)"),
    "lengths": ({"x": padded(PIECES), "lengths": LENGTHS + 9}, "lengths"),
    "nan": ({"x": [*PIECES[:-1], np.full((2, 2), np.nan)]}, "sequence 39; padded"),
    "nan padding": ({"x": padded(PIECES)}, "sequence 0; padded sequences need lengths"),
    "lone y": ({"y_valid": Y}, "y_valid is there without x_valid"),
    "two x": ({"x_train": PIECES, "y_train": Y}, "x_train"),
    "dict": ({"x": {"a": PIECES}}, "{'a'"),
    "ragged features": ({"x": [*PIECES[:-1], np.zeros((2, 3))]}, "[(2,), (3,)]"),
    "short y": ({"y": Y[:-1]}, "(39,)"),
    "nan y": ({"y": np.full(40, np.nan)}, "NaN"),
    "labels": ({"x_valid": PIECES, "y_valid": Y + 1}, "2"),
    "one class": ({"y": Y * 0}, "0"),
    "empty": ({"x_valid": np.zeros((0, 5, 2)), "y_valid": Y[:0]}, "valid"),
    "unknown": ({"z": Y}, "'z'"),
    "counts": ({"x": padded(PIECES), "lengths": LENGTHS[:-1]}, "39"),
    "one x": ({"x_valid": PIECES}, "y_valid"),
    "steps": ({"y": [np.zeros(4)] * 40}, "y"),
    "words": ({"x": [np.array([["a"]])] * 40}, "x"),
    "mixed": ({"x_valid": PIECES, "y_valid": np.zeros(LENGTHS.sum(), int)}, "valid"),
    "groups": ({"groups": Y[:-1]}, "(39,)"),
    "groups without use": ({"groups": Y, "x_valid": PIECES, "y_valid": Y}, "groups"),
    "names": ({"y": [Y[:1] > 0, Y[:1]] * 20 + [None]}, "y"),
    "features": ({"x_valid": [np.zeros((3, 7))] * 2, "y_valid": Y[:2]}, "valid"),
    "ignored label": ({"y": np.where(Y, Y, -100)}, "-100"),
    "values as labels": ({"y": np.arange(40)}, "floats"),
    "lengths of one split": (
        {f"{k}_{s}": v for s in ("train", "valid") for k, v in (("x", padded(PIECES, 0)), ("y", Y))}
        | {"x": None, "y": None, "lengths_train": LENGTHS},
        "lengths_valid",
    ),
    "length 0": ({"x": padded(PIECES), "lengths": LENGTHS * (np.arange(40) != 7)}, "sequence 7"),
    "nothing": ({"x": np.zeros((0, 5, 2)), "y": Y[:0]}, "(0, 5, 2)"),
    "too large": ({"x": [*PIECES[:-1], np.full((2, 2), 1e200)]}, "sequence 39"),
    "gradients": ({"x": torch.zeros(40, 5, 2, requires_grad=True)}, "grad"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_arrays_are_refused(case: str) -> None:
    changes, named = BAD[case]
    parts = {k: v for k, v in {"x": PIECES, "y": Y, **changes}.items() if v is not None}
    with pytest.raises(UserError) as raised:
        prepare(parts, ArraysConfig())
    assert named in str(raised.value)


def test_npz_is_never_unpickled_and_other_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", x=FORMS["object array"]["x"], y=Y)
    np.save(tmp_path / "b.npy", Y)
    (tmp_path / "c.npz").write_text("no archive")
    for name in ("a.npz", "b.npy", "c.npz", "d.npz"):
        with pytest.raises(UserError, match=name):
            read_arrays(replace(recipe("arrays"), data=str(tmp_path / name)))  # type: ignore
    for name, data in (("arrays", ""), ("adding", "mine.npz")):
        with pytest.raises(UserError, match="--data"):
            read_arrays(replace(recipe(name), data=data))  # type: ignore
    np.savez_compressed(tmp_path / "e.npz", x=np.zeros((10**6, 1)))
    monkeypatch.setattr("normrnn.arrays.read.largest_tensors", lambda: 10**6)
    monkeypatch.setattr("numpy.load", None)  # the file is refused before
    with pytest.raises(UserError, match="8,000,128 bytes"):
        read_arrays(replace(recipe("arrays"), data=str(tmp_path / "e.npz")))  # type: ignore
    with pytest.raises(UsageError, match=r"arrays\.valid and arrays\.test"):
        with_settings(recipe("arrays"), {"valid": 0.5, "test": 0.5})


def write_idx(folder: Path, zipped: bool) -> None:
    for prefix, count in (("train", 60), ("t10k", 20)):
        images = RANDOM.integers(0, 256, (count, 4, 4), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            opened = gzip.open if zipped else open
            file = folder / f"{prefix}-{name}-ubyte{'.gz' * zipped}"
            with opened(file, "wb") as out:
                out.write(header + array.tobytes())


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_files(zipped: bool, tmp_path: Path) -> None:
    write_idx(tmp_path, zipped)
    plain, permuted = (
        read_arrays(replace(recipe(f"{kind}-mnist"), data=str(tmp_path)))  # type: ignore
        for kind in ("sequential", "permuted")
    )
    for found in (plain, permuted):
        sizes = {s: len(v.lengths) for s, v in found.splits.items()}
        assert sizes == {"test": 20, "train": 55, "valid": 5}
        assert set(found.splits["train"].lengths) == {16}
        assert found.outputs == 10
    a, b = (found.splits["test"].rows.reshape(20, 16) for found in (plain, permuted))
    assert (a != b).any()
    assert (np.sort(a) == np.sort(b)).all()
    labels = next(tmp_path.glob("t10k-labels*"))
    labels.write_bytes(labels.read_bytes()[:-3])
    with pytest.raises(UserError, match="t10k-labels"):
        read_arrays(replace(recipe("permuted-mnist"), data=str(tmp_path)))  # type: ignore
    labels.unlink()
    with pytest.raises(UserError, match="t10k-labels"):
        read_arrays(replace(recipe("permuted-mnist"), data=str(tmp_path)))  # type: ignore
