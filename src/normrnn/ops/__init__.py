"""Pure functions on tensors; torch and nothing else.

``rnn``, ``lstm`` and ``gru`` are the recurrence of *ready gate inputs*: whatever W_x x became on
its way (normalised, gated, summed with something else), in rows, the data of a ``PackedSequence``.
The rest of a cell is theirs: W_h, peepholes, initial states, ragged lengths, ``resets``, either
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

from normrnn.ops.call import (
    Call,
    Cell,
    InputNorm,
    Inputs,
    Peephole,
    Plain,
    RecurrentNorm,
    Result,
    RowNorm,
    StepNorm,
    Zoneout,
)
from normrnn.ops.fold import (
    Weights,
    batch_fold,
    fold,
    fold_inside,
    fold_recurrent,
    fused,
    fused_direction,
    unfold,
)
from normrnn.ops.normalise import normalise
from normrnn.ops.recurrence import gru, lstm, recur, rnn
from normrnn.ops.running import Population, slots_for, update_shared_, update_steps_
from normrnn.ops.statistics import Groups, Statistics, measure, pool, unbiased
from normrnn.ops.steps import Steps

__all__ = [
    "Call",
    "Cell",
    "Groups",
    "InputNorm",
    "Inputs",
    "Peephole",
    "Plain",
    "Population",
    "RecurrentNorm",
    "Result",
    "RowNorm",
    "Statistics",
    "StepNorm",
    "Steps",
    "Weights",
    "Zoneout",
    "batch_fold",
    "fold",
    "fold_inside",
    "fold_recurrent",
    "fused",
    "fused_direction",
    "gru",
    "lstm",
    "measure",
    "normalise",
    "pool",
    "recur",
    "rnn",
    "slots_for",
    "unbiased",
    "unfold",
    "update_shared_",
    "update_steps_",
]
