"""Real processes: `torchrun -m normrnn train` on the loopback."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import normrnn
from normrnn.config.base import Config
from normrnn.config.jsonio import flat, to_dict
from normrnn.recipes import recipe


def flags(config: Config) -> list[str]:
    """What the command line needs to say so that the recipe becomes this config."""
    wanted, default = flat(to_dict(config)), flat(to_dict(recipe(config.recipe)))
    found = []
    for name, value in wanted.items():
        option = name.replace("_", "-")
        if value == default[name]:
            continue
        if isinstance(value, bool):
            room, _, last = option.rpartition(".")
            found.append(f"--{room}.{'' if value else 'no-'}{last}")
        else:
            found += [f"--{option}", str(value)]
    return found


def command(processes: int, config: Config, out: Path, *options: str) -> list[str]:
    """torchrun, on a port of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *options]
    return [*launcher, "-m", "normrnn", "train", config.recipe, *flags(config), "--out", str(out)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def torchrun(
    processes: int, config: Config, out: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Train to the end."""
    return subprocess.run(
        command(processes, config, out, *options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def start_python(*words: str, **variables: str) -> "subprocess.Popen[str]":
    """Python with these arguments, which finds the tests and this library."""
    paths = [str(Path(__file__).parents[1]), str(Path(normrnn.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]", seconds: float = 120) -> str:
    """What it printed until it ended well."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return out


def run_rank(module: str, rank: int, count: int, folder: Path) -> None:
    """Save what `worker(rank)` of a test module returns, in a process group of `count`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    torch.save(import_module(module).worker(rank), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def started_ranks(module: str, count: int, folder: Path) -> list[dict[Any, Any]]:
    """What `worker(rank)` of a test module returns, each rank in a process of its own."""
    root = Path(__file__).parents[1]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    code = "from pathlib import Path; from tests.torchrun import run_rank; run_rank"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"{code}({module!r}, {rank}, {count}, Path({str(folder)!r}))"],
            cwd=root,
            env=environment() | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        logs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(logs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(count)]


def checkpoint(out: Path) -> dict[str, Any]:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def workers(launcher: int) -> list[int]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            variables = (status.parent / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
        if parent == launcher and ranks:
            found[ranks[0]] = int(status.parent.name)
    return [found[rank] for rank in sorted(found)]
