"""Optional dependencies: imported where they are used, with an install command if missing."""

import importlib
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

from normrnn.errors import UserError

SPEECH = ("kaldi_native_fbank", "soundfile", "pocketsphinx")
_CHECKOUT = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """Return a pip command that installs an extra.

    From a checkout the extra is installed by path. Otherwise its packages are named one by one:
    normrnn itself is on no package index.
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        place = "." if Path.cwd() == _CHECKOUT else str(_CHECKOUT)
        return f"pip install -e {shlex.quote(f'{place}[{extra}]')}"
    requirements = [r.partition(";") for r in metadata.requires("normrnn") or []]
    needed = [name.strip() for name, _, marker in requirements if f"'{extra}'" in marker]
    return f"pip install {shlex.join(needed)}"


def speech_extra(name: str) -> Any:
    """Import a module of the `speech` extra; UserError with an install command if missing."""
    return _of_extra(name, "speech")


def export_extra(name: str) -> Any:
    """Import a module of the `export` extra; UserError with an install command if missing."""
    return _of_extra(name, "export")


def _of_extra(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # soundfile raises OSError without its C library
        package = name.partition(".")[0].replace("_", "-")
        raise UserError(
            f"this needs {package} ({error}), of the extra [{extra}]: {install_command(extra)}"
        ) from None


def versions(*names: str) -> dict[str, str]:
    """Versions of these modules by name."""
    for name in names:
        speech_extra(name)
    return {name: metadata.version(name.replace("_", "-")) for name in names}
