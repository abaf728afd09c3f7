"""`normrnn gradients RECIPE` and `normrnn gradients RUN...`."""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from normrnn.commands.options import parse, parse_of_run, split_recipe
from normrnn.config.base import Config, checked_norms
from normrnn.config.extensions import is_import_path
from normrnn.errors import UsageError, UserError
from normrnn.files import read_regular, write_whole
from normrnn.recipes import RECIPES
from normrnn.runs.names import CONFIG

if TYPE_CHECKING:
    from normrnn.engine.task import Task

Output = Annotated[Path, arg(aliases=["-o"], metavar="FILE")]


def run(arguments: list[str]) -> int:
    """Record gradients of trained runs or of an untrained recipe."""
    name = arguments[0] if arguments else "--help"
    if (Path(name) / CONFIG).exists():
        return _measure_runs(arguments)
    if not (name.startswith("-") or name in RECIPES or is_import_path(name)):
        raise UsageError(
            f"{name} is neither a run directory nor a recipe; normrnn recipes lists these"
        )
    default, rest = split_recipe(
        "gradients", arguments, "normrnn gradients RUN_DIR... [OPTIONS] measures trained runs"
    )

    def options(
        config: Annotated[Config, arg(name="")] = default,
        norms: str = "",
        batches: int = 4,
        output: Output = Path("gradients.json"),
    ) -> None:
        """Norms of dL/dh_t at initialisation, step by step.

        Of a trained run: normrnn gradients RUN [RUN ...] [--data ...] [-o FILE].

        Args:
            config: The experiment.
            norms: Several normalisations at once, comma-separated; --norm unless given.
            batches: Training batches to measure on.
            output: JSON file; a picture of the same name is written beside it.
        """
        chosen = checked_norms(norms or [config.norm], "--norms")
        configs = [replace(config, norm=norm) for norm in chosen]
        _write(((f"norm {one.norm}", one, _task(one)) for one in configs), batches, output)

    return parse(options, f"gradients {default.recipe}", rest) or 0


def _measure_runs(arguments: list[str]) -> int:
    def options(
        runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")],
        data: str = "",
        batches: int = 4,
        output: Output = Path("gradients.json"),
    ) -> None:
        """Norms of dL/dh_t of the best models, step by step.

        Args:
            runs: Run directories.
            data: Where the data is now, if it moved.
            batches: Training batches to measure on.
            output: JSON file; a picture of the same name is written beside it.
        """
        _write((_trained(path, data) for path in runs), batches, output)

    return parse_of_run(options, "gradients RUN", arguments) or 0


def _task(config: Config) -> "Task":
    import torch

    from normrnn.engine.start import open_experiment

    task = open_experiment(config)
    torch.manual_seed(config.seed)
    return task.build(torch.device("cpu"))


def _trained(path: Path, data: str) -> "tuple[str, Config, Task]":
    from normrnn.experiments.training import load
    from normrnn.runs.store import RunDirectory

    config = RunDirectory(path).config()
    config = replace(config, data=data or config.data)
    task = _task(config)
    if config.data_sha256 != task.sha256:
        raise UserError(f"{config.data} is not what {path} was trained on")
    task.model.load_state_dict(load(path).state_dict())
    return path.name, config, task


def _write(measured: "Iterable[tuple[str, Config, Task]]", batches: int, output: Path) -> None:
    """Measure every network and write the figures, and a picture where matplotlib is installed."""
    from normrnn.analysis.gradients import record
    from normrnn.reporting.gradients import figure, sentence
    from normrnn.reporting.pictures import save, why_no_pictures

    _check(batches, output)
    records: list[dict[str, Any]] = []
    for label, config, task in measured:
        records.append({"label": label, **record(config, task, batches)})
        for name, layer in records[-1]["layers"].items():
            print(f"{label}, {sentence(name, layer)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, (json.dumps(records, indent=1) + "\n").encode())
    if omitted := why_no_pictures():
        print(f"wrote {output}; {omitted}")
        return
    picture = output.with_suffix(".png")
    save(figure(records), picture)
    print(f"wrote {output} and {picture}")


def _check(batches: int, output: Path) -> None:
    if batches < 1:
        raise UsageError(f"--batches must be at least 1, not {batches}")
    if output.suffix == ".png":
        raise UsageError(f"--output {output} is the JSON file; its picture ends in .png")
    if output.exists() and not _holds_gradients(output):
        raise UsageError(f"--output {output} exists and holds no gradients: not overwriting it")


def _holds_gradients(file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        records = json.loads(read_regular(file))
        return isinstance(records, list) and all(
            isinstance(record, dict) and "layers" in record for record in records
        )
    return False
