"""Damaged and hostile files in the small: `python -m benchmarks.damage` with a few of them."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.damage import Outcome, judged
from benchmarks.damage_kinds import KINDS, forged, pickled, replaced
from benchmarks.damage_scenes import SCENES
from normrnn.seal import is_sealed, sealed_json


def test_a_few_files() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.damage", "--files", "4", "--seed", "3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 damaged files" in done.stdout
    assert "0 failures" in done.stdout


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in (pickled, replaced)])
def test_every_kind_changes_a_file_it_applies_to(kind, tmp_path: Path) -> None:
    files = {
        "a.json": sealed_json({"a": {"b": [1, 2]}, "c": "x"}),
        "a.scp": b"key1 /a/b.ark:5\nkey2 /a/b.ark:90\n",
        "a.ark": b"k \0BFM \x04\1\0\0\0\x04\1\0\0\0\0\0\0\0l \0B\x04\1\0\0\0\x04\0\0\0\0",
    }
    changed = 0
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for seed in range(10):
        for name, content in files.items():
            path = tmp_path / name
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            said = kind(path, random.Random(seed), tmp_path / "canary")
            if said is not None:
                changed += not path.exists() or path.read_bytes() != content
                if kind is forged:
                    is_sealed(path.read_bytes(), path)
    assert changed >= 5


EXPECTED = Outcome(0, "loss 1\n", "", {"rows": [1]})


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (EXPECTED, ""),
        (EXPECTED._replace(code=1, err="normrnn: it is damaged\n"), ""),
        (EXPECTED._replace(out="loss 2\n", err="x is damaged: going on\n"), ""),
        (EXPECTED._replace(code=None), "it hung"),
        (EXPECTED._replace(code=-11), "SIGSEGV"),
        (EXPECTED._replace(code=1, err="Traceback (most recent call last):\n"), "a stack trace"),
        (EXPECTED._replace(code=1, err="normrnn: stopped by what was not foreseen"), "stack trace"),
        (EXPECTED._replace(code=1, err=""), "0 sentences"),
        (EXPECTED._replace(code=3), "exit code 3"),
        (EXPECTED._replace(out="loss 2\n"), "in silence"),
        (EXPECTED._replace(left={"rows": [2]}), "in silence"),
    ],
)
def test_what_must_not_be_is_seen(outcome: Outcome, said: str) -> None:
    problems = judged(SCENES["evaluate text"], EXPECTED, outcome, given=False)
    assert bool(problems) == bool(said)
    assert said in "".join(problems)
