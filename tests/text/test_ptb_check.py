"""`prepare ptb`: whole, missing or changed."""

import hashlib
from pathlib import Path

import pytest

from normrnn.errors import UserError
from normrnn.text import ptb


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three small files that count as the corpus."""
    files = []
    for file in ptb.FILES:
        raw = b" a b\n c <unk> d \n"
        (tmp_path / file.name).write_bytes(raw)
        files.append(ptb.PtbFile(file.name, hashlib.sha256(raw).hexdigest(), 7))
    monkeypatch.setattr(ptb, "FILES", tuple(files))
    return tmp_path


def test_intact_files_are_counted(small: Path) -> None:
    counts = ptb.check_ptb(small)
    assert counts == {"ptb.train.txt": 7, "ptb.valid.txt": 7, "ptb.test.txt": 7}


def test_missing_file_is_named_with_where_to_get_it(small: Path) -> None:
    (small / "ptb.valid.txt").unlink()
    with pytest.raises(UserError, match=r"lacks ptb\.valid\.txt.*simple-examples\.tgz"):
        ptb.check_ptb(small)


def test_changed_file_is_named(small: Path) -> None:
    (small / "ptb.test.txt").write_bytes(b"other words\n")
    with pytest.raises(UserError, match=r"ptb\.test\.txt.*3 tokens where 7"):
        ptb.check_ptb(small)
