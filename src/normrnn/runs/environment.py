"""Device, threads and memory of a run; versions and machine, without personal data."""

import os
import platform
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from normrnn.errors import UsageError, UserError, is_out_of_memory, notice
from normrnn.files import read_json, sealed_json
from normrnn.ops.native.library import describe
from normrnn.runs.records import ENVIRONMENT
from normrnn.runs.store import RunDirectory
from normrnn.version import __version__

M = TypeVar("M", bound=nn.Module)


def environment(threads: int, processes: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Return versions, processor and system; processes and device if not one and the CPU."""
    versions: dict[str, Any] = {
        "normrnn": __version__,
        "torch": version("torch"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "recurrence": describe(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    versions |= {"processes": processes} if processes > 1 else {}
    return versions | ({"device": device} if device != "cpu" else {})


def record(run: RunDirectory, processes: int = 1, device: str = "cpu") -> bool:
    """Record the environment in the run directory; a run resumed elsewhere has several entries.

    Returns whether the last entry has the same kernels: others differ in the last bits.
    """
    now = environment(torch.get_num_threads(), processes, device)
    before: list[dict[str, Any]] = []
    try:
        if run.has(ENVIRONMENT):
            before, _ = read_json(run.path / ENVIRONMENT, list)
    except UserError as damage:
        notice(f"{damage}; earlier environments are lost")
    if before[-1:] != [now]:
        run.write(ENVIRONMENT, sealed_json([*before, now]))
    last = before[-1] if before else now
    return last.get("recurrence") == now["recurrence"]


def named_device(name: str | torch.device) -> torch.device:
    """Return a device by name, the fastest for "auto"; UsageError if it is not available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else available_devices()[-1]
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # "meta" does not compute
    except (RuntimeError, AssertionError, NotImplementedError):
        available = ", ".join(available_devices())
        raise UsageError(f"no device {str(name)!r}; available: {available}") from None
    return device


def available_devices() -> list[str]:
    """Return the names of the devices of this machine."""
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *mps]


def set_threads(threads: int) -> None:
    """Set the threads of torch; 0 keeps its default."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if not 0 <= threads <= most:
        raise UsageError(f"threads must lie between 0 and {most} on this machine, not {threads}")
    if threads:
        torch.set_num_threads(threads)


def built(make: Callable[[], M]) -> M:
    """Build the network; UsageError if torch refuses its sizes or there is not enough memory."""
    try:
        return make()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and "overflow" not in str(error):
            raise
        raise UsageError("the network is too large for this machine: see its sizes") from None


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    found = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()
