"""Optional dependencies, imported where they are used."""

import importlib
from importlib import metadata
from typing import Any

from normrnn.errors import UserError

SPEECH = ("kaldi_native_fbank", "soundfile", "pocketsphinx")


def speech_extra(name: str) -> Any:
    """A module of the `speech` extra, or how to get it."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # soundfile raises OSError without its C library
        raise UserError(
            f"this needs {name.replace('_', '-')} ({error}): pip install 'normrnn[speech]'"
        ) from None


def versions(*names: str) -> dict[str, str]:
    """Module name -> version, of modules that can be imported."""
    for name in names:
        speech_extra(name)
    return {name: metadata.version(name.replace("_", "-")) for name in names}
