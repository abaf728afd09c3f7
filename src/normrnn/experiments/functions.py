"""A training function of a user's own, compared: in this process or in several.

Every call of the function is a run directory, OUT/NORM-SEED: `config.json` with what it was called
with, and `metrics.jsonl` with what it logged. `normrnn report OUT` and `normrnn verdict OUT` read
them as they read other runs.
"""

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from normrnn.config.jsonio import differences
from normrnn.config.registry import KIND, import_path
from normrnn.console import PlainConsole
from normrnn.errors import UsageError, UserError
from normrnn.experiments.jobs import Job, Progress, run_jobs, start_worker
from normrnn.files import exclusive, read_json, write_whole
from normrnn.norms import BASELINE, layer_argument
from normrnn.runs.records import CONFIG, DIVERGED, LOCK, METRICS, MetricsFile, Row

TrainFunction = Callable[..., Any]


class RunLog:
    """What a training function calls: `log(step=, train=, valid=, test=)`, with numbers."""

    def __init__(self, directory: Path, higher_is_better: bool) -> None:
        self.directory, self.sign = directory, -1.0 if higher_is_better else 1.0
        self.calls, self._last, self._started = 0, 0, time.monotonic()
        self.file = MetricsFile(directory / METRICS)
        self.file.truncate()

    def __call__(
        self,
        step: int,
        *,
        train: Any = None,
        valid: Any = None,
        test: Any = None,
        lr: float | None = None,
        **unknown: Any,
    ) -> None:
        """Record values of a step; steps must not decrease. A validation or test value that is not
        finite, and not followed by one that is, marks the run as diverged."""
        for name in unknown:
            raise UsageError(f"log has no {name!r}: it takes step, train, valid, test and lr")
        if step < self._last or step != int(step):
            raise ValueError(
                f"steps are whole numbers that do not decrease: {step} after {self._last}"
            )
        self.calls, self._last = self.calls + 1, int(step)
        seconds = time.monotonic() - self._started
        for split, given in {"train": train, "valid": valid, "test": test}.items():
            if given is None:
                continue
            value = float(given.detach() if hasattr(given, "detach") else given)
            is_finite, diverged = abs(value) < 1e300, self.directory / DIVERGED
            if split != "train" and is_finite:
                diverged.unlink(missing_ok=True)
            elif split != "train":
                write_whole(diverged, f"{split} is {value} at step {step}\n".encode())
            if not is_finite:
                continue
            row = {"updates": self._last, "epoch": self.calls, "split": split}
            row |= {} if split == "train" else {"statistics": "running"}
            row |= {"loss": self.sign * value, "value": value, "count": 1, "seconds": seconds}
            self.file.append(row if lr is None else {**row, "lr": float(lr)})


@dataclass
class FunctionJob(Job):
    """One call of a training function."""

    call: Mapping[str, Any]
    """Its import path, or its name where it has none, as `recipe`; and `norm`, `seed`,
    `higher_is_better` and `settings`."""

    @property
    def config(self) -> dict[str, Any]:
        """Return config.json, without what a run gets at its end: the number of calls of `log`
        and the hash of the rows."""
        return {**self.call, "kind": KIND, "settings": _plain(self.call["settings"])}

    def look(self) -> None:
        """Mark a run that has ended; UsageError if another run is in its directory."""
        if not (self.out / CONFIG).exists():
            return
        found, _ = read_json(self.out / CONFIG)
        epochs, _ = found.pop("epochs", 0), found.pop("metrics_sha256", "")
        if changed := ", ".join(differences(found, self.config).values()):
            raise UsageError(
                f"{self.out} holds a run with other settings ({changed}): use another --out"
            )
        if epochs:
            self.ended = 0

    def start(self) -> None:
        """Call the function in a process of its own."""
        try:
            self.child = start_worker({"call": self.call}, self.out)
        except (TypeError, ValueError) as error:
            raise UsageError(f"settings for workers must be plain values: {error}") from None

    def describe(self, row: Row) -> str:
        """Return a row of its metrics as text."""
        return f"step {row['updates']}  {row['split']} {row['value']:.5g}"

    def run(self, train: TrainFunction) -> None:
        """Call the function in this process and store what it logs."""
        from normrnn.runs.store import BusyError

        self.out.mkdir(parents=True, exist_ok=True)
        busy = BusyError(f"another process is training in {self.out}")
        with exclusive(self.out / LOCK, busy):
            self.look()
            if self.ended is not None:  # by another process, just now
                return
            (self.out / DIVERGED).unlink(missing_ok=True)
            self._write_config(0, "")
            call, log = self.call, RunLog(self.out, self.call["higher_is_better"])
            train(layer_argument(call["norm"]), call["seed"], log, **call["settings"])
            if not log.calls:
                raise UserError(f"{call['recipe']} returned without calling log(step=…)")
            self._write_config(log.calls, log.file.sha256)
        self.ended = 0

    def _write_config(self, epochs: int, sha256: str) -> None:
        config = {**self.config, "epochs": epochs, "metrics_sha256": sha256}
        write_whole(self.out / CONFIG, json.dumps(config).encode())


def _plain(value: Any) -> Any:
    """Return a value for JSON: arrays and tensors as their hash, other objects as their type."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "__array__"):
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        about = f"{array.dtype} {array.shape} ".encode()
        return hashlib.sha256(about + array.tobytes()).hexdigest()
    return f"{type(value).__module__}.{type(value).__qualname__}"


def run_functions(
    train: TrainFunction,
    norms: str | Sequence[str | None],
    seeds: int,
    out: Path,
    workers: int | None,
    higher_is_better: bool,
    settings: Mapping[str, Any],
) -> tuple[str, list[Path]]:
    """Call the function with every norm and seed; return its name and the run directories."""
    several = [n.strip() for n in norms.split(",")] if isinstance(norms, str) else norms
    names = list(dict.fromkeys(BASELINE if n in (None, "None", "") else n for n in several))
    if not names:
        raise UsageError("norms needs at least one value")
    settings = dict(settings)
    first = settings.pop("seed", 1)
    if type(first) is not int:
        raise UsageError(f"seed must be a whole number, not {first!r}")
    try:
        inspect.signature(train).bind(None, 1, None, **settings)
    except TypeError as error:
        raise UsageError(f"cannot call {train!r} as train(norm, seed, log): {error}") from None
    name = f"{train.__module__}:{getattr(train, '__qualname__', type(train).__name__)}"
    shared = {"recipe": name if workers is None else import_path(train), "settings": settings}
    shared["higher_is_better"] = higher_is_better
    jobs = [
        FunctionJob(
            out / f"{quote(norm, safe='')}-{seed}",
            {**shared, "norm": norm, "seed": seed},
            label=f"{norm}, seed {seed}",
        )
        for seed in range(first, first + seeds)
        for norm in names
    ]
    for job in jobs:
        job.look()
    if workers is not None:
        run_jobs(jobs, workers, PlainConsole(), interval=0.1)
    else:
        progress = Progress(jobs, PlainConsole())
        for job in jobs:
            if job.code is None:
                job.run(train)
                progress.show()
    return shared["recipe"], [job.out for job in jobs]
