"""Archives against kaldiio, whole and in slices, and damaged ones."""

import contextlib
import gzip
import shutil
import struct
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normrnn.errors import UserError
from normrnn.speech.archive import (
    Entry,
    Unusable,
    locate,
    read_matrix,
    read_table,
    read_vector,
    read_vectors,
    write_matrix,
    write_vector,
)

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


@pytest.mark.parametrize("options", [{"compression_method": n} for n in range(1, 8)])
def test_other_kinds_of_matrices(tmp_path: Path, options: dict) -> None:
    """Compressed matrices of all three kinds, of which kaldiio takes one by their length."""
    path, scp = tmp_path / "o.ark", tmp_path / "o.scp"
    whole = options.get("compression_method", 0) in (4, 6, 7)  # fixed scales, of whole numbers
    draw = np.random.default_rng(1)
    matrices = {
        key: (draw.integers(0, 2, m.shape) if whole else m).astype(np.float32)
        for key, m in (MATRICES | {"long": draw.normal(size=(50, 4))}).items()
    }
    kaldiio.save_ark(str(path), matrices, scp=str(scp), **options)
    for key, target in read_table(scp).items():
        entry = locate(target, tmp_path)
        np.testing.assert_allclose(read_matrix(entry, key, 1, 3), matrices[key][1:3], atol=0.05)
        expected = kaldiio.load_mat(target)
        np.testing.assert_array_equal(read_matrix(entry, key), expected)
        assert read_matrix(entry, key).dtype == np.float32


def header(kind: bytes, rows: int, columns: int) -> bytes:
    if kind in (b"FM", b"DM"):
        return b"\0B" + kind + b" " + struct.pack("<bibi", 4, rows, 4, columns)
    return b"\0B" + kind + b" " + struct.pack("<ffii", 0.0, 1.0, rows, columns)


@pytest.mark.parametrize("kind", [b"FM", b"DM", b"CM", b"CM2", b"CM3"])
@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((-1, 3), "-1 rows and 3 columns: nothing to read"),
        ((3, -(2**31)), "columns: nothing to read"),
        ((0, 0), "0 rows and 0 columns: nothing to read"),
        ((2**31 - 1, 2**31 - 1), "bytes, 100 are there"),
        ((101, 1), "bytes, 100 are there"),
    ],
)
def test_headers_are_not_believed(
    tmp_path: Path, kind: bytes, size: tuple[int, int], said: str
) -> None:
    path = tmp_path / "h.ark"
    path.write_bytes(b"a " + header(kind, *size) + bytes(100))
    with pytest.raises(Unusable, match=said):
        read_matrix(Entry(path, 2), "a")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PKLcos\nsystem\n", r"a pickled object \(PKL\)"),
        (b"NPY\1\x80", r"a NumPy array \(NPY\)"),
        (b"AUDIO\1\x80", r"sound \(AUDIO\)"),
        (b"RIFF....WAVE", r"sound \(RIFF\)"),
        (b"\0BFV \4\1\0\0\0....", r"a vector \(FV\)"),
        (b"\0B\4\1\0\0\0\4\1\0\0\0", "an int vector"),
        (b"\0BSM \4\1\0\0\0....", "no matrix"),
        (b"", "nothing"),
        (b"\0BFM \4\1\0", "cut off in its header"),
        (b"\0BFM \5\1\0\0\0\4\1\0\0\0....", "its header is none"),
        (b"\0BCM2 \0\0\xc0\x7f\0\0\0\0\1\0\0\0\1\0\0\0..", "its scale is not a number"),
        (b" [ 1 secret ]\n", "a matrix in text"),
    ],
)
def test_other_objects_are_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.ark"
    path.write_bytes(b"a " + content)
    with pytest.raises(Unusable, match=said) as caught:
        read_matrix(Entry(path, 2), "a")
    assert "secret" not in str(caught.value)


@given(st.binary(max_size=60), st.sampled_from([b"", b"\0B", b"\0BFM ", b"\0BCM ", b" ["]))
def test_any_bytes_are_a_matrix_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.ark"
    path.write_bytes(b"a " + start + content)
    for read in (read_matrix, read_vector):
        with contextlib.suppress(Unusable):
            read(Entry(path, 2), "a")
    with contextlib.suppress(UserError):
        list(read_vectors(path))


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
        (b"u1 \0B\x04\xff\xff\xff\xff", "is damaged at u1: a vector of -1 numbers"),
        (b"u1 \0B\x04\xff\xff\xff\x7f\x04\1\0\0\0", "ends in the middle of u1"),
        (b"u" * 5000, "it has a key of over 4,096 bytes"),
    ],
)
def test_damaged_alignments(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "v.ark"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        list(read_vectors(path))
    zipped = tmp_path / "v.gz"
    zipped.write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=said):
        list(read_vectors(zipped))


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b"u1 1 2 3\n" * 1)
    odd = whole[:10] + b"\xff" * 4 + whole[14:]
    for name, content in (("cut.gz", whole[:-9]), ("no.gz", b"u1 1 2 3\n"), ("odd.gz", odd)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            list(read_vectors(tmp_path / name))


def test_damaged_matrices(archive: tuple[Path, dict[str, Entry]], tmp_path: Path) -> None:
    path, entries = archive
    cut = tmp_path / "cut.ark"
    cut.write_bytes(path.read_bytes()[:-1])
    entry = Entry(cut, entries["b-b"].offset)
    with pytest.raises(Unusable, match=r"matrix of b-b in .*cut\.ark is cut off: 7 rows"):
        read_matrix(entry, "b-b")
    with pytest.raises(Unusable, match="does not hold a at byte"):
        read_matrix(entry, "a")
    with pytest.raises(Unusable, match=r"none\.ark cannot be read: No such file"):
        read_matrix(Entry(tmp_path / "none.ark", 2), "a")
    (tmp_path / "text.ark").write_text("a nothing")
    with pytest.raises(Unusable, match=r"text\.ark holds no matrix for a"):
        read_matrix(Entry(tmp_path / "text.ark", 2), "a")


def test_archives_are_found_where_the_scp_is(
    archive: tuple[Path, dict[str, Entry]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = archive
    moved = tmp_path / "m.ark"
    shutil.copy(path, moved)
    assert locate("/gone/m.ark:17", tmp_path) == Entry(moved, 17)
    # The one that is named, as Kaldi does it; in a directory of ours, which may be a copy, its own.
    assert locate(f"{path}:17", tmp_path) == Entry(path, 17, named=True)
    (tmp_path / "checksums").write_text("")
    assert locate(f"{path}:17", tmp_path) == Entry(moved, 17)
    (tmp_path / "sub").mkdir()
    shutil.move(moved, tmp_path / "sub" / "m.ark")
    assert locate("sub/m.ark:3", tmp_path) == Entry(tmp_path / "sub" / "m.ark", 3)
    assert locate(f"{path}:17", tmp_path) == Entry(path, 17)
    monkeypatch.chdir(tmp_path)
    assert locate("sub/m.ark", path.parent.parent)[:2] == (Path("sub/m.ark"), None)
    # A file by itself has no key to check: one beside the scp with the same name is another.
    shutil.copy(path, tmp_path / "m.ark")
    assert locate("sub/m.ark", tmp_path)[:2] == (Path("sub/m.ark"), None)
    assert locate(f"{path}", tmp_path)[:2] == (path, None)
    with pytest.raises(Unusable, match="range of rows"):
        locate("m.ark:3[0:4]", tmp_path)
    for target in ("", "-", "m\0.ark"):
        with pytest.raises(Unusable, match="names no file"):
            locate(target, tmp_path)
    for target in ("cat x |", "| cat", "x;cat;|:2", "x |:²"):
        with pytest.raises(Unusable, match="asks for a command"):
            locate(target, tmp_path)


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("u1 TWO  WORDS\n\nu2\nu3\tTAB BED\n")
    assert read_table(path) == {"u1": "TWO  WORDS", "u2": "", "u3": "TAB BED"}
    path.write_text("u1 ONE\u2028u2 LINE\nu\x85 b\n", encoding="utf-8")
    assert read_table(path) == {"u1": "ONE\u2028u2 LINE", "u\x85": "b"}
    path.write_text("u1 a\nu1 b\n")
    with pytest.raises(UserError, match="line 2 has u1 a second time"):
        read_table(path)
    path.write_bytes(b"u1 \xff\n")
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_table(path)
    with pytest.raises(UserError, match="lacks nothing"):
        read_table(tmp_path / "nothing")


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    table = tmp_path / "wav.scp"
    table.write_bytes(b"\xef\xbb\xbfone a.wav\ntwo b.wav\n")
    assert read_table(table) == {"one": "a.wav", "two": "b.wav"}
