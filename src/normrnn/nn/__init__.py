"""Recurrent layers with normalisation: drop-ins for ``torch.nn.RNN``, ``LSTM`` and ``GRU``."""

from normrnn.nn.batch import Normaliser
from normrnn.nn.layers import GRU, LSTM, RNN
from normrnn.nn.tools import batch_statistics, convert, fold, recalibrate

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Normaliser",
    "batch_statistics",
    "convert",
    "fold",
    "recalibrate",
]
