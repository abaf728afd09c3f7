"""How the `wsj` recipe would scale: an estimate from what one machine can measure.

    python -m benchmarks.scaling [--gigabits 10] [--microseconds 50]

Measured: the time of an update of one process with one thread on so many utterances of 200 to 800
frames (the paper's network, sequence-wise), the bytes of its gradients, the number and bytes of
its pooled statistics, and all-reduces of both sizes between two processes over the loopback.
Assumed: the network between machines, its bandwidth and latency, and a process per core, which
has a core's share of its machine's network of `--cores` cores.

The estimate hides nothing behind the backward pass: an update takes its own time, a ring of
gradients, 2 (K − 1)/K of the bytes and 2 (K − 1) messages one after the other, and for every
statistic 2 log2 K messages.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import speech_training
from benchmarks.machine import describe
from normrnn.nn import Normaliser
from normrnn.recipes.speech import wsj
from normrnn.speech.task import SpeechTask

BATCH = 24
SHARES = (24, 12, 6, 3, 1)
COLLECTIVES = 3
"""Of a normaliser: sums and squares on the way there, both together on the way back."""


def seconds(step: Callable[[], Any], times: int = 3) -> float:
    """Of the fastest, after one that does not count."""
    step()
    best = math.inf
    for _ in range(times):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return best


def update_seconds(utterances: int) -> float:
    """Of an update by the real trainer, on utterances of all lengths."""
    with tempfile.TemporaryDirectory() as where:
        config, split = speech_training.made(utterances, 200, 800, Path(where))
        config = replace(config, norm="sequence")
        return seconds(speech_training.engine(config, split, Path(where)), 2)


def _reduce(rank: int, store: str, sizes: list[int], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = []
    for size in sizes:
        values = torch.zeros(size // 4)
        found.append(seconds(lambda values=values: dist.all_reduce(values), 20))
    if not rank:
        results.put(found)
    dist.destroy_process_group()


def loopback(sizes: list[int]) -> list[float]:
    """Seconds of an all-reduce of so many bytes between two processes here."""
    spawn = get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as where:
        given = f"{where}/store", sizes, results
        ranks = [spawn.Process(target=_reduce, args=(rank, *given)) for rank in range(2)]
        for process in ranks:
            process.start()
        found = results.get()
        for process in ranks:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How wsj would scale to many processes.")
    parser.add_argument("--gigabits", type=float, default=10.0, help="between machines")
    parser.add_argument("--microseconds", type=float, default=50.0, help="latency of a message")
    parser.add_argument("--cores", type=int, default=8, help="of a machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = SpeechTask.network(wsj(), dim=speech_training.DIM, classes=speech_training.CLASSES)
    gradients = 4 * sum(p.numel() for p in model.parameters())
    config = replace(wsj(), norm="sequence")
    normed = SpeechTask.network(config, dim=speech_training.DIM, classes=speech_training.CLASSES)
    channels = [m.channels for m in normed.modules() if isinstance(m, Normaliser)]
    statistics = 4 * sum(channels)
    messages = COLLECTIVES * len(channels)
    print(describe())
    large, small = loopback([gradients, 4 * max(channels)])
    print(
        f"gradients {gradients / 1e6:.1f} MB, {large * 1e3:.1f} ms over the loopback of two;"
        f" statistics {messages} times, {COLLECTIVES * statistics / 1e3:.0f} kB together,"
        f" {small * 1e3:.2f} ms each"
    )
    alone = {share: update_seconds(share) for share in SHARES}
    parts = ", ".join(f"{share}: {alone[share]:.2f} s" for share in SHARES)
    print(f"an update of one process with one thread, by utterances: {parts}")
    rate = options.gigabits * 1e9 / 8 / options.cores
    wait = options.microseconds / 1e6

    def together(processes: int) -> float:
        ring = 2 * (processes - 1) / processes * gradients / rate + 2 * (processes - 1) * wait
        return ring + messages * 2 * math.log2(processes) * wait

    for processes in (8, 64, 512):
        extra = together(processes)
        own = f"{processes:>3} processes: {extra * 1e3:,.0f} ms to agree"
        fixed = "more processes than utterances"
        if processes <= BATCH:
            share = BATCH // processes
            gain = alone[BATCH] / (alone[share] + extra)
            fixed = f"{alone[share] + extra:.2f} s an update, {gain:.1f} x one process"
        growing = alone[BATCH] / (alone[BATCH] + extra)
        print(
            f"{own}; batch {BATCH}: {fixed}; batch {BATCH * processes:,}: {growing:.0%} of"
            f" {processes} x the frames per second",
            flush=True,
        )


if __name__ == "__main__":
    main()
