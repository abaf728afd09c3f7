"""Several processes of one thread against one process of as many threads: one batch, one network.

Part of `python -m benchmarks.training --processes K`. All are started before anything is measured,
and take turns: those that wait compute nothing. The best round of each counts.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import speech_training
from normrnn.recipes import recipe
from normrnn.text.config import LanguageConfig

SPEECH = "ragged"
"""Of `speech_training.SHAPES`: the paper's network."""


class Way(NamedTuple):
    """How a batch is computed."""

    processes: int
    threads: int
    pooled: bool = True


class Team:
    """The processes of a way, waiting to be asked for updates."""

    def __init__(self, way: Way, case: str, norm: str, updates: int, where: Path) -> None:
        spawn, self._pipes = get_context("spawn"), []
        store = Path(tempfile.mkdtemp(dir=where)) / "store"
        for rank in range(way.processes):
            mine, theirs = spawn.Pipe()
            given = rank, way, case, norm, updates, store, theirs
            spawn.Process(target=_rank, args=given, daemon=True).start()
            self._pipes.append(mine)
        self.count: int = [pipe.recv() for pipe in self._pipes].pop()

    def seconds(self, updates: int) -> float:
        """Of an update, by the slowest process."""
        for pipe in self._pipes:
            pipe.send(updates)
        return max(pipe.recv() for pipe in self._pipes) / updates

    def end(self) -> None:
        """All of them."""
        for pipe in self._pipes:
            pipe.send(0)


def _rank(
    rank: int, way: Way, case: str, norm: str, updates: int, store: Path, pipe: Connection
) -> None:
    torch.set_num_threads(way.threads)
    if way.processes > 1:
        kept = dist.FileStore(str(store), way.processes)
        dist.init_process_group("gloo", store=kept, rank=rank, world_size=way.processes)
    with tempfile.TemporaryDirectory() as where:
        update, count = _update(case, norm, way.pooled, updates, Path(where))
        update()
        pipe.send(count)
        while asked := pipe.recv():
            if way.processes > 1:
                dist.barrier()
            start = time.perf_counter()
            for _ in range(asked):
                update()
            pipe.send(time.perf_counter() - start)
    if way.processes > 1:
        dist.destroy_process_group()


def _update(
    case: str, norm: str, pooled: bool, updates: int, where: Path
) -> tuple[Callable[[], None], int]:
    """An update of the real trainer, and what it has of tokens or frames."""
    from benchmarks import training

    if case == SPEECH:
        config, split = speech_training.made(*speech_training.SHAPES[case], where)
        train = replace(config.train, sync_statistics=pooled)
        config = replace(config, norm=norm, train=train)
        return speech_training.engine(config, split, where), sum(split.lengths)
    chosen: Any = recipe(case)
    assert isinstance(chosen, LanguageConfig)
    chosen = replace(chosen, norm=norm, train=replace(chosen.train, sync_statistics=pooled))
    tokens = chosen.train.batch * chosen.train.steps
    torch.manual_seed(1)
    ids = torch.randint(0, training.VOCABULARY, (tokens * (updates + 2) + 1,))
    return training.engine(chosen, ids, where).update, tokens


def compare(case: str, norm: str, processes: int, rounds: int, updates: int) -> None:
    """Print tokens or frames per second of each way."""
    ways = {"one": Way(1, processes), "several": Way(processes, 1)}
    if norm in ("sequence", "frame"):
        ways["local"] = Way(processes, 1, pooled=False)
    unit = "frames" if case == SPEECH else "tokens"
    with tempfile.TemporaryDirectory() as where:
        asked = rounds * updates
        teams = {n: Team(way, case, norm, asked, Path(where)) for n, way in ways.items()}
        best = dict.fromkeys(teams, float("inf"))
        for _ in range(rounds):
            for name, team in teams.items():
                best[name] = min(best[name], team.seconds(updates))
        for team in teams.values():
            team.end()
    speed = {name: teams[name].count / seconds for name, seconds in best.items()}
    line = (
        f"{case:<12} norm {norm:<9} 1 process, {processes} threads {speed['one']:>8,.0f} {unit}/s;"
        f" {processes} processes {speed['several']:>8,.0f}, {speed['several'] / speed['one']:.2f} x"
    )
    if "local" in best:
        cost = best["several"] / best["local"] - 1
        line += f"; pooled statistics cost {cost:.1%} (without {speed['local']:,.0f})"
    print(line, flush=True)
