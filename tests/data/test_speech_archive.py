"""Archives against kaldiio, whole and in slices, and damaged ones."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normrnn.data.archive import (
    Entry,
    Unusable,
    locate,
    matrix_shape,
    read_matrix,
    read_table,
    read_vector,
    read_vectors,
    write_matrix,
    write_vector,
)
from normrnn.errors import UserError

MATRICES = {
    "a": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b-b": np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32),
}
VECTORS = {"a": np.array([5, 0, 70_000, -1], dtype=np.int32), "é": np.zeros(0, dtype=np.int32)}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Entry]]:
    path = tmp_path_factory.mktemp("ark") / "m.ark"
    with path.open("wb") as file:
        entries = {k: Entry(path, write_matrix(file, k, m)) for k, m in MATRICES.items()}
    return path, entries


def test_kaldiio_reads_our_matrices(archive: tuple[Path, dict[str, Entry]]) -> None:
    path, entries = archive
    for key, matrix in kaldiio.load_ark(str(path)):
        np.testing.assert_array_equal(matrix, MATRICES[key])
    for key, entry in entries.items():
        np.testing.assert_array_equal(kaldiio.load_mat(f"{path}:{entry.offset}"), MATRICES[key])


def test_kaldiio_reads_our_vectors(tmp_path: Path) -> None:
    path = tmp_path / "v.ark"
    with path.open("wb") as file:
        offsets = {key: write_vector(file, key, v) for key, v in VECTORS.items()}
    got: dict[str, Any] = dict(kaldiio.load_ark(str(path)))
    assert {k: v.tolist() for k, v in got.items()} == {k: v.tolist() for k, v in VECTORS.items()}
    for key, offset in offsets.items():
        assert read_vector(Entry(path, offset), key).tolist() == VECTORS[key].tolist()
    assert read_vector(Entry(path, offsets["a"]), "a", 1, 3).tolist() == [0, 70_000]


@given(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 9)))
def test_slices_are_those_of_the_whole(
    archive: tuple[Path, dict[str, Entry]], start: int, stop: int | None
) -> None:
    for key, entry in archive[1].items():
        got = read_matrix(entry, key, start, stop)
        np.testing.assert_array_equal(got, MATRICES[key][start:stop])
        assert got.shape[1] == 3
        assert got.flags.writeable


@pytest.mark.parametrize("options", [{"text": True}, {"compression_method": 2}])
def test_other_kinds_of_matrices(tmp_path: Path, options: dict) -> None:
    path, scp = tmp_path / "o.ark", tmp_path / "o.scp"
    kaldiio.save_ark(str(path), MATRICES, scp=str(scp), **options)
    for key, target in read_table(scp).items():
        entry = locate(target, tmp_path)
        np.testing.assert_allclose(read_matrix(entry, key, 1, 3), MATRICES[key][1:3], atol=0.05)
        assert matrix_shape(entry, key) == MATRICES[key].shape
        expected = kaldiio.load_mat(target)
        np.testing.assert_array_equal(read_matrix(entry, key), expected)


def test_double_matrices_become_single(tmp_path: Path) -> None:
    path = tmp_path / "d.ark"
    kaldiio.save_ark(str(path), {"a": MATRICES["a"].astype(np.float64)}, scp=str(tmp_path / "scp"))
    entry = locate(read_table(tmp_path / "scp")["a"], tmp_path)
    assert read_matrix(entry, "a").dtype == np.float32
    np.testing.assert_array_equal(read_matrix(entry, "a"), MATRICES["a"])


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_all_kinds_of_alignments(tmp_path: Path, text: bool, zipped: bool) -> None:
    path = tmp_path / "v.ark"
    vectors = {"a": VECTORS["a"], "b": np.array([3], dtype=np.int32)}
    kaldiio.save_ark(str(path), vectors, text=text)
    if zipped:
        with gzip.open(tmp_path / "v.gz", "wb") as file:
            file.write(path.read_bytes())
        path = tmp_path / "v.gz"
    assert {k: v.tolist() for k, v in read_vectors(path)} == {
        k: v.tolist() for k, v in vectors.items()
    }


def test_text_alignments_as_kaldi_prints_them(tmp_path: Path) -> None:
    path = tmp_path / "v.ark"
    path.write_text("u1 1 2 2 \nu2 \nu3\nu4 7\n")
    got = {key: values.tolist() for key, values in read_vectors(path)}
    assert got == {"u1": [1, 2, 2], "u2": [], "u3": [], "u4": [7]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"u1 1 2.5 3\n", "no int vector for u1"),
        (b"u1 [\n 1 2 ]\n", "no int vector for u1"),
        (b"u1 99999999999\n", "no int vector for u1"),
        (b"u1 \0BFM \x04\1\0\0\0\x04\1\0\0\0....", "no int vector for u1"),
        (b"u1 \0B\x04\3\0\0\0\x04\1\0\0\0\x04", "ends in the middle of u1"),
        (b"u1 \0B\x04\1\0\0\0\x05\1\0\0\0", "is damaged at u1"),
    ],
)
def test_damaged_alignments(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "v.ark"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        list(read_vectors(path))


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b"u1 1 2 3\n" * 1)
    for name, content in (("cut.gz", whole[:-9]), ("no.gz", b"u1 1 2 3\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            list(read_vectors(tmp_path / name))


def test_damaged_matrices(archive: tuple[Path, dict[str, Entry]], tmp_path: Path) -> None:
    path, entries = archive
    cut = tmp_path / "cut.ark"
    cut.write_bytes(path.read_bytes()[:-1])
    entry = Entry(cut, entries["b-b"].offset)
    assert len(read_matrix(entry, "b-b", 0, 6)) == 6
    with pytest.raises(Unusable, match="ends in the middle of b-b"):
        read_matrix(entry, "b-b")
    with pytest.raises(Unusable, match="does not hold a at byte"):
        read_matrix(entry, "a")
    with pytest.raises(Unusable, match=r"none\.ark cannot be read: No such file"):
        read_matrix(Entry(tmp_path / "none.ark", 2), "a")
    (tmp_path / "text.ark").write_text("a nothing")
    with pytest.raises(Unusable, match=r"text\.ark.*cannot be read"):
        read_matrix(Entry(tmp_path / "text.ark", 2), "a")


def test_archives_are_found_where_the_scp_is(
    archive: tuple[Path, dict[str, Entry]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = archive
    moved = tmp_path / "m.ark"
    shutil.copy(path, moved)
    assert locate(f"{path}:17", tmp_path) == Entry(moved, 17)
    assert locate("/gone/m.ark:17", tmp_path) == Entry(moved, 17)
    (tmp_path / "sub").mkdir()
    shutil.move(moved, tmp_path / "sub" / "m.ark")
    assert locate("sub/m.ark:3", tmp_path) == Entry(tmp_path / "sub" / "m.ark", 3)
    assert locate(f"{path}:17", tmp_path) == Entry(path, 17)
    monkeypatch.chdir(tmp_path)
    assert locate("sub/m.ark", path.parent.parent) == Entry(Path("sub/m.ark"), None)
    # A file by itself has no key to check: one beside the scp with the same name is another.
    shutil.copy(path, tmp_path / "m.ark")
    assert locate("sub/m.ark", tmp_path) == Entry(Path("sub/m.ark"), None)
    assert locate(f"{path}", tmp_path) == Entry(path, None)
    with pytest.raises(Unusable, match="range of rows"):
        locate("m.ark:3[0:4]", tmp_path)


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("u1 TWO  WORDS\n\nu2\nu3\tTAB BED\n")
    assert read_table(path) == {"u1": "TWO  WORDS", "u2": "", "u3": "TAB BED"}
    path.write_text("u1 a\nu1 b\n")
    with pytest.raises(UserError, match="line 2 has u1 a second time"):
        read_table(path)
    path.write_bytes(b"u1 \xff\n")
    with pytest.raises(UserError, match="no UTF-8 text"):
        read_table(path)
    with pytest.raises(UserError, match="lacks nothing"):
        read_table(tmp_path / "nothing")
