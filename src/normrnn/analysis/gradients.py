"""Gradients in back-propagation through time, which the paper's appendix leaves open.

By the time loop, in float64, without dropout and with the batch's own statistics: per layer and
time step the norm of the total derivative of the loss with respect to h_t, and the
standard deviation of the inputs of the non-linearities. The loss of the last step alone gives the
growth of a gradient per step; of ragged batches, that of the longest sequences, aligned at their
ends.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normrnn import norms
from normrnn.config.base import Config
from normrnn.engine.task import Task
from normrnn.errors import UserError
from normrnn.nn import backend, batch_statistics
from normrnn.nn.base import Normalised
from normrnn.ops.loop import STEPS

Series = dict[int, float]


@dataclass
class StepRecord:
    """What one time step computed for its rows."""

    h: Tensor
    sums: Tensor
    """(n, C): W_x x + W_h h before a normalisation of the sums."""
    pre: Tensor
    """(n, C): the same after it, without peephole terms."""


@dataclass
class Pass:
    """One forward pass: output rows (N, D·H), the rows of each time step, and by layer and
    direction the values of every time step."""

    output: Tensor
    sizes: list[int]
    layers: dict[str, dict[int, StepRecord]]


@contextmanager
def recorded(layer: Normalised) -> Iterator[list[Pass]]:
    """Run the layer by the time loop and with batch statistics; every pass is recorded."""
    passes: list[Pass] = []
    norms_seen: list[Any] = []  # one per layer and direction, in order
    steps: dict[int, dict[int, StepRecord]] = {}
    compute = STEPS[layer.mode]

    def step(t: int, gates: Tensor, state: Any, weights: Any, norm: Any) -> Any:
        if norm not in norms_seen:
            norms_seen.append(norm)
            norm.sums = partial(_recorded_sums, norm.sums, parts := [])
            norm.parts_of_step = parts
        norm.parts_of_step.clear()
        after = compute(t, gates, state, weights, norm)
        sums, pre = (torch.cat(parts, 1) for parts in zip(*norm.parts_of_step, strict=True))
        steps.setdefault(norms_seen.index(norm), {})[t] = StepRecord(after[0], sums, pre)
        return after

    def collect(_: Any, __: Any, result: Any) -> None:
        output, names = result[0], [f"l{k}" for k in range(layer.num_layers)]
        if layer.bidirectional:
            names = [name + end for name in names for end in ("", "_reverse")]
        if isinstance(output, PackedSequence):
            rows, sizes = output.data, output.batch_sizes.tolist()
        else:
            rows, sizes = output, [output.shape[1]] * output.shape[0]
        passes.append(Pass(rows, sizes, {name: steps[k] for k, name in enumerate(names)}))
        norms_seen.clear()
        steps.clear()

    handle = layer.register_forward_hook(collect)
    STEPS[layer.mode] = step
    try:
        with backend("loop"), batch_statistics(layer):
            yield passes
    finally:
        STEPS[layer.mode] = compute
        handle.remove()


def _recorded_sums(
    compute: Any, parts: list[tuple[Tensor, Tensor]], t: int, sums: Tensor, first: int = 0
) -> Tensor:
    """Normalise some channels of the sums of a step, and keep them; a GRU has two such parts."""
    result = compute(t, sums, first)
    parts.append((sums, result))
    return result


def _refuse(task: Task, layer: Normalised) -> None:
    """Raise UserError for a loss that not every step has a part in, or for a network whose steps
    are not those of the recurrence."""
    if not task.per_step:
        raise UserError("gradients need a target per step; this data has one per sequence")
    if any(layer.zoneout):
        raise UserError("gradients are not recorded of a network with zoneout")


def record(config: Config, task: Task, batches: int = 4) -> dict[str, Any]:
    """Return the gradients of the task's network on its first training batches.

    Norms and spreads are means over the batches that have the step.
    """
    model = task.model.double().eval()
    (layer,) = (m for m in model.modules() if isinstance(m, Normalised))
    _refuse(task, layer)
    measured: dict[str, dict[str, list[Series]]] = defaultdict(lambda: defaultdict(list))
    total, count = 0.0, 0
    task.reset()
    batches = min(batches, task.updates(0))
    for index in range(batches):
        with recorded(layer) as passes:
            loss = task.loss(0, index)
        total, count = total + loss.total.item(), count + loss.count
        by_time = config.optimizer.loss == "sum_over_time"
        scaled = loss.differentiable / (loss.sequences if by_time else loss.count)
        (direct,) = torch.autograd.grad(scaled, passes[0].output, retain_graph=True)
        for name, series in _measure(passes[0], direct).items():
            for what, values in series.items():
                measured[name][what].append(values)
    layers = {name: _summary(layer, name, series) for name, series in measured.items()}
    return {
        "recipe": config.recipe,
        "norm": config.norm,
        "seed": config.seed,
        "batches": batches,
        "loss": total / count,
        "layers": layers,
    }


def _measure(seen: Pass, direct: Tensor) -> dict[str, dict[str, Series]]:
    """`direct` is the derivative of the loss with respect to the output alone."""
    sizes = seen.sizes
    whole = _norms(seen, direct, list(seen.layers))
    ends = {}
    for reverse in (False, True):
        names = [name for name in seen.layers if name.endswith("_reverse") == reverse]
        longest = sizes[-1]  # the first rows of every step
        first = 0 if reverse else sum(sizes[:-1])
        at_end = torch.zeros_like(direct)
        by_row, direct_by_row = at_end.flatten(0, -2), direct.flatten(0, -2)
        by_row[first : first + longest] = direct_by_row[first : first + longest]
        ends |= _norms(seen, at_end, names) if names else {}
    return {
        name: {
            "gradient": whole[name],
            "gradient_of_the_end": ends[name],
            "spread": {t: _spread(taken[t].pre) for t in sorted(taken)},
            "spread_before": {t: _spread(taken[t].sums) for t in sorted(taken)},
        }
        for name, taken in seen.layers.items()
    }


def _spread(rows: Tensor) -> float:
    """Standard deviation over batch and features."""
    return rows.std(correction=0).item()


def _norms(seen: Pass, direct: Tensor, names: Sequence[str]) -> dict[str, Series]:
    """Return ‖dL/dh_t‖ over batch and features, all paths included, of some layers, from one
    backward pass."""
    places = [(name, t) for name in names for t in sorted(seen.layers[name])]
    states = [seen.layers[name][t].h for name, t in places]
    grads = torch.autograd.grad(seen.output, states, direct, retain_graph=True, allow_unused=True)
    found: dict[str, Series] = {name: {} for name in names}
    for (name, t), g in zip(places, grads, strict=True):
        found[name][t] = 0.0 if g is None else torch.linalg.vector_norm(g).item()
    return found


def _summary(layer: Normalised, name: str, series: dict[str, list[Series]]) -> dict[str, Any]:
    lengths = [1 + max(values) for values in series["gradient"]]
    T, reverse = max(lengths), name.endswith("_reverse")
    result: dict[str, Any] = {}
    for what, batches in series.items():
        if what == "gradient_of_the_end" and not reverse:
            pairs = zip(batches, lengths, strict=True)
            batches = [{T - n + t: v for t, v in values.items()} for values, n in pairs]
        by_step = [[values[t] for values in batches if t in values] for t in range(T)]
        result[what] = [sum(v) / len(v) for v in by_step]
    row = norms.get(layer.norm)
    if row.acts != "step" or not row.keeps_statistics:  # BN of the sums themselves
        del result["spread_before"]
    else:
        gamma = dict(layer.named_parameters()).get(f"norm_{name}.weight")
        result["mean_gamma"] = 1.0 if gamma is None else gamma.mean().item()
    ways = result["gradient_of_the_end"]
    # Over the steps that all batches have.
    result["growth_per_step"] = growth((ways if reverse else ways[::-1])[: min(lengths)])
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
