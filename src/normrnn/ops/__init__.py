"""Pure functions on tensors; torch and nothing else."""

from normrnn.ops.cells import Peephole
from normrnn.ops.direction import Weights, add_bias, flat, project, recur, recur_fused, row_major
from normrnn.ops.fold import batch_fold, fold, fused, unfold
from normrnn.ops.hidden import StepNormaliser
from normrnn.ops.normalise import column_statistics, normalise
from normrnn.ops.recurrence import gru, lstm, rnn
from normrnn.ops.running import Population, slots_for, update_shared_, update_steps_
from normrnn.ops.statistics import Groups, Statistics, pool, unbiased
from normrnn.ops.steps import Steps

__all__ = [
    "Groups",
    "Peephole",
    "Population",
    "Statistics",
    "StepNormaliser",
    "Steps",
    "Weights",
    "add_bias",
    "batch_fold",
    "column_statistics",
    "flat",
    "fold",
    "fused",
    "gru",
    "lstm",
    "normalise",
    "pool",
    "project",
    "recur",
    "recur_fused",
    "rnn",
    "row_major",
    "slots_for",
    "unbiased",
    "unfold",
    "update_shared_",
    "update_steps_",
]
