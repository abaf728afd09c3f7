"""Everything that can be said about a trained run, for `normrnn evaluate`."""

from pathlib import Path
from typing import Any

from normrnn.config.registry import task_of
from normrnn.engine.task import EvaluationOptions
from normrnn.runs.environment import named_device
from normrnn.runs.names import EVALUATION
from normrnn.runs.store import RunDirectory
from normrnn.seal import sealed_json


def evaluate(
    run: Path, data: str = "", device: str = "cpu", one_stream: bool = True
) -> dict[str, Any]:
    """Evaluate the best model of `run`; what evaluation.json holds.

    `data` is where the data is now, if not where it was in training, or other data.
    """
    options = EvaluationOptions(data, named_device(device), one_stream)
    directory = RunDirectory(run)
    config = directory.config()
    about = {name: getattr(config, name) for name in ("recipe", "norm", "seed")}
    about["model_sha256"] = directory.model_sha256()
    return {**about, **task_of(config).evaluate(directory, options)}


def keep(run: Path, result: dict[str, Any]) -> None:
    """Write evaluation.json."""
    RunDirectory(run).write(EVALUATION, sealed_json(result))
