"""Trained networks at work: folded, streaming, sampling, exported.

    python -m benchmarks.inference [--threads 2] [--seconds 3] [--models small,medium,large]

Contenders take turns, round after round, in one process; the best of each counts. Networks are of
the Penn Treebank's sizes (10,000 words) with random weights: what they compute does not change how
long it takes.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normrnn
from benchmarks.machine import describe, peak_growth
from normrnn.text.task import LanguageModel, Reader

WORDS = 10_000
SIZES = {"small": 200, "medium": 650, "large": 1500}
FORMATS = {"onnx": "onnx", "torch": "pt", "safetensors": "safetensors", "program": "pt2"}
SHAPES = {"B32 T20 H200": (20, 32, 200, 200), "B32 T35 H650": (35, 32, 650, 650)}


def best(contenders: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Seconds of the best round of each."""
    for step in contenders.values():
        step()
    found = dict.fromkeys(contenders, float("inf"))
    end, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or rounds < 5:
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            found[name] = min(found[name], time.perf_counter() - start)
        rounds += 1
    return found


@torch.no_grad()
def folded(seconds: float) -> None:
    """Eval passes of our layer, of its folded copy and of torch's."""
    print("\n| whole batches, eval | nn.LSTM ms | folded | not folded |\n|---|---|---|---|")
    for name, (T, B, I, H) in SHAPES.items():  # noqa: E741
        x = torch.randn(T, B, I)
        ours = normrnn.LSTM(I, H, 2, norm="sequence")
        ours(x)
        ours.eval()
        layers = {"torch": nn.LSTM(I, H, 2), "folded": normrnn.fold(ours, plain=True), "ours": ours}
        times = best({n: lambda layer=layer, x=x: layer(x) for n, layer in layers.items()}, seconds)
        ratios = " | ".join(f"{times[n] / times['torch']:.2f}" for n in ("folded", "ours"))
        print(f"| {name} | {1e3 * times['torch']:.2f} | {ratios} |", flush=True)


def network(hidden: int) -> LanguageModel:
    model = LanguageModel(WORDS, hidden, 2, norm="frame", init=0.05)
    model(torch.randint(0, WORDS, (4, 4)))  # statistics of something
    return model.eval()


def by_hand(model: LanguageModel) -> Callable[[], Tensor]:
    """A token at a time through torch's layer, as one would write it."""
    plain: Any = normrnn.fold(model, plain=True)
    token, state = torch.zeros(1, 1, dtype=torch.long), None

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal state
        output, state = plain.rnn(plain.embedding(token), state)
        return plain.decoder(output)

    return step


def by_onnxruntime(file: Path, hidden: int, threads: int) -> Callable[[], Any]:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    state = [np.zeros((2, 1, hidden), np.float32)] * 2
    token = np.zeros((1, 1), np.int64)

    def step() -> Any:
        nonlocal state
        logits, *state = session.run(None, {"tokens": token, "h0": state[0], "c0": state[1]})
        return logits

    return step


def streaming(name: str, threads: int, seconds: float) -> None:
    """One token after another."""
    hidden = SIZES[name]
    model = network(hidden)
    stream, count = normrnn.Stream(model), 20
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        file = normrnn.export(model, Path(folder) / "m.onnx", "onnx")
        small = normrnn.export(model, Path(folder) / "s.onnx", "onnx", quantize="int8")
        contenders = {
            "hand": by_hand(model),
            "Stream": lambda: stream.push(0),
            "onnxruntime": by_onnxruntime(file, hidden, threads),
            "int8": by_onnxruntime(small, hidden, threads),
        }
        times = best(contenders, seconds)
    # Weights are folded when sampling begins: the difference of two lengths leaves that out.
    lengths = {n: lambda n=n: Reader(model).draw([1], n, generator) for n in (1, 1 + count)}
    drawn = best({str(n): step for n, step in lengths.items()}, seconds)
    times["sample"] = (drawn[str(1 + count)] - drawn["1"]) / count
    cells = " | ".join(f"{times[n] / times['hand']:.2f}" for n in times if n != "hand")
    rate = times["hand"] / times["sample"]
    print(f"| {name} | {1e3 * times['hand']:.2f} | {cells} | {rate:.2f} |", flush=True)


def exports(name: str) -> None:
    """Seconds and memory of writing a network."""
    model = network(SIZES[name])
    size = sum(p.numel() * 4 for p in model.parameters()) / 2**20
    with tempfile.TemporaryDirectory() as folder:
        for form, suffix in FORMATS.items():
            start = time.perf_counter()
            file = Path(folder) / f"m.{suffix}"
            grown = peak_growth(lambda: normrnn.export(model, file, form), times=1)  # noqa: B023
            seconds = time.perf_counter() - start
            print(
                f"| {name} {form} | {size:,.0f} | {seconds:.1f} | {grown / size:.2f} |", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="per row")
    parser.add_argument("--models", default=",".join(SIZES))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(describe())
    folded(given.seconds)
    print(
        "\n| one token | by hand, nn.LSTM, ms | Stream | onnxruntime | int8 | sample | its rate |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in given.models.split(","):
        streaming(name, given.threads, given.seconds)
    print("to reach: Stream at most 1.00, sample's rate at least 0.90 of the hand-written one's")
    print(
        "\n| export | weights, MiB | s | memory beside the model, × its size |\n|---|---|---|---|"
    )
    exports(given.models.split(",")[-1])
    print("to reach, large: 60 s, 2 × its size")


if __name__ == "__main__":
    main()
