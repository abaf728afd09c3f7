"""Time training steps at everyday and tiny shapes, as ratios to torch's layer without a norm.

Layers are timed in turn, round after round, and the best round of each counts.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import normrnn


class Everyday(NamedTuple):
    B: int
    T: int
    I: int  # noqa: E741
    H: int
    directions: int = 1

    def __str__(self) -> str:
        both = ", both directions" if self.directions == 2 else ""
        return f"B{self.B} T{self.T} I{self.I} H{self.H}{both}"


SHAPES = [
    Everyday(1, 50, 64, 128),
    Everyday(4, 50, 64, 128),
    Everyday(8, 50, 40, 64),
    Everyday(16, 100, 40, 64, 2),
    Everyday(20, 35, 200, 200),
    Everyday(32, 100, 128, 128),
    Everyday(64, 30, 256, 512),
    Everyday(128, 50, 64, 256),
    Everyday(10, 200, 123, 250, 2),
    Everyday(17, 61, 90, 333, 2),
    Everyday(2, 20, 300, 600),
    Everyday(256, 20, 32, 100),
    Everyday(32, 10, 50, 33),
    Everyday(5, 120, 70, 150, 2),
    Everyday(48, 64, 96, 192),
    Everyday(12, 80, 256, 384),
    Everyday(3, 150, 24, 48),
    Everyday(100, 40, 80, 32),
    Everyday(24, 60, 150, 150),
    Everyday(30, 90, 100, 140),
]
TINY = [
    Everyday(1, 1, 16, 16),
    Everyday(1, 10, 32, 64),
    Everyday(2, 5, 32, 32),
    Everyday(4, 1, 64, 64),
    Everyday(4, 10, 16, 16),
    Everyday(4, 10, 64, 64),
]

# cell -> what it is compared with, and ours
LAYERS: dict[str, tuple[Any, Any]] = {
    "LSTM": (nn.LSTM, normrnn.LSTM),
    "GRU": (nn.GRU, normrnn.GRU),
    "RNN": (nn.RNN, normrnn.RNN),
    "LiGRU": (normrnn.GRU, normrnn.LiGRU),
}
Target = tuple[float, float | None]
# cell -> norm -> geometric mean and worst to reach with the input's gradient, two threads
TARGETS: dict[str, dict[str, Target]] = {
    "LSTM": {
        "sequence": (0.90, 1.08),
        "frame": (0.95, 1.15),
        "None": (0.85, 1.02),
        "layer": (0.95, 1.15),
        "recurrent": (1.30, None),
        "whiten": (1.50, None),
    },
    "GRU": {"sequence": (0.85, 1.10)},
    "RNN": {"sequence": (0.85, 1.10)},
    "LiGRU": {"sequence": (0.80, None)},
}
# The same of the LSTM, "sequence", for other (threads, input gradient).
SEQUENCE: dict[tuple[int, bool], Target] = {(1, True): (0.95, 1.08), (2, False): (0.82, 1.00)}
TINY_TARGET: Target = (1.00, None)
# regulariser -> how it is asked for, and the geometric mean to be reached, × the same without
REGULARISERS: dict[str, tuple[dict[str, Any], float]] = {
    "weight_drop": ({"weight_drop": 0.3}, 1.05),
    "locked": ({"dropout": 0.3, "dropout_kind": "locked"}, 1.05),
    "zoneout": ({"zoneout": (0.1, 0.1)}, 1.10),
}


class ScriptedLayerNormLSTM(nn.Module):
    """A layer-normalised LSTM as TorchScript's own examples write one: the loop is scripted."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.w_ih = nn.Parameter(torch.randn(4 * hidden_size, input_size) * hidden_size**-0.5)
        self.w_hh = nn.Parameter(torch.randn(4 * hidden_size, hidden_size) * hidden_size**-0.5)
        self.norm_x = nn.LayerNorm(4 * hidden_size)
        self.norm_h = nn.LayerNorm(4 * hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.norm_x(torch.matmul(x, self.w_ih.t())).unbind(0)
        h = torch.zeros(x.size(1), self.w_hh.size(1))
        c = torch.zeros(x.size(1), self.w_hh.size(1))
        outputs: list[Tensor] = []
        for k in range(len(gates)):
            sums = gates[k] + self.norm_h(torch.mm(h, self.w_hh.t()))
            i, f, g, o = sums.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), h


def against_torchscript(threads: int, seconds: float) -> None:
    """How much faster ``norm="layer"`` is, at the shapes of one direction."""
    torch.set_num_threads(threads)
    factors = []
    for shape in SHAPES:
        if shape.directions == 2:
            continue
        x, gradient = torch.randn(shape.T, shape.B, shape.I), torch.randn(shape.T, shape.B, shape.H)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted: Any = torch.jit.script(ScriptedLayerNormLSTM(shape.I, shape.H))
        ours = normrnn.LSTM(shape.I, shape.H, norm="layer")
        steps = [step_of(layer, x, gradient) for layer in (scripted, ours)]
        best = [min(step() for _ in range(4)) for step in steps]  # scripts are fused on the way
        for _ in range(max(5, min(40, int(seconds / sum(best))))):
            best = [min(old, step()) for old, step in zip(best, steps, strict=True)]
        factors.append(best[0] / best[1])
    mean = math.exp(sum(map(math.log, factors)) / len(factors))
    words = f"{mean:.2f} × faster in the geometric mean, {min(factors):.2f} at worst"
    print(f"\nlayer against TorchScript, {threads} thread(s): {words} (to reach: 1.80)")


def step_of(
    layer: nn.Module, x: Tensor, gradient: Tensor, trains: bool = True
) -> Callable[[], float]:
    """Return a function that times one training step, or one call without gradients."""
    parameters = list(layer.parameters())

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        x.grad = None
        start = time.perf_counter()
        layer(x)[0].backward(gradient)
        return time.perf_counter() - start

    def call() -> float:
        with torch.no_grad():
            start = time.perf_counter()
            layer(x)
            return time.perf_counter() - start

    return step if trains else call


def ratios(
    cell: str,
    shape: Everyday,
    norms: Sequence[str],
    seconds: float,
    *,
    input_gradient: bool,
    trains: bool = True,
) -> tuple[float, dict[str, float]]:
    """Return the seconds of torch's layer, and the ratio of each norm to them."""
    plain, ours = LAYERS[cell]
    both = shape.directions == 2
    x = torch.randn(shape.T, shape.B, shape.I, requires_grad=input_gradient)
    gradient = torch.randn(shape.T, shape.B, shape.directions * shape.H)
    rows = shape.B * shape.T
    needed = {"frame": shape.B, "recurrent": shape.B, "sequence": rows, "whiten": rows - shape.I}
    norms = [name for name in norms if needed.get(name, 2) > 1]  # one row has no statistics
    base: dict[str, Any] = {"norm": norms[0]} if plain is normrnn.GRU else {}
    layers = [plain(shape.I, shape.H, bidirectional=both, **base)]
    for name in norms:
        norm = None if name == "None" else name
        layers.append(ours(shape.I, shape.H, bidirectional=both, norm=norm))
    steps = [step_of(layer.train(trains), x, gradient, trains) for layer in layers]
    best = [min(step(), step()) for step in steps]
    most = 60 if sum(best) > 2e-3 else 600
    for _ in range(max(6, min(most, int(seconds / sum(best))))):
        best = [min(old, step()) for old, step in zip(best, steps, strict=True)]
    return best[0], {name: t / best[0] for name, t in zip(norms, best[1:], strict=True)}


def report(
    cell: str,
    norms: Sequence[str],
    threads: int,
    seconds: float,
    *,
    input_gradient: bool,
    trains: bool = True,
    tiny: bool = False,
) -> None:
    """Print a table of ratios, their geometric mean and the worst beside the targets."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    words = f"{'with' if input_gradient else 'without'} the input's gradient"
    what = f"training, {words}" if trains else "forward pass only"
    beside = "our GRU" if cell == "LiGRU" else f"nn.{cell}"
    print(f"\n{cell}, {threads} thread(s), {what}; × {beside}")
    print("| shape | ms | " + " | ".join(norms) + " |\n|" + "---|" * (2 + len(norms)))
    rows = []
    for shape in TINY if tiny else SHAPES:
        base, row = ratios(
            cell, shape, norms, seconds, input_gradient=input_gradient, trains=trains
        )
        rows.append(row)
        cells = (f"{row[name]:.2f}" if name in row else "–" for name in norms)
        print(f"| {shape} | {1e3 * base:.2f} | " + " | ".join(cells) + " |")
    for name in norms:
        column = [row[name] for row in rows if name in row]
        mean = math.exp(sum(map(math.log, column)) / len(column))
        target = TINY_TARGET if tiny else TARGETS.get(cell, {}).get(name)
        if (cell, name) == ("LSTM", "sequence") and not tiny:
            target = SEQUENCE.get((threads, input_gradient), target)
        asked = "" if target is None else f" (to reach: {_shown(target)})"
        print(f"{name}: geometric mean {mean:.3f}, worst {max(column):.2f}{asked}", flush=True)


def _shown(target: Target) -> str:
    return " / ".join(f"{value:.2f}" for value in target if value is not None)


def regularisers(threads: int, seconds: float) -> None:
    """Two layers of LSTM without a norm, with each regulariser, × the same without."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    found: dict[str, list[float]] = {name: [] for name in REGULARISERS}
    for shape in SHAPES:
        x = torch.randn(shape.T, shape.B, shape.I)
        gradient = torch.randn(shape.T, shape.B, shape.directions * shape.H)
        sizes: Any = {"num_layers": 2, "bidirectional": shape.directions == 2, "norm": None}
        every = [{}, *(how for how, _ in REGULARISERS.values())]
        layers = [normrnn.LSTM(shape.I, shape.H, **sizes, **how) for how in every]
        steps = [step_of(layer, x, gradient) for layer in layers]
        best = [min(step(), step()) for step in steps]
        for _ in range(max(6, min(60, int(seconds / sum(best))))):
            best = [min(old, step()) for old, step in zip(best, steps, strict=True)]
        for name, t in zip(REGULARISERS, best[1:], strict=True):
            found[name].append(t / best[0])
    print(f"\nregularisers, two layers of LSTM, {threads} thread(s); × without")
    for name, column in found.items():
        mean = math.exp(sum(map(math.log, column)) / len(column))
        asked = f"(to reach: {REGULARISERS[name][1]:.2f})"
        print(f"{name}: geometric mean {mean:.3f}, worst {max(column):.2f} {asked}", flush=True)
