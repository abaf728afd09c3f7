"""What the machine can do, and what a process takes of it."""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def describe() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":")[1] for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0].strip() if names else model
    threads = torch.get_num_threads()
    return (
        f"{model}, {threads} threads, torch {torch.__version__}, Python {platform.python_version()}"
    )


def best_gemm(m: int, k: int, n: int) -> float:
    """GFLOP/s of the better of the two layouts of an (m, k) × (k, n) product."""
    a, b, bt = torch.randn(m, k), torch.randn(k, n), torch.randn(n, k)
    best = float("inf")
    for _ in range(10):
        for product in (lambda: a @ b, lambda: bt @ a.t()):
            start = time.perf_counter()
            product()
            best = min(best, time.perf_counter() - start)
    return 2 * m * k * n / best / 1e9


def peak_growth(step: Callable[[], Any], times: int = 3) -> float:
    """MiB by which the process's peak exceeds its size before the first of so many steps."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    for _ in range(times):
        step()
    return (_status("VmHWM") - before) / 1024


def peak() -> float:
    """MiB that the process has ever taken, mapped files included."""
    return _status("VmHWM") / 1024


def resident() -> float:
    """MiB that the process takes now."""
    return _status("VmRSS") / 1024


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}: peak memory is measured on Linux only")
