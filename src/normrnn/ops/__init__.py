"""Pure functions on tensors; torch and nothing else."""

from normrnn.ops.call import (
    Call,
    Cell,
    InputNorm,
    Inputs,
    Peephole,
    Plain,
    Result,
    RowNorm,
    StepNorm,
)
from normrnn.ops.fold import (
    Weights,
    batch_fold,
    fold,
    fold_inside,
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
    "Result",
    "RowNorm",
    "Statistics",
    "StepNorm",
    "Steps",
    "Weights",
    "batch_fold",
    "fold",
    "fold_inside",
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
