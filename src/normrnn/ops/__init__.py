"""Pure functions on tensors; torch and nothing else.

``rnn``, ``lstm`` and ``gru`` are the recurrence of *ready gate inputs*: whatever W_x x became
(normalised, gated, summed with something else), as rows, the data of a ``PackedSequence``. They
compute the rest of a cell: W_h, peepholes, initial states, ragged lengths, ``resets``, either
direction; compiled in float32 on a CPU, differentiable any number of times everywhere.

>>> import torch
>>> from torch.nn.utils.rnn import pack_sequence
>>> packed = pack_sequence([torch.randn(n, 3) for n in (5, 4, 2)])
>>> w_ih, w_hh = torch.randn(16, 3), torch.randn(16, 4)
>>> gates = torch.tanh(packed.data) @ w_ih.t()
>>> states, (h, c) = lstm(gates, w_hh, Steps.packed(packed.batch_sizes))
>>> states.shape, h.shape
(torch.Size([11, 4]), torch.Size([3, 4]))
"""

from normrnn.ops.call import Norm, Peephole, Result, Spec, Tensors, Weights, describe_call
from normrnn.ops.layout import Steps
from normrnn.ops.normalise import normalise
from normrnn.ops.recurrence import gru, lstm, recur, rnn
from normrnn.ops.running import Population, slots_for, update_running_
from normrnn.ops.statistics import Groups, Statistics, measure, pool, unbiased

__all__ = [
    "Groups",
    "Norm",
    "Peephole",
    "Population",
    "Result",
    "Spec",
    "Statistics",
    "Steps",
    "Tensors",
    "Weights",
    "describe_call",
    "gru",
    "lstm",
    "measure",
    "normalise",
    "pool",
    "recur",
    "rnn",
    "slots_for",
    "unbiased",
    "update_running_",
]
