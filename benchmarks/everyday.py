"""Training steps at everyday shapes, each a ratio to the same un-normalised torch layer.

Shapes nobody tuned on: B 1 to 256, T 10 to 200, H 32 to 600, odd sizes and both directions among
them. Contenders take turns, round after round, and the best round counts.
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
]

LAYERS: dict[str, tuple[Any, Any]] = {
    "LSTM": (nn.LSTM, normrnn.LSTM),
    "GRU": (nn.GRU, normrnn.GRU),
    "RNN": (nn.RNN, normrnn.RNN),
}
# cell -> contender -> geometric mean and worst that are to be reached on two threads
TARGETS: dict[str, dict[str, tuple[float, float | None]]] = {
    "LSTM": {
        "sequence": (0.90, 1.10),
        "frame": (0.95, 1.20),
        "None": (0.85, 1.02),
        "layer": (1.10, 1.50),
        "recurrent": (1.30, None),
        "whiten": (1.50, None),
    },
    "GRU": {"sequence": (0.85, 1.10)},
    "RNN": {"sequence": (0.85, 1.10)},
}
ONE_THREAD: dict[str, tuple[float, float | None]] = {"sequence": (0.88, 1.05)}
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


def step_of(layer: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], float]:
    parameters = list(layer.parameters())

    def step() -> float:
        for parameter in parameters:
            parameter.grad = None
        x.grad = None
        start = time.perf_counter()
        layer(x)[0].backward(gradient)
        return time.perf_counter() - start

    return step


def ratios(
    cell: str, shape: Everyday, norms: Sequence[str], input_gradient: bool, seconds: float
) -> tuple[float, dict[str, float]]:
    """Seconds of torch's layer, and each contender's over them."""
    plain, ours = LAYERS[cell]
    both = shape.directions == 2
    x = torch.randn(shape.T, shape.B, shape.I, requires_grad=input_gradient)
    gradient = torch.randn(shape.T, shape.B, shape.directions * shape.H)
    if shape.B == 1:  # a time step of one row has no statistics
        norms = [name for name in norms if name not in ("frame", "recurrent")]
    if shape.B * shape.T <= shape.I:
        norms = [name for name in norms if name != "whiten"]
    layers = [plain(shape.I, shape.H, bidirectional=both)]
    for name in norms:
        norm = None if name == "None" else name
        layers.append(ours(shape.I, shape.H, bidirectional=both, norm=norm))
    steps = [step_of(layer, x, gradient) for layer in layers]
    best = [min(step(), step()) for step in steps]
    for _ in range(max(6, min(60, int(seconds / sum(best))))):
        best = [min(old, step()) for old, step in zip(best, steps, strict=True)]
    return best[0], {name: t / best[0] for name, t in zip(norms, best[1:], strict=True)}


def report(
    cell: str, norms: Sequence[str], threads: int, input_gradient: bool, seconds: float
) -> None:
    """Prints a table, and geometric means and the worst beside what is to be reached."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    words = "with" if input_gradient else "without"
    print(f"\n{cell}, {threads} thread(s), {words} the input's gradient; × nn.{cell}")
    print("| shape | ms | " + " | ".join(norms) + " |\n|" + "---|" * (2 + len(norms)))
    rows = []
    for shape in SHAPES:
        base, row = ratios(cell, shape, norms, input_gradient, seconds)
        rows.append(row)
        cells = (f"{row[name]:.2f}" if name in row else "–" for name in norms)
        print(f"| {shape} | {1e3 * base:.2f} | " + " | ".join(cells) + " |")
    for name in norms:
        column = [row[name] for row in rows if name in row]
        mean = math.exp(sum(map(math.log, column)) / len(column))
        target = TARGETS.get(cell, {}).get(name)
        if threads == 1 and cell == "LSTM":
            target = ONE_THREAD.get(name, target)
        asked = "" if target is None else f" (to reach: {_shown(target)})"
        print(f"{name}: geometric mean {mean:.3f}, worst {max(column):.2f}{asked}", flush=True)


def _shown(target: tuple[float, float | None]) -> str:
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
