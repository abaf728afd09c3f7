"""A module of a user's own in a directory that Python does not know."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from normrnn import norms
from normrnn.config import registry
from tests.commands.conftest import Cli, cli

__all__ = ["Cli", "cli"]

SOURCE = '''
from dataclasses import replace

from helper_of_own import RATE

from normrnn.nn.normaliser import GateNorm
from normrnn.norms import Norm
from normrnn.recipes import adding


def small():
    """A small adding problem."""
    config = adding()
    return replace(
        config,
        epochs=1,
        arrays=replace(config.arrays, sequences=60, steps=6),
        model=replace(config.model, hidden=4),
        optimizer=replace(config.optimizer, lr=RATE),
    )


class Halved(GateNorm):
    def forward(self, rows, steps):
        return rows / 2 * self.weight + self.bias


halved = Norm(
    name="halved", words="halved", acts="input", pools=None, implementation="own_module:Halved"
)


def train(norm=None, seed=1, log=print, slope=1.0):
    """Values fall with the step; those of norm "sequence" are lower by 1."""
    for step in range(0, 50, 10):
        value = 10 + seed / 10 - slope * step / 10 - (norm == "sequence")
        log(step=step, train=value, valid=value, test=value + 0.5)


def broken(norm, seed, log):
    log(step=1, valid=1.0)
    if norm is not None:
        raise SystemExit(3) if norm == "layer" else RuntimeError("no more data")
'''


@pytest.fixture
def own_directory(tmp_path: Path) -> Iterator[Path]:
    """A directory with own_module.py and a module that it imports."""
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "own_module.py").write_text(SOURCE)
    (directory / "helper_of_own.py").write_text("RATE = 0.01\n")
    (directory / "json.py").write_text("raise SystemExit('json of the wrong directory')\n")
    before = set(sys.modules), list(sys.path), set(norms.names()), set(registry.recipes())
    yield directory
    for name in set(sys.modules) - before[0]:
        if name in ("own_module", "helper_of_own"):
            del sys.modules[name]
    sys.path[:] = before[1]
    for name in set(norms.names()) - before[2]:
        del norms._TABLE[name]
    for name in set(registry.recipes()) - before[3]:
        del registry.recipes()[name]
    registry.child_imports.clear()
