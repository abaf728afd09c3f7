"""`prepare ptb`: whole, missing or changed."""

import hashlib
from pathlib import Path

import pytest

from normrnn.errors import UserError
from normrnn.text import ptb


def test_files_are_counted_and_missing_or_changed_ones_named(tmp_path: Path, monkeypatch) -> None:
    raw = b" a b\n c <unk> d \n"
    for name in ptb.SHA256:
        (tmp_path / name).write_bytes(raw)
    monkeypatch.setattr(ptb, "SHA256", dict.fromkeys(ptb.SHA256, hashlib.sha256(raw).hexdigest()))
    assert ptb.check_ptb(tmp_path) == dict.fromkeys(ptb.SHA256, 7)
    (tmp_path / "ptb.test.txt").write_bytes(b"other words\n")
    with pytest.raises(UserError, match=r"ptb\.test\.txt.* 3 tokens"):
        ptb.check_ptb(tmp_path)
    (tmp_path / "ptb.valid.txt").unlink()
    with pytest.raises(UserError, match=r"no ptb\.valid\.txt.*simple-examples\.tgz"):
        ptb.check_ptb(tmp_path)
