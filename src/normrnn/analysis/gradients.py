"""Gradients in back-propagation through time, which the paper's appendix leaves open.

By the time loop, in float64, without dropout and with the batch's own statistics: per layer and
time step the norm of the total derivative of the loss with respect to h_t. The loss of the last
step alone gives the growth of a gradient per step; of ragged batches, that of the longest
sequences, aligned at their ends.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normrnn.config.base import Config
from normrnn.engine.task import Task
from normrnn.errors import UserError
from normrnn.nn import backend, batch_statistics
from normrnn.nn.base import Normalised
from normrnn.ops.loop import STEPS

Series = dict[int, float]


@dataclass
class Pass:
    """One forward pass: output rows (N, D·H), the number of rows of each time step, and the states
    h of every time step by layer and direction."""

    output: Tensor
    sizes: list[int]
    states: dict[str, dict[int, Tensor]]


@contextmanager
def recorded(layer: Normalised) -> Iterator[list[Pass]]:
    """Run the layer by the time loop and with batch statistics; every pass is recorded."""
    passes: list[Pass] = []
    norms: list[Any] = []  # one per layer and direction, in order
    states: dict[int, dict[int, Tensor]] = defaultdict(dict)
    compute = STEPS[layer.mode]

    def step(t: int, gates: Tensor, state: Any, weights: Any, norm: Any) -> Any:
        after = compute(t, gates, state, weights, norm)
        if norm not in norms:
            norms.append(norm)
        states[norms.index(norm)][t] = after[0]
        return after

    def collect(_: Any, __: Any, result: Any) -> None:
        output, ends = result[0], ("", "_reverse")[: 1 + layer.bidirectional]
        if isinstance(output, PackedSequence):
            rows, sizes = output.data, output.batch_sizes.tolist()
        else:
            rows, sizes = output, [output.shape[1]] * output.shape[0]
        names = [f"l{k}{end}" for k in range(layer.num_layers) for end in ends]
        passes.append(Pass(rows, sizes, {name: states[k] for k, name in enumerate(names)}))
        norms.clear()
        states.clear()

    handle = layer.register_forward_hook(collect)
    STEPS[layer.mode] = step
    try:
        with backend("loop"), batch_statistics(layer):
            yield passes
    finally:
        STEPS[layer.mode] = compute
        handle.remove()


def _refuse(task: Task, layer: Normalised) -> None:
    """Raise UserError for a loss that not every step has a part in, or for a network whose steps
    are not those of the recurrence."""
    if not task.per_step:
        raise UserError("gradients need a target per step; this data has one per sequence")
    if any(layer.zoneout):
        raise UserError("gradients are not recorded of a network with zoneout")


def record(config: Config, task: Task, batches: int = 4) -> dict[str, Any]:
    """Return the gradients of the task's network on its first training batches.

    Norms are means over the batches that have the step.
    """
    model = task.model.double().eval()
    (layer,) = (m for m in model.modules() if isinstance(m, Normalised))
    _refuse(task, layer)
    every: dict[str, list[Series]] = defaultdict(list)
    last: dict[str, list[Series]] = defaultdict(list)
    total, count = 0.0, 0
    task.reset()
    batches = min(batches, task.updates(0))
    for index in range(batches):
        with recorded(layer) as passes:
            loss = task.loss(0, index)
        (one,) = passes
        total, count = total + loss.total.item(), count + loss.count
        by_time = config.optimizer.loss == "sum_over_time"
        scaled = loss.differentiable / (loss.sequences if by_time else loss.count)
        (direct,) = torch.autograd.grad(scaled, one.output, retain_graph=True)
        for name, series in _norms(one, direct, list(one.states)).items():
            every[name].append(series)
        for name, series in _norms_of_the_last_step(one, direct).items():
            last[name].append(series)
    return {
        "recipe": config.recipe,
        "norm": config.norm,
        "seed": config.seed,
        "batches": batches,
        "loss": total / count,
        "layers": {name: _summary(name, every[name], last[name]) for name in every},
    }


def _norms(one: Pass, direct: Tensor, names: Sequence[str]) -> dict[str, Series]:
    """Return ‖dL/dh_t‖ over batch and features, all paths included, of some layers. `direct` is the
    derivative of the loss with respect to the output alone."""
    places = [(name, t) for name in names for t in sorted(one.states[name])]
    states = [one.states[name][t] for name, t in places]
    grads = torch.autograd.grad(one.output, states, direct, retain_graph=True, allow_unused=True)
    norms: dict[str, Series] = defaultdict(dict)
    for (name, t), g in zip(places, grads, strict=True):
        norms[name][t] = 0.0 if g is None else torch.linalg.vector_norm(g).item()
    return norms


def _norms_of_the_last_step(one: Pass, direct: Tensor) -> dict[str, Series]:
    """Return the same of the loss of the last step of the longest sequences, which for a reverse
    direction is the first."""
    longest, norms = one.sizes[-1], {}  # these are the first rows of every step
    for reverse, first in ((False, sum(one.sizes[:-1])), (True, 0)):
        at_end = torch.zeros_like(direct)
        rows = slice(first, first + longest)
        at_end.flatten(0, -2)[rows] = direct.flatten(0, -2)[rows]
        names = [name for name in one.states if name.endswith("_reverse") == reverse]
        norms |= _norms(one, at_end, names) if names else {}
    return norms


def _summary(name: str, every: list[Series], last: list[Series]) -> dict[str, Any]:
    lengths = [1 + max(values) for values in every]
    T, reverse = max(lengths), name.endswith("_reverse")
    if not reverse:  # aligned at the ends
        pairs = zip(last, lengths, strict=True)
        last = [{T - n + t: v for t, v in values.items()} for values, n in pairs]
    result: dict[str, Any] = {}
    for what, batches in (("gradient", every), ("gradient_of_the_end", last)):
        by_step = [[values[t] for values in batches if t in values] for t in range(T)]
        result[what] = [sum(v) / len(v) for v in by_step]
    path = result["gradient_of_the_end"][:: 1 if reverse else -1]
    # Over the steps that all batches have.
    result["growth_per_step"] = growth(path[: min(lengths)])
    return result


def growth(norms: Sequence[float]) -> float | None:
    """Return the factor per step between the first norm and the last above 0; None without steps.

    >>> growth([1.0, 2.0, 4.0])
    2.0
    >>> growth([1.0, 0.5, 0.0])
    0.5
    """
    last = max((i for i, n in enumerate(norms) if n > 0), default=0)
    if last == 0 or norms[0] == 0:
        return None
    return math.exp(math.log(norms[last] / norms[0]) / last)
