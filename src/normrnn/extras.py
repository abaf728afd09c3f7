"""Optional dependencies, imported where they are used."""

import importlib
from importlib import metadata
from typing import Any

from normrnn.errors import UserError

SPEECH = ("kaldi_native_fbank", "soundfile", "pocketsphinx")


def speech_extra(name: str) -> Any:
    """A module of the `speech` extra, or how to get it."""
    return _of_extra(name, "speech")


def export_extra(name: str) -> Any:
    """A module of the `export` extra, or how to get it."""
    return _of_extra(name, "export")


def _of_extra(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # soundfile raises OSError without its C library
        package = name.partition(".")[0].replace("_", "-")
        raise UserError(f"this needs {package} ({error}): pip install 'normrnn[{extra}]'") from None


def versions(*names: str) -> dict[str, str]:
    """Module name -> version, of modules that can be imported."""
    for name in names:
        speech_extra(name)
    return {name: metadata.version(name.replace("_", "-")) for name in names}
