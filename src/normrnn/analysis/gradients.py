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
from statistics import mean
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


@contextmanager
def recorded(layer: Normalised) -> Iterator[dict[str, list[Tensor]]]:
    """Run the layer by the time loop and with batch statistics, and record the states h of every
    time step of one forward pass, by layer and direction."""
    ends = ("", "_reverse")[: 1 + layer.bidirectional]
    names = [f"l{k}{end}" for k in range(layer.num_layers) for end in ends]
    norms: list[Any] = []  # one per layer and direction, in order
    states: dict[str, list[Tensor]] = defaultdict(list)
    compute = STEPS[layer.mode]

    def step(t: int, gates: Tensor, state: Any, weights: Any, norm: Any) -> Any:
        after = compute(t, gates, state, weights, norm)
        if norm not in norms:
            norms.append(norm)
        name = names[norms.index(norm)]
        # A reverse direction begins at the last step.
        states[name].insert(0 if name.endswith("_reverse") else t, after[0])
        return after

    STEPS[layer.mode] = step
    try:
        with backend("loop"), batch_statistics(layer):
            yield states
    finally:
        STEPS[layer.mode] = compute


def record(config: Config, task: Task, batches: int = 4) -> dict[str, Any]:
    """Return the gradients of the task's network on its first training batches.

    Norms are means over the batches that have the step.
    """
    model = task.model.double().eval()
    (layer,) = (m for m in model.modules() if isinstance(m, Normalised))
    if not task.per_step:
        raise UserError("gradients need a target per step; this data has one per sequence")
    if any(layer.zoneout):
        raise UserError("gradients are not recorded of a network with zoneout")
    outputs: list[Any] = []
    handle = layer.register_forward_hook(lambda _, __, result: outputs.append(result[0]))
    every: dict[str, list[list[float]]] = defaultdict(list)
    paths: dict[str, list[list[float]]] = defaultdict(list)  # from the last step backwards
    total, count, batches = 0.0, 0, min(batches, task.updates(0))
    task.reset()
    for index in range(batches):
        with recorded(layer) as states:
            loss = task.loss(0, index)
        total, count = total + loss.total.item(), count + loss.count
        output = outputs.pop()
        is_packed = isinstance(output, PackedSequence)
        rows = output.data if is_packed else output
        longest = int(output.batch_sizes[-1]) if is_packed else output.shape[1]
        (direct,) = torch.autograd.grad(loss.objective, rows, retain_graph=True)
        ends = {reverse: _of_last_step(direct, longest, reverse) for reverse in (False, True)}
        for name, steps in states.items():
            is_reverse = name.endswith("_reverse")
            every[name].append(_norms(rows, direct, steps))
            path = _norms(rows, ends[is_reverse], steps)
            paths[name].append(path if is_reverse else path[::-1])
    handle.remove()
    layers = {}
    for name in every:
        path, shortest = _means(paths[name]), min(map(len, paths[name]))
        layers[name] = {
            "gradient": _means(every[name]),
            "gradient_of_the_end": path if name.endswith("_reverse") else path[::-1],
            "growth_per_step": growth(path[:shortest]),  # over the steps that all batches have
        }
    about = {name: getattr(config, name) for name in ("recipe", "norm", "seed")}
    return {**about, "batches": batches, "loss": total / count, "layers": layers}


def _norms(output: Tensor, direct: Tensor, states: list[Tensor]) -> list[float]:
    """Return ‖dL/dh_t‖ over batch and features, all paths included. `direct` is the derivative of
    the loss with respect to the output alone."""
    grads = torch.autograd.grad(output, states, direct, retain_graph=True, allow_unused=True)
    return [0.0 if g is None else torch.linalg.vector_norm(g).item() for g in grads]


def _of_last_step(direct: Tensor, longest: int, reverse: bool) -> Tensor:
    """Return the part of `direct` that belongs to the last step of the `longest` longest sequences,
    which for a reverse direction is the first. They are the first rows of every step."""
    rows = direct.flatten(0, -2)
    first = 0 if reverse else len(rows) - longest
    at_end = torch.zeros_like(rows)
    at_end[first : first + longest] = rows[first : first + longest]
    return at_end.view_as(direct)


def _means(batches: list[list[float]]) -> list[float]:
    steps = range(max(map(len, batches)))
    return [mean(norms[t] for norms in batches if t < len(norms)) for t in steps]


def growth(norms: Sequence[float]) -> float | None:
    """Return the factor per step between the first norm and the last above 0; None without steps.

    >>> growth([1.0, 0.5, 0.0])
    0.5
    """
    last = max((i for i, n in enumerate(norms) if n > 0), default=0)
    if last == 0 or norms[0] == 0:
        return None
    return math.exp(math.log(norms[last] / norms[0]) / last)


def describe(name: str, norms: dict[str, Any]) -> str:
    """Return how the recurrence of a layer changes a gradient, in words."""
    factor, path = norms["growth_per_step"], norms["gradient_of_the_end"]
    if factor is None:
        return f"{name}: one time step, no gradient through time"
    start, end = (path[0], path[-1]) if name.endswith("_reverse") else (path[-1], path[0])
    fate = "explodes" if factor > 1.02 else "vanishes" if factor < 0.98 else "keeps its size"
    return (
        f"{name}: a gradient from the last step changes by a factor of {factor:.3f} per step back"
        f" ({start:.2e} to {end:.2e} over {len(path) - 1} steps): it {fate}"
    )
