"""Archives against kaldiio, and damaged ones."""

import contextlib
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
from normrnn.speech import archive
from normrnn.speech.archive import Unusable, locate, read_matrix, read_table, read_vectors

MATRICES = {
    "a": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b-b": np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32),
}
VECTORS = {"a": np.array([5, 0, 70_000, -1], dtype=np.int32), "é": np.zeros(0, dtype=np.int32)}


def test_kaldiio_reads_our_archives(tmp_path: Path) -> None:
    path, vectors = tmp_path / "m.ark", tmp_path / "v.ark"
    with path.open("wb") as file:
        offsets = {key: archive.write_matrix(file, key, m) for key, m in MATRICES.items()}
    assert [key for key, _ in kaldiio.load_ark(str(path))] == list(MATRICES)
    for key, offset in offsets.items():
        np.testing.assert_array_equal(kaldiio.load_mat(f"{path}:{offset}"), MATRICES[key])
        np.testing.assert_array_equal(read_matrix(path, offset), MATRICES[key])
    with vectors.open("wb") as file:
        for key, vector in VECTORS.items():
            archive.write_vector(file, key, vector)
    got: dict[str, Any] = dict(kaldiio.load_ark(str(vectors)))
    wanted = {k: v.tolist() for k, v in VECTORS.items()}
    for found in (got, dict(read_vectors(vectors))):
        assert {k: v.tolist() for k, v in found.items()} == wanted


@pytest.mark.parametrize("method", [None, *range(1, 8)])
def test_other_kinds_of_matrices(tmp_path: Path, method: int | None) -> None:
    """Double ones, and compressed ones of all three kinds."""
    scp = tmp_path / "o.scp"
    options: dict[str, Any] = {"compression_method": method} if method else {}
    whole = method in (4, 6, 7)  # fixed scales, of whole numbers
    draw = np.random.default_rng(1)
    matrices = {
        key: (draw.integers(0, 2, m.shape) if whole else m).astype(np.float32 if method else float)
        for key, m in (MATRICES | {"long": draw.normal(size=(50, 4))}).items()
    }
    kaldiio.save_ark(str(tmp_path / "o.ark"), matrices, scp=str(scp), **options)
    for key, target in read_table(scp).items():
        values = read_matrix(*locate(target, tmp_path))
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, matrices[key], atol=0.05)
        expected: Any = kaldiio.load_mat(target)
        np.testing.assert_array_equal(values, expected.astype(np.float32))


def header(kind: bytes, rows: int, columns: int) -> bytes:
    if kind in (b"FM", b"DM"):
        return b"\0B" + kind + b" " + struct.pack("<bibi", 4, rows, 4, columns)
    return b"\0B" + kind + b" " + struct.pack("<ffii", 0.0, 1.0, rows, columns)


@pytest.mark.parametrize("kind", [b"FM", b"DM", b"CM", b"CM2", b"CM3"])
@pytest.mark.parametrize("size", [(-1, 3), (3, -(2**31)), (0, 0), (2**31 - 1, 2**31 - 1), (101, 1)])
def test_headers_are_not_believed(tmp_path: Path, kind: bytes, size: tuple[int, int]) -> None:
    path = tmp_path / "h.ark"
    path.write_bytes(b"a " + header(kind, *size) + bytes(100))
    with pytest.raises(Unusable, match=f"{size[0]} rows and {size[1]} columns"):
        read_matrix(path, 2)


@pytest.mark.parametrize(
    "content",
    [
        b"PKLcos\nsystem\n",
        b"NPY\1\x80",
        b"AUDIO\1\x80",
        b"RIFF....WAVE",
        b"\0BFV \4\1\0\0\0....",
        b"\0B\4\1\0\0\0\4\1\0\0\0",
        b"\0BSM \4\1\0\0\0....",
        b"",
        b"\0BFM \4\1\0",
        b" [ 1 secret ]\n",
    ],
)
def test_other_objects_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ark"
    path.write_bytes(b"a " + content)
    with pytest.raises(Unusable, match=r"x\.ark") as caught:
        read_matrix(path, 2)
    assert "secret" not in str(caught.value)
    with pytest.raises(Unusable, match=r"none\.ark"):
        read_matrix(tmp_path / "none.ark")


@given(st.binary(max_size=60), st.sampled_from([b"", b"\0B", b"\0BFM ", b"\0BCM ", b" ["]))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.ark"
    path.write_bytes(b"a " + start + content)
    with contextlib.suppress(Unusable):
        read_matrix(path, 2)
    with contextlib.suppress(UserError):
        list(read_vectors(path))


@pytest.mark.parametrize(
    "content",
    [
        b"u1 1 2 3\n",
        b"u1 \0BFM \x04\1\0\0\0\x04\1\0\0\0....",
        b"u1 \0B\x04\3\0\0\0\x04\1\0\0\0\x04",
        b"u1 \0B\x04\1\0\0\0\x05\1\0\0\0",
        b"u1 \0B\x04\xff\xff\xff\xff",
        b"u1 \0B\x04\xff\xff\xff\x7f\x04\1\0\0\0",
        b"u" * 5000,
    ],
)
def test_damaged_alignments(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "v.ark"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"v\.ark is damaged"):
        list(read_vectors(path))


def test_archives_are_where_the_table_says_or_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "m.ark"
    path.write_bytes(b"")
    assert locate(f"{path}:17", tmp_path) == (path, 17)
    assert locate(f"{path}", tmp_path) == (path, 0)
    assert locate("sub/m.ark:3", tmp_path) == (path, 3)
    assert locate("/gone/m.ark:17", path.parent) == (path, 17)
    shutil.copy(path, tmp_path / "m.ark")
    assert locate(f"{path}:17", tmp_path) == (path, 17)  # not one of the same name
    monkeypatch.chdir(tmp_path)
    assert locate("sub/m.ark", Path("/")) == (Path("sub/m.ark"), 0)
    for target in ("", "-", "m\0.ark", "m.ark:3[0:4]", "cat x |", "| cat", "x;cat;|:2", "x |:²"):
        with pytest.raises(UserError, match="names no file"):
            locate(target, tmp_path)


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfu1 TWO  WORDS\n\nu2\nu3\tTAB BED\n")
    assert read_table(path) == {"u1": "TWO  WORDS", "u2": "", "u3": "TAB BED"}
    path.write_text("u1 ONE\u2028u2 LINE\nu\x85 b\n", encoding="utf-8")
    assert read_table(path) == {"u1": "ONE\u2028u2 LINE", "u\x85": "b"}
    path.write_text("u1 a\nu1 b\n")
    with pytest.raises(UserError, match="line 2 has u1"):
        read_table(path)
    path.write_bytes(b"u1 \xff\n")
    with pytest.raises(UserError, match="UTF-8"):
        read_table(path)
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(UserError, match=f"{missing} cannot be read"):
            read_table(missing)
