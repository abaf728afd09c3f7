"""`python -m benchmarks.damage` on a few files, and its parts on known outcomes."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.damage import DAMAGES, SCENES, Outcome, forge, judge, pickled, remove
from normrnn.seal import is_sealed, sealed_json


def test_a_few_files() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.damage", "--files", "6", "--seed", "3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 damaged files, seed 3: 0 failures" in done.stdout


@pytest.mark.parametrize("damage", sorted({*DAMAGES} - {pickled, remove}, key=str))
def test_every_damage_changes_a_file_it_applies_to(damage, tmp_path: Path) -> None:
    files = {"a.json": sealed_json({"a": {"b": [1, 2]}, "c": "x"}), "a.scp": b"k a.ark:5\nl b:9\n"}
    changed = 0
    for seed in range(20):
        for name, content in files.items():
            for each, undamaged in files.items():
                (tmp_path / each).write_bytes(undamaged)
            if damage(tmp_path / name, random.Random(seed), tmp_path / "canary"):
                changed += (tmp_path / name).read_bytes() != content
                if damage is forge:
                    assert is_sealed((tmp_path / name).read_bytes(), tmp_path / name) in (0, 1)
    assert changed >= 5


EXPECTED = Outcome(0, "loss 1\n", "", {"rows": [1]})


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (EXPECTED, ""),
        (EXPECTED._replace(code=1, err="normrnn: it is damaged\n"), ""),
        (EXPECTED._replace(out="loss 2\n", err="x is damaged: left out\n"), ""),
        (EXPECTED._replace(code=None), "it hung"),
        (EXPECTED._replace(code=-11), "exit code -11"),
        (EXPECTED._replace(code=1, err="Traceback (most recent call last):\n"), "a stack trace"),
        (EXPECTED._replace(code=1, err="normrnn: unexpected error (x)"), "a stack trace"),
        (EXPECTED._replace(code=1, err=""), "0 error messages"),
        (EXPECTED._replace(out="loss 2\n"), "in silence"),
        (EXPECTED._replace(left={"rows": [2]}), "in silence"),
    ],
)
def test_failures_are_recognised(outcome: Outcome, problem: str) -> None:
    found = judge(SCENES["evaluate text"], EXPECTED, outcome, given=False)
    assert bool(found) == bool(problem)
    assert problem in found
