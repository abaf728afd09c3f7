"""The path of a call: files and Python calls of a training step, and the size of the core.

    python -m benchmarks.path [--functions] [--compare]

Counts ``sys.setprofile`` "call" events in files of normrnn, comprehensions and generators
included, for a two-layer bidirectional LSTM with norm="sequence" on a ragged batch. The lengths of
the counted batch were never seen before, as in training.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.utils.rnn import pack_padded_sequence

import normrnn

PACKAGE = Path(normrnn.__file__).parent
Calls = Counter[tuple[str, str]]


def count_calls(function: Callable[[], Any]) -> Calls:
    """Return the calls inside normrnn by (file, function)."""
    calls: Calls = Counter()
    prefix = str(PACKAGE)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            calls[code.co_filename.removeprefix(prefix + "/"), code.co_qualname] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def training_step() -> dict[str, Calls]:
    """Return the calls of the forward pass, on packed and on padded input, and of the backward
    pass."""
    torch.manual_seed(0)
    layer = normrnn.LSTM(20, 32, num_layers=2, bidirectional=True, norm="sequence")
    x = torch.randn(12, 6, 20)
    for lengths in ([12, 9, 9, 4, 2, 1], [12, 11, 7, 5, 5, 3]):  # compiles, fills caches
        layer(x, lengths=lengths)[0].sum().backward()
    packed, outputs = pack_padded_sequence(x, torch.tensor([12, 8, 6, 6, 3, 2])), []
    found = {
        "forward, packed": count_calls(lambda: outputs.append(layer(packed)[0].data)),
        "forward, lengths=": count_calls(lambda: layer(x, lengths=[12, 7, 6, 6, 3, 2])),
    }
    # The autograd engine runs CPU nodes in the calling thread, so that they are counted.
    return found | {"backward": count_calls(outputs[0].sum().backward)}


HOOK = """
import atexit, os, sys, threading

prefix, seen = os.environ["COUNTED"], set()

def profile(frame, event, _):
    code = frame.f_code  # bodies of classes and modules have no fast locals: flag 1
    if event == "call" and code.co_flags & 1 and code.co_name[0] != "<" and (
        code.co_filename.startswith(prefix)
    ):
        seen.add(code.co_filename.removeprefix(prefix + "/"))

def write():
    sys.setprofile(None)
    with open(os.path.join(os.path.dirname(__file__), "seen.txt"), "a") as file:
        file.writelines(name + "\\n" for name in seen)

sys.setprofile(profile)
threading.setprofile(profile)
atexit.register(write)
"""


def modules_of_a_comparison() -> list[str]:
    """Return the Python files outside `ops/` and `nn/` of which a function runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        (folder / "text.txt").write_text(
            "the cat sat on the mat and the dog sat on the log\n" * 400
        )
        settings = ["--data", str(folder / "text.txt"), "--epochs", "1", "--model.hidden", "8"]
        command = [
            "-m",
            "normrnn",
            "compare",
            "quickstart",
            *settings,
            "--out",
            str(folder / "out"),
        ]
        subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": name, "COUNTED": str(PACKAGE)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        found = set((folder / "seen.txt").read_text().split())
    return sorted(f for f in found if f.endswith(".py") and not f.startswith(("ops/", "nn/")))


def lines(*patterns: str) -> int:
    files = [path for pattern in patterns for path in PACKAGE.glob(pattern)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--functions", action="store_true", help="also list the functions")
    parser.add_argument("--compare", action="store_true", help="also count those of a comparison")
    arguments = parser.parse_args()
    for name, calls in training_step().items():
        files = {file for file, _ in calls}
        print(f"{name:18} {len(files):3} files {sum(calls.values()):5} Python calls")
        if arguments.functions:
            for (file, function), count in sorted(calls.items()):
                print(f"    {count:4} {file}: {function}")
    print(f"{lines('ops/**/*.py', 'nn/**/*.py'):5} lines of Python in ops/ and nn/")
    print(f"{lines('ops/native/*.[ch]'):5} lines of C")

    if arguments.compare:
        modules = modules_of_a_comparison()
        print(f"{len(modules):5} modules of a comparison outside ops/ and nn/")
        if arguments.functions:
            print("    " + "\n    ".join(modules))


if __name__ == "__main__":
    main()
