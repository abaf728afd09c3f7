"""What a run runs on: device, versions and machine, nothing personal."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from normrnn import __version__
from normrnn.errors import UsageError
from normrnn.runs.store import RunDirectory

ENVIRONMENT = "environment.json"


def environment(threads: int) -> dict[str, Any]:
    """Versions, processor and system."""
    return {
        "normrnn": __version__,
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
    }


def record(run: RunDirectory) -> None:
    """Note in the run directory what it runs on; a run that goes on elsewhere has several."""
    now = environment(torch.get_num_threads())
    try:
        before = json.loads(run.read(ENVIRONMENT)) if run.has(ENVIRONMENT) else []
    except ValueError:
        before = []
    before = before if isinstance(before, list) else []
    if before[-1:] != [now]:
        run.write_json(ENVIRONMENT, [*before, now])


def named_device(name: str | torch.device) -> torch.device:
    """The device of that name; UsageError if torch has none such here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"no device {str(name)!r}: {str(error).splitlines()[0]}") from None
    return device


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
