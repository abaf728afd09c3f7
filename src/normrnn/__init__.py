"""Normalised recurrent networks in PyTorch (Laurent et al. 2015).

Names are imported when they are first used, so that ``normrnn --help`` needs no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from normrnn.imports import after_import
from normrnn.version import __version__

if TYPE_CHECKING:
    from normrnn import reporting as reporting
    from normrnn.deploy.export import export as export
    from normrnn.deploy.stream import Stream as Stream
    from normrnn.experiments.compare import compare as compare
    from normrnn.experiments.training import evaluate as evaluate
    from normrnn.experiments.training import load as load
    from normrnn.experiments.training import sample as sample
    from normrnn.experiments.training import train as train
    from normrnn.nn import GRU as GRU
    from normrnn.nn import LSTM as LSTM
    from normrnn.nn import RNN as RNN
    from normrnn.nn import GRUCell as GRUCell
    from normrnn.nn import LiGRU as LiGRU
    from normrnn.nn import LSTMCell as LSTMCell
    from normrnn.nn import RNNCell as RNNCell
    from normrnn.nn import backend as backend
    from normrnn.nn import batch_statistics as batch_statistics
    from normrnn.nn import convert as convert
    from normrnn.nn import fold as fold
    from normrnn.nn import initialise as initialise
    from normrnn.nn import recalibrate as recalibrate
    from normrnn.nn import replace as replace
    from normrnn.nn import replacing as replacing
    from normrnn.reporting.result import verdict as verdict

_LAYERS = ("GRU", "GRUCell", "LSTM", "LSTMCell", "LiGRU", "RNN", "RNNCell")
_TOOLS = ("backend", "batch_statistics", "convert", "fold", "initialise", "recalibrate", "replace")
_HOMES = {
    **dict.fromkeys((*_LAYERS, *_TOOLS, "replacing"), "normrnn.nn"),
    "Stream": "normrnn.deploy.stream",
    "compare": "normrnn.experiments.compare",
    "export": "normrnn.deploy.export",
    **dict.fromkeys(("evaluate", "load", "sample", "train"), "normrnn.experiments.training"),
    "verdict": "normrnn.reporting.result",
}

__all__ = ["__version__", "reporting", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "reporting":
        return import_module("normrnn.reporting")
    if name not in _HOMES:
        raise AttributeError(f"module 'normrnn' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _allow_loading(_: Any) -> None:
    """Import the layers, which lets ``torch.load`` read whole ones with ``weights_only=True``.

    If ``normrnn.ops`` itself is what imports torch, importing the layers here would be a cycle.
    """
    if "normrnn.ops" not in sys.modules:
        import_module("normrnn.nn")


after_import("torch", _allow_loading)
