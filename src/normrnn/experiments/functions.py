"""A training function of a user's own, compared: in this process or in several.

Every call of the function is a run directory, OUT/NORM-SEED: `config.json` with what it was called
with, `metrics.jsonl` with what it logged, and a checkpoint that is only its note: whether the call
ended, and the hash of the rows. `normrnn report OUT` and `normrnn verdict OUT` read them like other
runs.
"""

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

import numpy as np

from normrnn.config.jsonio import differences
from normrnn.config.registry import KIND, import_path
from normrnn.errors import UsageError, UserError, notice
from normrnn.experiments.jobs import Job, Progress, run_jobs
from normrnn.files import read_json, write_whole
from normrnn.norms import BASELINE
from normrnn.runs import records
from normrnn.runs.records import CONFIG, METRICS

LONGEST = 100  # characters of a list, as JSON; of a longer one the hash is recorded


class RunLog:
    """What a training function calls: `log(step=, train=, valid=, test=)`, with numbers."""

    def __init__(self, directory: Path, higher_is_better: bool) -> None:
        self.directory, self.sign = directory, -1.0 if higher_is_better else 1.0
        self.calls, self.last_step, self._started = 0, 0, time.monotonic()
        self._not_finite: dict[str, str] = {}
        (directory / records.DIVERGED).unlink(missing_ok=True)
        write_whole(directory / METRICS, b"")
        self.file = records.MetricsFile(directory / METRICS)

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
        if step < self.last_step or step != int(step):
            raise ValueError(
                f"steps are whole numbers that do not decrease: {step} after {self.last_step}"
            )
        if lr is not None and not abs(lr := float(lr)) < records.LARGEST:
            raise UsageError(f"lr must be a finite number, not {lr}")
        self.calls, self.last_step = self.calls + 1, int(step)
        seconds = time.monotonic() - self._started
        for split, given in {"train": train, "valid": valid, "test": test}.items():
            if given is None:
                continue
            value = float(given.detach() if hasattr(given, "detach") else given)
            self._not_finite.pop(split, None)
            if not abs(value) < records.LARGEST:
                self._not_finite[split] = f"{split} is {value} at step {step}\n"
                continue
            row = {"updates": self.last_step, "epoch": self.calls, "split": split}
            row |= {} if split == "train" else {"statistics": "running"}
            row |= {"loss": self.sign * value, "value": value, "count": 1, "seconds": seconds}
            # Not flushed to the disk: a call that is killed starts again.
            self.file.append(row if lr is None else {**row, "lr": float(lr)}, flush=False)
        reasons = "".join(self._not_finite.get(split, "") for split in ("valid", "test"))
        diverged = self.directory / records.DIVERGED
        if reasons:
            write_whole(diverged, reasons.encode())
        else:
            diverged.unlink(missing_ok=True)


@dataclass
class FunctionJob(Job):
    """One call of a training function."""

    call: Mapping[str, Any]  # its `recipe` is the import path, or the name, of the function

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.json."""
        settings = {name: _describe(value, []) for name, value in self.call["settings"].items()}
        return {**self.call, "kind": KIND, "settings": settings}

    def mark_if_ended(self) -> None:
        """Mark a run that has ended; UsageError if another run is in its directory."""
        if not (self.out / CONFIG).exists():
            return
        found, _ = read_json(self.out / CONFIG)
        changes = differences(found, self.config)
        is_other_code = changes.pop("code_sha256", "") and found.get("code_sha256")
        if changed := ", ".join(changes.values()):
            raise UsageError(
                f"{self.out} holds a run with other settings ({changed}): use another --out"
            )
        if (note := records.read_note(self.out)) and note.finished:
            self.ended = 0
            if is_other_code:
                name, out = self.call["recipe"], self.out.parent
                notice(f"{name} has changed since runs in {out} ended; they are not repeated")

    def start(self) -> None:
        """Call the function in a process of its own."""
        try:
            for name, value in self.call["settings"].items():
                if json.loads(json.dumps(value)) != value:  # as a tuple, which would be a list
                    raise ValueError(f"{name} is {value!r:.60}")
            self.start_worker({"call": self.call})
        except (TypeError, ValueError) as error:
            raise UsageError(f"settings for workers must be values of JSON: {error}") from None

    def run(self, train: Callable[..., Any]) -> None:
        """Call the function in this process and store what it logs."""
        with records.locked(self.out):
            self.mark_if_ended()
            if self.ended is not None:  # by another process, just now
                return
            call = self.call
            write_whole(self.out / CONFIG, json.dumps(self.config).encode())
            log = RunLog(self.out, call["higher_is_better"])
            self._write_note(log)
            norm = None if call["norm"] == BASELINE else call["norm"]
            train(norm, call["seed"], log, **call["settings"])
            if not log.calls:
                raise UserError(f"{call['recipe']} returned without calling log(step=…)")
            self._write_note(log, finished=log.calls)
        self.ended = 0

    def _write_note(self, log: RunLog, finished: int = 0) -> None:
        file = log.file
        note = records.Note(self.config, finished=finished, epoch=log.calls, updates=log.last_step)
        note.metrics_bytes, note.metrics_sha256 = file.size, file.sha256
        records.write_note(self.out, note)


def _describe(value: Any, by_name: list[str]) -> Any:
    """Return a setting for config.json: plain values as they are, long lists, arrays, tensors and
    DataFrames as the hash of their content, functions and classes by name, other objects by type.

    Types and lambdas, whose names do not say when they change, are appended to `by_name`.
    """
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): _describe(one, by_name) for name, one in value.items()}
    if isinstance(value, list | tuple):
        parts = [_describe(one, by_name) for one in value]
        text = json.dumps(parts)
        if len(text) > LONGEST:
            return hashlib.sha256(text.encode()).hexdigest()
        return text if any(isinstance(part, dict | list) for part in parts) else parts
    if isinstance(value, partial):
        return _describe({"function": value.func, "given": [value.args, value.keywords]}, by_name)
    if isinstance(value, PurePath):
        return str(value)
    is_named = hasattr(value, "__qualname__")
    if not is_named and hasattr(value, "columns") and hasattr(value, "to_dict"):  # a DataFrame
        columns = [[name, value[name].to_numpy()] for name in value.columns]
        return _describe([*columns, getattr(value, "index", None)], by_name)
    if not is_named and hasattr(value, "__array__"):
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        content = array.tobytes()
        if array.dtype.hasobject:  # its bytes are addresses
            content = json.dumps(_describe(array.tolist(), by_name)).encode()
        return hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + content).hexdigest()
    kind = value if is_named else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not is_named or "<lambda>" in name:
        by_name.append(name)
    return name


def run_functions(
    train: Callable[..., Any],
    norms: str | Sequence[str | None],
    seeds: int,
    out: Path,
    workers: int | None,
    higher_is_better: bool,
    settings: Mapping[str, Any],
) -> tuple[str, list[Path]]:
    """Call the function with every norm and seed; return its name and the run directories."""
    if isinstance(train, partial) and not train.args:
        train, settings = train.func, {**train.keywords, **settings}
    several = map(str.strip, norms.split(",")) if isinstance(norms, str) else norms
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
    shared |= {"higher_is_better": higher_is_better, "code_sha256": ""}
    with suppress(OSError, TypeError):  # no source, as of an object
        code = inspect.getsource(train).encode()
        shared["code_sha256"] = hashlib.sha256(code).hexdigest()
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
        job.mark_if_ended()
    for key, value in settings.items() if any(job.has_ended for job in jobs) else ():
        _describe(value, by_name := [])
        if by_name:
            notice(
                f"{key} is recorded as {by_name[0]} only: if it has changed, use another out=;"
                " finished runs are not repeated"
            )
    if workers is not None:
        run_jobs(jobs, workers, interval=0.1)
    else:
        progress = Progress(jobs)
        for job in jobs:
            if job.code is None:
                job.run(train)
                progress.show()
    return shared["recipe"], [job.out for job in jobs]
