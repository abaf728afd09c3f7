"""One run: train it, evaluate it, draw text from it, load it."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from normrnn.config import registry
from normrnn.config.base import Config
from normrnn.config.registry import task_of, with_settings
from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, sealed_json
from normrnn.processes import rank_and_size
from normrnn.runs.records import EVALUATION, finite_rows

if TYPE_CHECKING:
    from torch import nn

    from normrnn.engine.task import Models, Task
    from normrnn.reporting.runs import Run

Recipe = str | Config | type[Config] | Callable[[], Config]
"""A recipe's name, its import path, a config, its class, or a function that returns one."""


def train(
    what: Recipe,
    *,
    norm: str | EllipsisType | None = ...,
    data: str | Path | None = None,
    out: str | Path | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
    tensorboard: bool = False,
    csv: bool = False,
    path: str | Path | None = None,
    **settings: Any,
) -> "Run":
    """Train a recipe in this process and return the run; calling again resumes it.

    Args:
        what: A recipe's name, import path (`module:name`), config class, or function.
        norm: Normalisation of the recurrent layers, the recipe's unless given; None is the
            baseline.
        data: What to train on.
        out: Run directory; runs/RECIPE-NORM-SEED unless given.
        log: Called with every row of metrics.jsonl, a dict.
        tensorboard: Also write the rows for TensorBoard, in the run directory.
        csv: Also write the rows to metrics.csv in the run directory.
        path: Directory of the modules that import paths name.
        **settings: Settings of the recipe, as in `epochs=2, hidden=64, model={"momentum": 0.1}`.
    """
    from normrnn.engine.loop import train as train_config
    from normrnn.reporting.runs import load

    config = resolve(what, path)
    if not isinstance(config, Config):
        raise UsageError(f"expected a recipe or its name, not {what!r}")
    given: dict[str, Any] = {} if data is None else {"data": str(data)}
    if norm is not ...:
        (given["norm"],) = registry.use_norms([norm], path)
    config = with_settings(config, {**given, **settings})
    out = expanded(out or default_directory(config.recipe, config.norm, config.seed))
    logs = ["tensorboard"] * tensorboard + ["csv"] * csv
    train_config(config, out, [log] if log else [], logs)
    return load(out)


def resolve(what: Any, path: str | Path | None = None) -> Config | Callable[..., Any]:
    """Return the config of a recipe, or the training function, that is given or named."""
    if isinstance(what, Config):
        return what
    is_path = registry.is_import_path(what)
    thing = registry.find(what, path) if is_path else what
    if callable(thing) and not registry.is_recipe(thing):
        return thing
    if not isinstance(what, str) and not callable(what):
        raise UsageError(f"expected a recipe or its name, not {what!r}")
    return registry.recipe(registry.use(what, path) if is_path or callable(what) else what)


def default_directory(name: str, *more: object) -> Path:
    """Return the directory of a recipe or function unless the user names one.

    >>> print(default_directory("my_module:recipe", "frame", 1))
    runs/my_module.recipe-frame-1
    """
    return Path("runs", "-".join(map(str, (name.replace(":", "."), *more))))


def train_until_stopped(config: Config, out: Path, logs: Sequence[str]) -> int:
    """Train or resume a run; return the exit code: 130 if it was asked to stop."""
    from normrnn.engine import loop

    try:
        loop.train(config, out, logs=logs)
    except loop.Interrupted:
        if rank_and_size()[0] == 0:
            text = f"stopped; the same command resumes from the checkpoint in {out}"
            print(text, file=sys.stderr, flush=True)
        return 130
    return 0


def evaluate(
    run: str | Path,
    data: str | Path = "",
    *,
    device: str = "cpu",
    one_stream: bool = True,
    keep: bool = True,
    use: str | Recipe | None = None,
    path: str | Path | None = None,
) -> dict[str, Any]:
    """Evaluate the best model of a run under all statistics; return what evaluation.json holds.

    Args:
        run: Run directory.
        data: Where the data is now, if it moved; or other data.
        device: Where to compute.
        one_stream: Also read a test text as one stream.
        keep: Write evaluation.json, if the data is the run's.
        use: The recipe or normalisation of a user's own that the run was trained with.
        path: Directory of the module that `use` names.
    """
    from normrnn.runs.environment import named_device
    from normrnn.runs.store import RunDirectory

    import_names(use, path)
    directory, torch_device = RunDirectory(expanded(run)), named_device(device)
    config = directory.config()
    kind: type[Task] = task_of(config)
    model = kind.load(directory, torch_device)
    saved = directory.model_metadata
    task = kind.open(replace(config, data=str(data) or config.data), model)
    task.device = torch_device
    # A model saved with recalibrated statistics does not have the running ones.
    is_recalibrated = saved.get("statistics") == "recalibrated"
    models: Models = {"recalibrated": model} if is_recalibrated else task.population(model)
    rows = [row for split in task.splits for row in task.rows(models, split)]
    if task.has_train_eval:
        rows.append(task.score(model, "train_eval", next(iter(models))))
    rows += task.extra_rows(models) if one_stream else []
    finite = finite_rows(rows)
    if not finite:
        raise UserError(f"the model of {run} gives no finite loss on {task.where}")
    notes = [
        f"{row['split']} with {row['statistics']} statistics left out: its loss is {row['loss']}"
        for row in rows
        if row not in finite
    ]
    same, norm = task.sha256 == config.data_sha256, config.normalisation
    if norm.looks_ahead and config.predicts_inputs:
        notes.append("no batch statistics: they include the later inputs that are predicted")
    if norm.keeps_statistics and "recalibrated" not in models:
        notes.append(f"no recalibrated statistics: {task.where} has no training batch for them")
    elif not same and len(models) > 1:
        notes.append(f"recalibrated statistics are of {task.where}, not of the training data")
    result: dict[str, Any] = {name: getattr(config, name) for name in ("recipe", "norm", "seed")}
    result |= {"model_sha256": saved["sha256"], "data_sha256": task.sha256, "same_data": same}
    result |= {"rows": finite, "notes": notes}
    if keep and same:
        directory.write(EVALUATION, sealed_json(result))
    return result


def load(
    run: "str | Path | Run",
    device: str = "cpu",
    *,
    use: str | Recipe | None = None,
    path: str | Path | None = None,
) -> "nn.Module":
    """Return the best model of a run, in eval mode: a network of the run's task.

    `.vocabulary` of a language model says what its ids mean. UserError for a directory without a
    usable model. `use` and `path` are those of `evaluate`.

    >>> load("no-such-run")
    Traceback (most recent call last):
    normrnn.errors.UserError: no-such-run is not a run directory: no config.json
    """
    from normrnn.runs.environment import named_device
    from normrnn.runs.store import RunDirectory

    import_names(use, path)
    directory = RunDirectory(expanded(run) if isinstance(run, str | Path) else run.path)
    return task_of(directory.config()).load(directory, named_device(device))


def sample(
    run: str | Path,
    tokens: int = 100,
    *,
    temperature: float = 1.0,
    prompt: str = "",
    seed: int | None = None,
) -> str:
    """Return text drawn from the best model of a run; the same seed gives the same text."""
    import torch

    from normrnn.text.task import Reader

    if tokens < 1:
        raise UsageError(f"tokens must be at least 1, not {tokens}")
    if not temperature > 0:
        raise UsageError(f"temperature must be positive, not {temperature}")
    if seed is not None and not 0 <= seed < 2**32:
        raise UsageError(f"seed must lie in [0, 2**32), not {seed}")
    reader = Reader.of_run(expanded(run), overlap=True)
    vocabulary = reader.model.vocabulary
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    given = vocabulary.encode(prompt)
    drawn = reader.draw([vocabulary.eos, *given], tokens, generator, temperature)
    return vocabulary.decode([*given, *drawn])


def import_names(names: str | Recipe | None, path: str | Path | None) -> None:
    """Import what a run of a user's own needs: import paths, comma-separated, or a recipe."""
    if names and not isinstance(names, Config):
        for name in names.split(",") if isinstance(names, str) else [names]:
            registry.use(name, path)
