"""Normalised recurrent networks in PyTorch (Laurent et al. 2015).

Names are imported when they are first used, so that ``normrnn --help`` needs no torch.
"""

# ruff: noqa: F405

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from normrnn.imports import after_import
from normrnn.version import __version__

if TYPE_CHECKING:
    from normrnn import reporting
    from normrnn.deploy.export import export
    from normrnn.deploy.stream import Stream
    from normrnn.experiments.compare import compare
    from normrnn.experiments.training import evaluate, load, sample, train
    from normrnn.nn import *  # noqa: F403  type checkers read its __all__
    from normrnn.reporting.result import verdict

_HOMES = {
    "Stream": "deploy.stream",
    "compare": "experiments.compare",
    "export": "deploy.export",
    "verdict": "reporting.result",
    **dict.fromkeys(("evaluate", "load", "sample", "train"), "experiments.training"),
}

__all__ = [
    "GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "LiGRU", "RNNCell", "Stream", "__version__",
    "backend", "batch_statistics", "compare", "convert", "evaluate", "export", "fold", "initialise",
    "load", "recalibrate", "replace", "replacing", "reporting", "sample", "train", "verdict",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'normrnn' has no attribute {name!r}")
    if name == "reporting":
        return import_module("normrnn.reporting")
    return getattr(import_module(f"normrnn.{_HOMES.get(name, 'nn')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _allow_loading(_: Any) -> None:
    """Import the layers, which lets ``torch.load`` read whole ones with ``weights_only=True``.

    If ``normrnn.ops`` itself is what imports torch, importing the layers here would be a cycle.
    """
    if "normrnn.ops" not in sys.modules:
        import_module("normrnn.nn")


after_import("torch", _allow_loading)
