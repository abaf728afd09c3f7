"""Training killed at random moments, again and again: does it end as if nothing had happened?

    python -m benchmarks.faults --kills 1000 [--seed 1]

Short runs on made-up text and speech, with and without tensorboard, are sent SIGKILL, SIGTERM or
SIGINT at random moments and started again until they finish. After every kill the directory must
read as a good one, its rows a beginning of the undisturbed run's; at the end rows, checkpoint and
weights must be bit-equal to the undisturbed run's, and tensorboard must read every row once. Most
processes are forked from one that has torch loaded, so that most of their lives is training; one
in twenty is the real command. Exits with 1 on any failure.
"""

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from normrnn.cli import _run, guarded
from normrnn.ops.native import library
from normrnn.reporting.runs import examine
from tests.tiny_runs import rows_of, write_texts
from tests.tiny_speech import write_speech

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
LOADING = 3.0
"""Seconds that a new process may take until it trains."""
REAL = 20
"""One in so many is a new process."""
WARM = (
    "torch._dynamo", "torch.utils.tensorboard", "normrnn.commands.train", "normrnn.engine.start",
    "normrnn.engine.callbacks", "normrnn.recipes", "normrnn.text.task",
    "normrnn.speech.task",
)  # fmt: skip
# Ended by the signal itself, or politely, or finished before the signal came.
CODES = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130, 0}
FLAGS = {
    "text": "ptb-small --norm frame --epochs 3 --model.hidden 12 --model.dropout 0.25"
    " --train.batch 8 --train.steps 5 --train.segments 2 --train.log-every 7"
    " --train.checkpoint-every 10"
    " --evaluation.train-tokens 300 --evaluation.recalibrate-windows 6 --threads 1",
    "speech": "librispeech-mini --norm sequence --epochs 6 --model.hidden 8 --model.layers 2"
    " --train.batch 4 --train.segments 2 --train.log-every 2"
    " --train.checkpoint-every 3 --train.piece-frames 15"
    " --train.pool 2 --evaluation.train-utterances 3 --threads 1",
}


@dataclass
class Soak:
    """What happened so far."""

    where: Path
    draw: random.Random
    kills: Counter = field(default_factory=Counter)
    finished: int = 0
    boards: int = 0
    started: int = 0
    real: int = 0
    failures: list[str] = field(default_factory=list)

    def check(self, good: bool, what: str) -> None:
        """Note a failure."""
        if not good:
            self.failures.append(what)
            print(f"FAILED: {what}", flush=True)


def warm_up() -> None:
    """What every run imports, once: torch's optimisers need all of its compiler."""
    for name in WARM:
        importlib.import_module(name)
    torch.set_num_threads(1)
    library.library()


def arguments(kind: str, where: Path, out: Path, tensorboard: bool) -> list[str]:
    """The command that trains, or goes on."""
    flags = FLAGS[kind].split()
    board = ["--tensorboard"] if tensorboard else []
    return ["train", *flags, "--data", str(where / kind), "--out", str(out), *board]


def started(command: list[str], log: Path, real: bool = False) -> int:
    """The process id of the command, started now; what it says goes to `log`."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 130
    try:  # a signal may come at once: whatever happens, the child ends here
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
        if real:
            os.execv(sys.executable, [sys.executable, "-m", "normrnn.cli", *command])
        code = guarded(_run, command)
        sys.stdout.flush()
    finally:
        os._exit(code)


def spoken(process: int, log: Path, before: int) -> None:
    """Wait until a new process has said its first word: before that it is Python's alone."""
    over = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while size(log) == before and os.waitid(os.P_PID, process, over) is None:
        time.sleep(0.01)


def size(log: Path) -> int:
    """Bytes so far; whoever was started a moment ago may not have made it yet."""
    return log.stat().st_size if log.exists() else 0


def ended(process: int) -> int:
    """Its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def same(a: Any, b: Any) -> bool:
    """Bit-equal, whatever is nested in what; aside from the time that a run took and its id."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        keys = a.keys() - {"seconds", "metrics_sha256", "metrics_bytes", "run", "model_sha256"}
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in keys)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def compare(soak: Soak, kind: str, out: Path) -> None:
    """A finished run with the undisturbed one."""
    whole = soak.where / f"whole-{kind}"
    soak.check(rows_of(out) == rows_of(whole), f"{out}: other rows at the end")
    pair = [torch.load(run / "checkpoint.pt", weights_only=True) for run in (whole, out)]
    soak.check(same(*pair), f"{out}: another checkpoint at the end")
    for file in sorted(whole.glob("*.safetensors")):
        there = (out / file.name).exists()
        equal = there and same(load_file(file), load_file(out / file.name))
        soak.check(equal, f"{out}: another {file.name} at the end")
    if (out / "tensorboard").exists():
        soak.check(_on_board(out) == _in_rows(out), f"{out}: tensorboard has other rows")
        soak.boards += 1
    left = [path.name for path in out.glob(".*.tmp")]
    soak.check(not left, f"{out}: leftovers {left}")
    soak.finished += 1


def _on_board(out: Path) -> Counter:
    """Update and loss of every row, as tensorboard reads them."""
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("loss/")]
    return Counter((e.step, e.value) for tag in tags for e in events.Scalars(tag))


def _in_rows(out: Path) -> Counter:
    return Counter((row["updates"], float(np.float32(row["loss"]))) for row in rows_of(out))


def torment(soak: Soak, kind: str, tensorboard: bool, number: int, kills: int, span: float) -> None:
    """One run, killed until it finishes or there have been enough kills."""
    out, log = soak.where / f"run-{number}", soak.where / f"log-{number}"
    rows = rows_of(soak.where / f"whole-{kind}")
    command = arguments(kind, soak.where, out, tensorboard)
    while soak.kills.total() < kills:
        soak.started += 1
        real = soak.started % REAL == 0
        said = size(log)
        process = started(command, log, real)
        if real:
            spoken(process, log, said)
        time.sleep(soak.draw.uniform(0.0, span + real * LOADING))
        which = soak.draw.choice(SIGNALS)
        os.kill(process, which)
        code = ended(process)
        text = log.read_text(errors="replace") if log.exists() else ""
        soak.check(
            "Traceback" not in text and "unexpected error" not in text, f"{log}: a stack trace"
        )
        soak.check("damaged" not in text, f"{log}: a kill made something look damaged")
        soak.check(code in CODES, f"{out}: exit code {code} after {which.name}, see {log}")
        if code == 0:
            break
        soak.kills[which.name] += 1
        soak.real += real
        if (out / "config.json").exists():
            found = examine(out)
            soak.check(not found.problem, f"{out}: {found.problem}")
            kept = found.run.rows if found.run else []
            kept = [{k: v for k, v in row.items() if k != "seconds"} for row in kept]
            soak.check(kept == rows[: len(kept)], f"{out}: rows lost, repeated or torn")
        if soak.failures:
            return
    else:
        code = ended(started(command, log))
        soak.check(code == 0, f"{out}: exit code {code} at the end, see {log}")
    compare(soak, kind, out)
    if not soak.failures:
        shutil.rmtree(out)
        log.unlink()


def main() -> None:
    """Kill and compare."""
    parser = argparse.ArgumentParser(description="Runs killed at random must end as undisturbed.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    where = Path(tempfile.mkdtemp(prefix="normrnn-faults-"))
    (where / "text").mkdir()
    write_texts(where / "text")
    write_speech(where / "speech")
    warm_up()
    spans = {}
    for kind in ("text", "speech"):
        begin = time.monotonic()
        process = started(arguments(kind, where, where / f"whole-{kind}", False), where / "log")
        assert ended(process) == 0, (where / "log").read_text()
        spans[kind] = time.monotonic() - begin
    soak, begin, number = Soak(where, random.Random(options.seed)), time.monotonic(), 0
    while soak.kills.total() < options.kills and not soak.failures:
        kind, board = ("text", "speech")[number % 2], number % 4 >= 2
        torment(soak, kind, board, number, options.kills, spans[kind])
        number += 1
    kills = ", ".join(f"{n} {name}" for name, n in sorted(soak.kills.items()))
    print(
        f"{soak.kills.total()} kills ({kills}; {soak.real} of new processes) over {soak.finished}"
        f" runs of text and speech, {soak.boards} with tensorboard, in"
        f" {time.monotonic() - begin:.0f} s, seed {options.seed}: {len(soak.failures)} failures"
    )
    if soak.failures:
        sys.exit(f"the directories are kept in {where}")
    shutil.rmtree(where)


if __name__ == "__main__":
    main()
