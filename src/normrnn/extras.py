"""Optional dependencies: imported where they are used, with an install command if missing."""

import importlib
import shlex
from importlib import metadata
from typing import Any

from normrnn.errors import UserError


def extras() -> list[str]:
    """Return the names of the extras that users may install."""
    named = metadata.metadata("normrnn").get_all("Provides-Extra") or []
    return [name for name in named if name != "dev"]


def requirements(extra: str) -> list[str]:
    """Return the packages of an extra, with their versions."""
    needed = [r.partition(";") for r in metadata.requires("normrnn") or []]
    return [name.strip() for name, _, marker in needed if f"'{extra}'" in marker]


def install_command(extra: str) -> str:
    """Return a pip command for the packages of an extra; normrnn is on no package index."""
    return f"pip install {shlex.join(requirements(extra))}"


def missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    names = [requirement.partition(">")[0] for requirement in requirements(extra)]
    return [name for name in names if not any(metadata.distributions(name=name))]


def import_extra(name: str, extra: str) -> Any:
    """Import a module of an extra; UserError with an install command if missing."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # soundfile raises OSError without its C library
        package = name.partition(".")[0].replace("_", "-")
        raise UserError(
            f"this needs {package} ({error}), of the extra [{extra}]: {install_command(extra)}"
        ) from None
