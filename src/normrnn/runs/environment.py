"""What a run runs on: device, versions and machine, nothing personal."""

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
    """Versions, processor and system; several processes, or another device, where it is so."""
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
    """Note in the run directory what it runs on; a run that goes on elsewhere has several.

    Returns whether it went on so far with the kernels of now: others give other last bits.
    """
    now = environment(torch.get_num_threads(), processes, device)
    try:
        before, _ = read_machines(run.path)
    except UserError as damage:
        notice(f"{damage}; what the run ran on so far is not known any more")
        before = []
    if before[-1:] != [now]:
        write_machines(run.path, [*before, now])
    last = before[-1] if before else now
    return last.get("recurrence") == now["recurrence"]


def named_device(name: str | torch.device) -> torch.device:
    """The device of that name, the fastest for "auto"; UsageError if torch has none such here."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # there, and it computes: "meta" does not
    except (RuntimeError, AssertionError, NotImplementedError):
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        mps = ["mps"] if torch.backends.mps.is_available() else []
        here = ", ".join(["cpu", *cuda, *mps])
        raise UsageError(f"no device {str(name)!r} here; there is {here}") from None
    return device


def set_threads(threads: int) -> None:
    """Threads of the tensor library; 0 is its own choice."""
    cores = os.cpu_count() or 1
    most = max(_THREADS, 4 * cores)
    if not 0 <= threads <= most:
        raise UsageError(
            f"threads must lie between 0 and {most} on this machine of {cores} cores, not {threads}"
        )
    if threads:
        torch.set_num_threads(threads)


def built(make: Callable[[], M]) -> M:
    """The network; UsageError, before anything is reserved for it, if it is beyond the machine."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _Undrawn():
        try:
            model = make()
        except (RuntimeError, TypeError, OverflowError):  # sizes that torch itself cannot take
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
    """Nothing is drawn: for tensors without memory torch would import all of its compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def processor() -> str:
    """The processor's name."""
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
