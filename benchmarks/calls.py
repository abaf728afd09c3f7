"""Time training with resets against without, and eval calls against torch.nn.LSTM.

    python -m benchmarks.calls [--share 0.03] [--seconds 1.0] [--only resets,eval]

Contenders of a shape take turns, round after round, and the best round counts. Resets fall on
3 % of the frames. Eval mode is timed twice: the layer itself, which reads test statistics as it
goes, and the layer folded once (``layer.fold()``), both over un-normalised torch.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import normrnn
from benchmarks.everyday import SHAPES, Everyday, step_of
from benchmarks.machine import describe

LIMIT = 1.05


class WithResets(nn.Module):
    """A layer that is given the same resets, and a state to start from, at every call."""

    def __init__(self, layer: nn.Module, resets: torch.Tensor, to: Any = None):
        super().__init__()
        self.layer, self.resets, self.to = layer, resets, to

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x, resets=self.resets, reset_to=self.to)


def best(steps: Sequence[Callable[[], float]], seconds: float) -> list[float]:
    times = [min(step(), step()) for step in steps]
    for _ in range(max(8, min(100, int(seconds / sum(times))))):
        times = [min(old, step()) for old, step in zip(times, steps, strict=True)]
    return times


def with_resets(shape: Everyday, norm: Any, share: float, seconds: float) -> tuple[float, float]:
    """A training step with resets over the same without, and from a state over from zeros."""
    x = torch.randn(shape.T, shape.B, shape.I)
    gradient = torch.randn(shape.T, shape.B, shape.directions * shape.H)
    layer = normrnn.LSTM(shape.I, shape.H, bidirectional=shape.directions == 2, norm=norm)
    resets = torch.rand(shape.T, shape.B) < share
    start = torch.zeros(shape.directions, 1, shape.H, requires_grad=True)
    cutting = WithResets(layer, resets), WithResets(layer, resets, (start, start))
    without, cut, to = best([step_of(m, x, gradient) for m in (layer, *cutting)], seconds)
    return cut / without, to / cut


def call_of(layer: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    def call() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            layer(x)
        return time.perf_counter() - start

    return call


def in_eval(shape: Everyday, norm: Any, seconds: float) -> list[float]:
    """An eval call, and one of the layer folded once, over torch's."""
    sizes, both = (shape.I, shape.H), shape.directions == 2
    x = torch.randn(shape.T, shape.B, shape.I)
    layer = normrnn.LSTM(*sizes, bidirectional=both, norm=norm)
    normrnn.recalibrate(layer, [x])
    layers = [nn.LSTM(*sizes, bidirectional=both), layer.eval(), layer.fold()]
    base, *ours = best([call_of(one.eval(), x) for one in layers], seconds)
    return [t / base for t in ours]


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def report(norms: Sequence[str], rows: list[list[float]], words: str, limit: float | None) -> None:
    for k, norm in enumerate(norms):
        column = [row[k] for row in rows]
        asked = "" if limit is None else f" (to reach: {limit:.2f})"
        print(f"{norm}, {words}: geometric mean {mean(column):.3f}, worst {max(column):.2f}{asked}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--share", type=float, default=0.03, help="of frames with a reset")
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape and contender")
    parser.add_argument("--only", default="resets,eval")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(describe())
    if "resets" in args.only:
        norms = ["None", "sequence", "frame", "layer"]
        words = f"at {args.share:.0%} of frames, × without; from a state, × from zeros"
        print(f"\nA training step with resets {words}")
        print("| shape | " + " | ".join(norms) + " |\n|" + "---|" * (1 + len(norms)))
        rows, states = [], []
        for shape in SHAPES:
            kinds = [None if n == "None" else n for n in norms]
            if shape.B == 1:  # a time step of one row has no statistics
                continue
            pairs = [with_resets(shape, n, args.share, args.seconds) for n in kinds]
            rows.append([cut for cut, _ in pairs])
            states.append([to for _, to in pairs])
            cells = (f"{cut:.2f}, {to:.2f}" for cut, to in pairs)
            print(f"| {shape} | " + " | ".join(cells) + " |", flush=True)
        report(norms, rows, "with resets", LIMIT)
        report(norms, states, "from a state", LIMIT)
    if "eval" in args.only:
        print("\nAn eval call, × nn.LSTM: as it is, and folded once")
        norms = ["sequence", "frame", "hidden"]
        print("| shape | " + " | ".join(norms) + " |\n|" + "---|" * (1 + len(norms)))
        rows, folded = [], []
        for shape in SHAPES:
            pairs = [in_eval(shape, norm, args.seconds) for norm in norms]
            rows.append([own for own, _ in pairs])
            folded.append([once for _, once in pairs])
            cells = (f"{own:.2f}, {once:.2f}" for own, once in pairs)
            print(f"| {shape} | " + " | ".join(cells) + " |", flush=True)
        report(norms, rows, "as it is", None)
        report(norms, folded, "folded once", None)


if __name__ == "__main__":
    main()
