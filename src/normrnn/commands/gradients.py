"""`normrnn gradients RUN|RECIPE`."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from normrnn.commands.options import parse, split_recipe
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
    """Record gradients and spreads of a run or of an untrained recipe."""
    if arguments and (Path(arguments[0]) / CONFIG).exists():
        return _of_runs(arguments)
    if (
        arguments
        and not arguments[0].startswith("-")
        and not (arguments[0] in RECIPES or is_import_path(arguments[0]))
    ):
        raise UsageError(
            f"{arguments[0]} is neither a run directory nor a recipe; normrnn recipes lists these"
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
        """Norms of dL/dh_t and spread of pre-activations at initialisation, step by step.

        Of a trained run: normrnn gradients RUN [RUN ...] [--data ...] [-o FILE].

        Args:
            config: The experiment.
            norms: Several normalisations at once, comma-separated; --norm unless given.
            batches: Training batches to measure on.
            output: JSON file; a picture of the same name is written beside it.
        """
        from normrnn.engine.start import open_experiment

        _check(batches, output)
        chosen = checked_norms(norms or [config.norm], "--norms")
        records = []
        for norm in chosen:
            one = replace(config, norm=norm)
            experiment = open_experiment(one)
            records.append(_record(one, f"norm {norm}", _built(one, experiment), batches))
        _write(records, output)

    parse(options, f"gradients {default.recipe}", rest)
    return 0


def _of_runs(arguments: list[str]) -> int:
    def options(
        runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")],
        data: str = "",
        batches: int = 4,
        output: Output = Path("gradients.json"),
    ) -> None:
        """Norms of dL/dh_t and spread of pre-activations of the best models, step by step.

        Args:
            runs: Run directories.
            data: Where the data is now, if not where it was in training.
            batches: Training batches to measure on.
            output: JSON file; a picture of the same name is written beside it.
        """
        from normrnn.engine.start import open_experiment
        from normrnn.runs.load import load
        from normrnn.runs.store import RunDirectory

        _check(batches, output)
        records = []
        for path in runs:
            config = RunDirectory(path).config()
            config = replace(config, data=data or config.data)
            experiment = open_experiment(config)
            if config.data_sha256 != experiment.sha256:
                raise UserError(f"{config.data} is not what {path} was trained on")
            task = _built(config, experiment)
            task.model.load_state_dict(load(path).state_dict())
            records.append(_record(config, path.name, task, batches))
        _write(records, output)

    parse(options, "gradients RUN", arguments)
    return 0


def _check(batches: int, output: Path) -> None:
    if batches < 1:
        raise UsageError(f"--batches must be at least 1, not {batches}")
    if output.suffix == ".png":
        raise UsageError(f"--output {output} is the JSON file; its picture ends in .png")
    if output.exists() and not _ours(output):
        raise UsageError(f"--output {output} is there and holds no gradients: not overwriting it")


def _ours(file: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        records = json.loads(read_regular(file))
        return isinstance(records, list) and all(
            isinstance(record, dict) and "layers" in record for record in records
        )
    return False


def _built(config: Config, experiment: Any) -> "Task":
    import torch

    torch.manual_seed(config.seed)
    return experiment.build(torch.device("cpu"))


def _record(config: Config, label: str, task: "Task", batches: int) -> dict[str, Any]:
    from normrnn.analysis.gradients import record
    from normrnn.reporting.gradients import sentence

    measured = {"label": label, **record(config, task, batches)}
    for name, layer in measured["layers"].items():
        print(f"{label}, {sentence(name, layer)}")
    return measured


def _write(records: list[dict[str, Any]], output: Path) -> None:
    from normrnn.reporting.gradients import figure
    from normrnn.reporting.pictures import save, why_no_pictures

    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, (json.dumps(records, indent=1) + "\n").encode())
    if omitted := why_no_pictures():
        print(f"wrote {output}; {omitted}")
        return
    picture = output.with_suffix(".png")
    save(figure(records), picture)
    print(f"wrote {output} and {picture}")
