"""Pure functions on tensors; torch and nothing else.

A call of the recurrence is described once: by a static ``Spec``, by ``Steps``, the layout of its
rows, and by its ``Tensors``. Rows are the data of a ``PackedSequence``, or ready gate inputs.

>>> import torch
>>> weights = [Weights(None, torch.randn(16, 4))]
>>> spec, tensors = describe_call("LSTM", (False,), torch.randn(7, 16), weights, Norm())
>>> result = recur(spec, Steps((3, 3, 1)), tensors)
>>> result.rows.shape, result.state[0].shape
(torch.Size([7, 4]), torch.Size([1, 3, 4]))
"""

from normrnn.ops.call import Norm, Result, Spec, Tensors, Weights, describe_call
from normrnn.ops.layout import Steps
from normrnn.ops.normalise import normalise
from normrnn.ops.recurrence import recur
from normrnn.ops.running import Population, slots_for, update_running_
from normrnn.ops.statistics import Groups, Statistics, measure, pool, unbiased

__all__ = [
    "Groups",
    "Norm",
    "Population",
    "Result",
    "Spec",
    "Statistics",
    "Steps",
    "Tensors",
    "Weights",
    "describe_call",
    "measure",
    "normalise",
    "pool",
    "recur",
    "slots_for",
    "unbiased",
    "update_running_",
]
