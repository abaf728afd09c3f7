"""Runs killed at random moments, and files damaged at random places."""

import json
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from normrnn.config.base import Config
from normrnn.files import BLANK, seal
from normrnn.reporting.runs import examine
from normrnn.text.config import LanguageConfig
from tests.safety.conftest import Cli
from tests.safety.test_nothing_runs import Evil
from tests.tiny_runs import rows_of, run_tiny
from tests.torchrun import flags

CODES = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130, 0}


def tensors(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    return {
        **load_file(run / "model.safetensors"),
        **{f"last {k}": checkpoint[k] for k in checkpoint},
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "speech"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_killed_at_random_ends_like_an_undisturbed_one(
    kind: str, seed: int, tiny_frame: Config, tiny_speech: Config, tmp_path: Path
) -> None:
    config = replace(tiny_frame if kind == "text" else tiny_speech, threads=1)
    whole, out, draw = tmp_path / "whole", tmp_path / "killed", random.Random(seed)
    begun = time.monotonic()
    run_tiny(config, whole)
    span, rows = time.monotonic() - begun, rows_of(whole)
    command = [sys.executable, "-m", "normrnn", "train", config.recipe, *flags(config)]
    for _ in range(12):
        process = subprocess.Popen(
            [*command, "--out", str(out)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        while process.stdout.readline()[:5] not in ("data:", ""):  # before, it imports
            pass
        time.sleep(draw.uniform(0, span))
        process.send_signal(draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)))
        _, said = process.communicate(timeout=120)
        assert process.returncode in CODES, said
        assert "Traceback" not in said
        assert "damaged" not in said
        if (out / "config.json").exists():
            run = examine(out)
            assert not run.problem
            kept = [{k: v for k, v in row.items() if k != "seconds"} for row in run.rows]
            assert kept == rows[: len(kept)]
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
    assert rows_of(out) == rows
    expected, actual = tensors(whole), tensors(out)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())
    assert not list(out.glob(".*.tmp"))


STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 10**400, 1e308, -0.5, float("nan"), float("inf"), "", "x" * 5000, "\ud800",
    "../../etc/passwd", "rm -rf |", [], {}, [[]], {"a": {"b": []}},
)  # fmt: skip


def garbled(content: bytes, draw: random.Random, canary: Path) -> bytes:  # noqa: ARG001
    at, length = draw.randrange(len(content)), draw.choice((1, 16, 512))
    old = content[at : at + length]
    flipped = bytes([old[0] ^ 1 << draw.randrange(8)]) + old[1:]
    new = draw.choice((flipped, draw.randbytes(length), bytes(length), b"", old * 2))
    return content[:at] + new + content[at + length :]


def cut(content: bytes, draw: random.Random, canary: Path) -> bytes:  # noqa: ARG001
    return content[: draw.choice((0, draw.randrange(len(content)), len(content) - 1))]


def forged(content: bytes, draw: random.Random, canary: Path) -> bytes:  # noqa: ARG001
    """Replace a value of a JSON file, and compute the checksum anew."""
    try:
        values = json.loads(content)
    except ValueError:
        return b""
    if not isinstance(values, dict | list) or not values:
        return b""
    parent: Any = values
    while True:
        place = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        below = parent[place]
        if not isinstance(below, dict | list) or not below or draw.random() < 0.4:
            break
        parent = below
    parent[place] = draw.choice(STRANGE)
    first = values[0] if isinstance(values, list) else values
    if isinstance(first, dict) and "sha256" in first:
        first["sha256"] = BLANK
    new = bytearray(json.dumps(values).encode())
    if BLANK.encode() in new:
        seal(new)
    return bytes(new)


def pickled(content: bytes, draw: random.Random, canary: Path) -> bytes:
    return (content[:6] if draw.random() < 0.5 else b"") + pickle.dumps(Evil(canary))


@pytest.mark.matrix(10)
@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_file_is_noticed_or_changes_nothing(
    seed: int, tiny_frame: LanguageConfig, cli: Cli, tmp_path: Path, canary: Path
) -> None:
    """One damaged file of a run, of every kind in turn, under every command that reads it."""
    run, draw = tmp_path / "run", random.Random(seed)
    config = LanguageConfig(**{**vars(tiny_frame), "epochs": 1})
    run_tiny(config, run)
    resume = ["train", config.recipe, "--out", run, *flags(config), "--epochs", "2"]
    commands: list[list[Any]] = [
        ["evaluate", run, "--threads", "1"], ["info", run], ["sample", run, "--seed", "1"],
        ["report", run], resume,
    ]  # fmt: skip
    command = commands[seed % len(commands)]
    files = sorted(path for path in run.iterdir() if path.is_file() and path.stat().st_size)
    file = draw.choice(files)
    undamaged = file.read_bytes()
    before = {path: path.read_bytes() for path in files}
    code, out, _ = cli(*command)
    assert code == 0
    # A resume prints its speed, which differs from run to run.
    expected = rows_of(run) if command is resume else out
    for path, content in before.items():
        path.write_bytes(content)
    damages: list[Callable[..., bytes]] = [garbled, cut, forged, pickled]
    damage = draw.choice(damages)
    file.write_bytes(damage(undamaged, draw, canary))
    code, out, err = cli(*command)
    assert not canary.exists()
    assert "unexpected error" not in err
    assert code in (0, 1, 2)
    if code:
        assert sum(line.startswith("normrnn: ") for line in err.splitlines()) == 1, err
    elif not err and damage is not forged and command[0] != "report":
        assert (rows_of(run) if command is resume else out) == expected
