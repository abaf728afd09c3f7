"""Device, threads and memory of a run; versions and machine, without personal data."""

import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normrnn.errors import UsageError, UserError, notice
from normrnn.files import machine_memory
from normrnn.ops.native.library import describe
from normrnn.runs.machines import read_machines, write_machines
from normrnn.runs.store import RunDirectory
from normrnn.version import __version__

M = TypeVar("M", bound=nn.Module)
_THREADS = 64
_DRAWS = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_}


def environment(threads: int, processes: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Return versions, processor and system; processes and device if not one and the CPU."""
    found = {
        "normrnn": __version__,
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "recurrence": describe(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    found |= {"processes": processes} if processes > 1 else {}
    return found | ({"device": device} if device != "cpu" else {})


def record(run: RunDirectory, processes: int = 1, device: str = "cpu") -> bool:
    """Record the environment in the run directory; a run resumed elsewhere has several entries.

    Returns whether the last entry has the same kernels: others differ in the last bits.
    """
    now = environment(torch.get_num_threads(), processes, device)
    try:
        before, _ = read_machines(run.path)
    except UserError as damage:
        notice(f"{damage}; earlier environments are lost")
        before = []
    if before[-1:] != [now]:
        write_machines(run.path, [*before, now])
    last = before[-1] if before else now
    return last.get("recurrence") == now["recurrence"]


def named_device(name: str | torch.device) -> torch.device:
    """Return a device by name, the fastest for "auto"; UsageError if it is not available."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # "meta" does not compute
    except (RuntimeError, AssertionError, NotImplementedError):
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        mps = ["mps"] if torch.backends.mps.is_available() else []
        here = ", ".join(["cpu", *cuda, *mps])
        raise UsageError(f"no device {str(name)!r}; available: {here}") from None
    return device


def set_threads(threads: int) -> None:
    """Set the threads of torch; 0 keeps its default."""
    cores = os.cpu_count() or 1
    most = max(_THREADS, 4 * cores)
    if not 0 <= threads <= most:
        raise UsageError(
            f"threads must lie between 0 and {most} on this machine of {cores} cores, not {threads}"
        )
    if threads:
        torch.set_num_threads(threads)


def built(make: Callable[[], M]) -> M:
    """Build the network; UsageError before memory is reserved if it exceeds the machine's."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _Undrawn():
        try:
            model = make()
        except (RuntimeError, TypeError, OverflowError):  # sizes beyond torch's limits
            raise UsageError("the network is too large for any machine: see its sizes") from None
    tensors = [*model.parameters(), *model.buffers()]
    numbers = sum(tensor.numel() for tensor in tensors)
    need = 2 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if need > (there := machine_memory()):
        raise UsageError(
            f"the network is too large: {numbers:,} numbers take {need / 2**30:,.0f} GB with their"
            f" gradients, and this machine has {there / 2**30:,.0f} GB"
        )
    return make()


class _Undrawn(TorchFunctionMode):
    """Skip random draws: on the meta device they make torch import its compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
