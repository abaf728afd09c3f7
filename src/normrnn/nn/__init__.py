"""Recurrent layers with normalisation: drop-ins for ``torch.nn.RNN``, ``LSTM`` and ``GRU``."""

import torch

from normrnn import norms
from normrnn.nn.batchnorm import Normaliser
from normrnn.nn.cells import GRUCell, LSTMCell, RNNCell
from normrnn.nn.convert import convert, fold
from normrnn.nn.init import initialise
from normrnn.nn.layers import GRU, LSTM, RNN, LiGRU
from normrnn.nn.recalibrate import batch_statistics, recalibrate
from normrnn.nn.replacement import replace, replacing
from normrnn.ops.backend import backend
from normrnn.ops.sync import Pool

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "GRUCell",
    "LSTMCell",
    "LiGRU",
    "Normaliser",
    "RNNCell",
    "backend",
    "batch_statistics",
    "convert",
    "fold",
    "initialise",
    "recalibrate",
    "replace",
    "replacing",
]

_rows = [norms.get(name) for name in norms.names()]
torch.serialization.add_safe_globals(  # whole layers, by torch.load(..., weights_only=True)
    [
        RNN,
        LSTM,
        GRU,
        LiGRU,
        RNNCell,
        LSTMCell,
        GRUCell,
        Pool,
        *(r.load() for r in _rows if r.normalises),
    ]
)
