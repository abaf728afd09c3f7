"""Training steps of normrnn.LSTM beside torch.nn.LSTM: time, peak memory, GFLOP/s.

    python -m benchmarks.layers [--json FILE] [--only small,medium] [--rounds N] [--no-memory]
    python -m benchmarks.layers --everyday [--cells LSTM,GRU,RNN] [--norms sequence,frame,…]
    python -m benchmarks.layers --tiny [--cells …] [--norms …]
    python -m benchmarks.layers --regularisers

Every contender of a shape is timed in turn, round after round, in one process, and the best round
counts: the machines are shared, so only ratios taken that way mean anything. nn.LSTM on a
PackedSequence is timed once, without a warm-up: at T=800 it takes the better part of a minute. Peak
memory is the growth of a fresh process over its size before the first step.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import normrnn
from benchmarks import everyday
from benchmarks.machine import best_gemm, describe, peak_growth

Step = Callable[[], Any]
NORMS = "None,sequence,frame,layer,recurrent,whiten"


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    time: int
    input: int
    hidden: int
    bidirectional: bool
    ragged: bool
    rounds: int

    @property
    def lengths(self) -> list[int]:
        """Evenly spread from a quarter of T to T: 200 to 800 at the speech shape."""
        if not self.ragged:
            return [self.time] * self.batch
        low = self.time // 4
        return [low + (self.time - low) * k // (self.batch - 1) for k in range(self.batch)][::-1]

    @property
    def gflop(self) -> float:
        """Of the matrix products of a training step on the padded batch."""
        directions = 2 if self.bidirectional else 1
        per_row = 4 * self.hidden * (self.input + self.hidden)
        return 3 * 2 * self.time * self.batch * per_row * directions / 1e9


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("small", 32, 20, 200, 200, False, False, 60),
        Shape("medium", 32, 35, 650, 650, False, False, 12),
        Shape("large", 32, 35, 1500, 1500, False, False, 6),
        Shape("speech", 24, 800, 500, 250, True, False, 5),
        Shape("speech-ragged", 24, 800, 500, 250, True, True, 5),
        Shape("speech-packed", 24, 400, 500, 250, True, True, 1),
    )
}

# contender -> shape -> the ratio to nn.LSTM (dense, padded) that is to be reached
TARGETS: dict[str, dict[str, float]] = {
    "normrnn sequence": {
        "small": 0.95,
        "medium": 0.95,
        "large": 0.95,
        "speech": 0.95,
        "speech-ragged": 0.70,
        "speech-packed": 0.70,
    },
    "folded, inference": {"small": 1.0, "medium": 1.0, "large": 1.0, "speech": 1.0},
}
MEMORY_TARGETS = {"normrnn None": 1.0, "normrnn sequence": 1.0, "normrnn frame": 1.0}


class PythonLoop(nn.Module):
    """What people write: projection and BN once, outside, then a loop over time."""

    def __init__(self, input_size: int, hidden_size: int, bidirectional: bool):
        super().__init__()
        self.directions = nn.ModuleList()
        for _ in range(2 if bidirectional else 1):
            one = nn.ModuleDict(
                {
                    "x": nn.Linear(input_size, 4 * hidden_size, bias=False),
                    "h": nn.Linear(hidden_size, 4 * hidden_size, bias=False),
                    "bn": nn.BatchNorm1d(4 * hidden_size),
                }
            )
            self.directions.append(one)

    def forward(self, x: Tensor) -> Tensor:
        T, B, _ = x.shape
        outputs = []
        for k, one in enumerate(self.directions):
            assert isinstance(one, nn.ModuleDict)
            pre = one["bn"](one["x"](x).flatten(0, 1)).view(T, B, -1)
            weight = one["h"].weight
            assert isinstance(weight, Tensor)
            H = weight.shape[1]
            h = c = x.new_zeros(B, H)
            states = []
            for a in pre.flip(0).unbind(0) if k else pre.unbind(0):
                i, f, g, o = (a + h @ weight.t()).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                states.append(h)
            outputs.append(torch.stack(states[::-1] if k else states))
        return torch.cat(outputs, 2)


def training_step(run: Callable[[], Tensor], parameters: list[nn.Parameter]) -> Step:
    gradient: list[Tensor] = []

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        output = run()
        if not gradient:
            gradient.append(torch.randn_like(output))
        output.backward(gradient[0])

    return step


def contender(name: str, shape: Shape) -> Step:
    """A training step (or inference) of ``name`` on the same data and sizes."""
    torch.manual_seed(0)
    x = torch.randn(shape.time, shape.batch, shape.input, requires_grad=True)
    sizes = (shape.input, shape.hidden)
    packed = _packed(x.detach(), shape.lengths) if shape.ragged else None
    if name == "python loop":
        loop = PythonLoop(*sizes, shape.bidirectional)
        return training_step(lambda: loop(x), list(loop.parameters()))
    if name.endswith("inference"):
        return _inference(name, shape, x.detach())
    if name.startswith("nn.LSTM"):
        plain = nn.LSTM(*sizes, bidirectional=shape.bidirectional)
        if "packed" in name:
            return training_step(lambda: plain(packed)[0].data, list(plain.parameters()))
        return training_step(lambda: plain(x)[0], list(plain.parameters()))
    kind: Any = {"None": None}.get(norm := name.split()[1], norm)
    layer = normrnn.LSTM(*sizes, bidirectional=shape.bidirectional, norm=kind)
    if packed is None:
        return training_step(lambda: layer(x)[0], list(layer.parameters()))
    return training_step(lambda: layer(packed)[0].data, list(layer.parameters()))


def _packed(padded: Tensor, lengths: list[int]) -> PackedSequence:
    """Packed once, outside the timed step, with data that asks for its gradient."""
    packed = pack_padded_sequence(padded, torch.tensor(lengths))
    return PackedSequence(packed.data.requires_grad_(), packed.batch_sizes)


def _inference(name: str, shape: Shape, x: Tensor) -> Step:
    sizes, both = (shape.input, shape.hidden), shape.bidirectional
    layer = normrnn.LSTM(*sizes, bidirectional=both, norm="sequence").eval()
    model = normrnn.fold(normrnn.recalibrate(layer, [x]))
    plain = nn.LSTM(*sizes, bidirectional=both).eval() if name.startswith("nn") else model

    def step() -> None:
        with torch.inference_mode():
            plain(x)

    return step


def contenders(shape: Shape) -> list[str]:
    if shape.name == "speech-packed":
        return ["nn.LSTM", "nn.LSTM packed", "normrnn None", "normrnn sequence"]
    names = ["nn.LSTM", "normrnn None", "normrnn sequence", "normrnn frame", "normrnn layer"]
    if shape.ragged:
        return [*names, "nn.LSTM packed"]
    return [*names, "python loop", "nn.LSTM, inference", "folded, inference"]


def best_times(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """The best of interleaved rounds, seconds."""
    best = dict.fromkeys(steps, float("inf"))
    once = {"nn.LSTM packed"}
    for name, step in steps.items():
        if name not in once:
            step()
    for k in range(max(rounds, 1)):
        for name, step in steps.items():
            if k and name in once:
                continue
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def time_shape(shape: Shape, rounds: int | None) -> list[dict[str, Any]]:
    steps = {name: contender(name, shape) for name in contenders(shape)}
    seconds = best_times(steps, rounds or (3 if shape.name == "speech-packed" else shape.rounds))
    gemm = best_gemm(4 * shape.hidden, shape.input, shape.time * shape.batch)
    rows = []
    for name, value in seconds.items():
        inference = name.endswith("inference")
        base = seconds["nn.LSTM, inference" if inference else "nn.LSTM"]
        gflops = shape.gflop / (3 if inference else 1) / value
        rows.append(
            {
                "shape": shape.name,
                "contender": name,
                "ms": 1e3 * value,
                "ratio": value / base,
                "target": TARGETS.get(name, {}).get(shape.name),
                "gflops": gflops,
                "of_gemm": gflops / gemm,
                "faster_than_loop": seconds["python loop"] / value
                if "python loop" in seconds and not inference
                else None,
                "faster_than_packed": seconds["nn.LSTM packed"] / value
                if "nn.LSTM packed" in seconds
                else None,
            }
        )
    return rows


def add_memory(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        name, shape = row["contender"], row["shape"]
        if shape == "speech-packed" or name == "python loop" or name.endswith("inference"):
            continue
        command = [sys.executable, "-m", "benchmarks.layers", "--memory-of", shape, name]
        row["mib"] = float(subprocess.run(command, check=True, capture_output=True).stdout)
    base = {row["shape"]: row.get("mib") for row in rows if row["contender"] == "nn.LSTM"}
    for row in rows:
        if row.get("mib") and base[row["shape"]]:
            row["memory_ratio"] = row["mib"] / base[row["shape"]]
            row["memory_target"] = MEMORY_TARGETS.get(row["contender"])


def verdict(value: float | None, target: float | None) -> str:
    if value is None:
        return ""
    if target is None:
        return f"{value:.2f}"
    return f"{value:.2f} ({'≤' if value <= target + 0.005 else 'misses'} {target:.2f})"


def table(rows: list[dict[str, Any]]) -> str:
    head = ["shape", "contender", "ms", "× nn.LSTM", "MiB", "memory ×", "GFLOP/s", "of GEMM"]
    lines = [[*head, "× loop", "× packed"]]
    for row in rows:
        mib, loop, packed = row.get("mib"), row["faster_than_loop"], row["faster_than_packed"]
        lines.append(
            [
                row["shape"],
                row["contender"],
                f"{row['ms']:.1f}",
                verdict(row["ratio"], row["target"]),
                "" if mib is None else f"{mib:.0f}",
                verdict(row.get("memory_ratio"), row.get("memory_target")),
                f"{row['gflops']:.0f}",
                f"{100 * row['of_gemm']:.0f} %",
                "" if loop is None else f"{loop:.2f}",
                "" if packed is None else f"{packed:.1f}",
            ]
        )
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [lines[0], ["---"] * 10, *lines[1:]]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--only", help="shapes, separated by commas", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, help="instead of each shape's own number")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--everyday", action="store_true", help="many shapes, all cells")
    parser.add_argument("--tiny", action="store_true", help="B 1 to 4, T 1 to 10, H 16 to 64")
    parser.add_argument("--cells", default=",".join(everyday.LAYERS), help="of --everyday")
    parser.add_argument("--norms", default=NORMS, help="of --everyday")
    parser.add_argument("--regularisers", action="store_true", help="those of --everyday alone")
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape of --everyday")
    args = parser.parse_args()
    if args.regularisers:
        print(describe())
        everyday.regularisers(args.threads, args.seconds)
        return
    if args.tiny:
        print(describe())
        for threads in sorted({args.threads, 1}, reverse=True):
            for trains, wanted in ((False, False), (True, False), (True, True)):
                for cell in args.cells.split(","):
                    everyday.report(
                        cell,
                        args.norms.split(","),
                        threads,
                        args.seconds,
                        input_gradient=wanted,
                        trains=trains,
                        tiny=True,
                    )
        return
    if args.everyday:
        print(describe())
        for cell in args.cells.split(","):
            for threads in sorted({args.threads, 1}, reverse=True):
                for wanted in (False, True):
                    norms = args.norms.split(",")
                    everyday.report(cell, norms, threads, args.seconds, input_gradient=wanted)
        if "layer" in args.norms and "LSTM" in args.cells:
            everyday.against_torchscript(args.threads, args.seconds)
        if "LSTM" in args.cells:
            everyday.regularisers(args.threads, args.seconds)
        return
    torch.set_num_threads(args.threads)
    if args.memory_of:
        shape, name = args.memory_of
        print(peak_growth(contender(name, SHAPES[shape])))
        return
    unknown = set(args.only.split(",")) - set(SHAPES)
    if unknown:
        parser.error(f"unknown shapes {', '.join(unknown)}: choose from {', '.join(SHAPES)}")
    rows: list[dict[str, Any]] = []
    for shape in args.only.split(","):
        rows += time_shape(SHAPES[shape], args.rounds)
    if not args.no_memory:
        add_memory(rows)
    print(describe())
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
