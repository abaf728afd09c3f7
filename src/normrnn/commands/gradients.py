"""`normrnn gradients RECIPE` and `normrnn gradients RUN...`."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import parse, split_recipe
from normrnn.config.base import Config, checked_norms
from normrnn.config.registry import task_of
from normrnn.errors import UsageError, UserError
from normrnn.files import write_whole
from normrnn.runs.records import CONFIG

if TYPE_CHECKING:
    from normrnn.engine.task import Task

Output = Annotated[Path, arg(aliases=["-o"], metavar="FILE")]
FILE = Path("gradients.json")


def gradients(arguments: list[str]) -> int:
    """Record gradients of trained runs or of an untrained recipe."""
    if arguments and (Path(arguments[0]) / CONFIG).exists():
        return parse(_of_runs, "gradients RUN", arguments, imports=True) or 0
    usage = "normrnn gradients RUN_DIR... [OPTIONS] measures trained runs"
    default, rest = split_recipe("gradients", arguments, usage)

    def options(
        config: Annotated[Config, arg(name="")] = default,
        norms: str = default.norm,
        batches: int = 4,
        output: Output = FILE,
    ) -> None:
        """Norms of dL/dh_t at initialisation, step by step.

        Of a trained run: normrnn gradients RUN [RUN ...] [--data ...] [-o FILE].

        Args:
            config: The experiment.
            norms: Normalisations, comma-separated; none is the baseline.
            batches: Training batches to measure on.
            output: JSON file to write.
        """
        chosen = checked_norms(norms, "--norms")
        configs = [replace(config, norm=norm) for norm in chosen]
        _write(((f"norm {one.norm}", one, _task(one)) for one in configs), batches, output)

    return parse(options, f"gradients {default.recipe}", rest, imports=True) or 0


def _of_runs(
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")],
    data: str = "",
    batches: int = 4,
    output: Output = FILE,
) -> None:
    """Norms of dL/dh_t of the best models, step by step.

    Args:
        runs: Run directories.
        data: Where the data is now, if it moved.
        batches: Training batches to measure on.
        output: JSON file to write.
    """
    _write((_trained(path, data) for path in runs), batches, output)


def _task(config: Config) -> "Task":
    import torch

    task = task_of(config).open(config)
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
    task.model = load(path)
    return path.name, config, task


def _write(measured: "Iterable[tuple[str, Config, Task]]", batches: int, output: Path) -> None:
    """Measure every network; print what its gradients do and write the figures."""
    from normrnn.analysis.gradients import describe, record

    if batches < 1:
        raise UsageError(f"--batches must be at least 1, not {batches}")
    if output.suffix != ".json":  # so that no other file is overwritten by mistake
        raise UsageError(f"--output {output} should end in .json")
    records = []
    for label, config, task in measured:
        records.append({"label": label, **record(config, task, batches)})
        for name, layer in records[-1]["layers"].items():
            print(f"{label}, {describe(name, layer)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, (json.dumps(records, indent=1) + "\n").encode())
    print(f"wrote {output}")
