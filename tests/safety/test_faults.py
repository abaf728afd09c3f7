"""The soak in the small: `python -m benchmarks.faults` with a few kills."""

import subprocess
import sys


def test_a_few_kills() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--kills", "4", "--seed", "3"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
    assert "0 failures" in done.stdout
