"""Commands on trained runs: evaluate, score, sample, posteriors, export and gradients."""

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from normrnn.commands.options import RunArgument, parse, split_recipe
from normrnn.config.base import Config, checked_norms
from normrnn.config.registry import task_of
from normrnn.errors import UsageError, UserError
from normrnn.files import sealed_json, write_whole
from normrnn.norms import statistics_shown
from normrnn.runs.records import CONFIG, EVALUATION

if TYPE_CHECKING:
    from normrnn.engine.task import Task

Output = Annotated[Path, arg(aliases=["-o"], metavar="FILE")]
GRADIENTS = Path("gradients.json")


def evaluate(
    run: RunArgument,
    data: Annotated[str, arg(metavar="DATA")] = "",
    device: str = "cpu",
    threads: int = 0,
    one_stream: bool = True,
) -> None:
    """Evaluate the best model of a run with running, recalibrated and batch statistics.

    Writes evaluation.json into the run directory, unless on other data than the run's.

    Args:
        run: Run directory.
        data: Where the data is now, if it moved; or other data.
        device: Where to compute.
        threads: Threads of the tensor library; 0 is its own choice.
        one_stream: Also read the test text as one stream, as Zaremba did: slow for large nets.
    """
    from normrnn.experiments import training
    from normrnn.runs.environment import set_threads
    from normrnn.runs.store import RunDirectory

    set_threads(threads)
    result = training.evaluate(run, data, device=device, one_stream=one_stream, keep=False)
    show(result, RunDirectory(run).config())
    if result["same_data"]:
        RunDirectory(run).write(EVALUATION, sealed_json(result))
    else:
        print(f"{data} is not what {run} was trained on: its evaluation.json is left alone")


def show(result: Mapping[str, Any], config: Config) -> None:
    """Print an evaluation as a table that fits in 80 columns, and its notes."""
    measure, rows = config.loss_measure, result["rows"]
    others = ("split", "statistics", "value", measure.name)
    names = [*dict.fromkeys(k for row in rows for k in row if k not in others)]
    names += [] if measure.convert is float else [measure.name]
    table = [["set", "statistics", *(measure.unit if n == "count" else n for n in names)]]
    for row in rows:
        shown = {**row, measure.name: measure.convert(row["loss"])}
        cells = (_cell(shown.get(name)) for name in names)
        table.append([row["split"], statistics_shown(result, row), *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"{result['recipe']}, norm {result['norm']}, seed {result['seed']}\n")
    for line in table:
        left, right = zip(line[:2], widths, strict=False), zip(line[2:], widths[2:], strict=True)
        aligned = [*(text.ljust(n) for text, n in left), *(text.rjust(n) for text, n in right)]
        print("  ".join(aligned).rstrip())
    for note in result["notes"]:
        print(textwrap.fill(note, 80, break_long_words=False, break_on_hyphens=False))


def _cell(value: float | None) -> str:
    if value is None or isinstance(value, int):
        return "" if value is None else f"{value:,}"
    return f"{value:,.4f}" if value < 1e7 else f"{value:.4g}"


def score(
    run: RunArgument, file: Annotated[Positional[Path], arg(metavar="FILE")], lines: bool = False
) -> None:
    """Perplexity of a text under the best model of a run, read as one stream, or as sequences
    from zero state if the run was trained on such.

    Args:
        run: Run directory.
        file: UTF-8 text; - is standard input, line by line as they come, --lines implied.
        lines: Also print, for each line, its perplexity, tokens and text, tab-separated.
    """
    from normrnn.config.base import bits
    from normrnn.files import open_regular
    from normrnn.text.config import perplexity
    from normrnn.text.corpus import UNKNOWN, text_lines
    from normrnn.text.task import Reader

    reader = Reader.of_run(run)
    vocabulary = reader.model.vocabulary
    is_input = str(file) == "-"
    name = "standard input" if is_input else str(file)
    # The end of an imagined line before the text, so that its first word is predicted too.
    last, nats, count, unknown = vocabulary.eos, 0.0, 0, 0
    with sys.stdin.buffer if is_input else open_regular(file) as text:
        for line in text_lines(text, name):
            ids = vocabulary.encode(line)
            lost = reader.nats([last, *ids]).double().sum().item()
            if lines or is_input:
                print(f"{perplexity(lost / len(ids)):.2f}\t{len(ids)}\t{line}", end="", flush=True)
            last, nats, count = ids[-1], nats + lost, count + len(ids)
            unknown += ids.count(vocabulary.index.get(UNKNOWN, -1))
    loss = nats / count
    in_bits = f", {bits(loss):.4f} bits per character" if vocabulary.level == "char" else ""
    print(
        f"{name}: {count:,} tokens ({unknown:,} {UNKNOWN}), loss {loss:.4f} nats{in_bits},"
        f" perplexity {perplexity(loss):,.2f}"
    )


def sample(
    run: RunArgument,
    tokens: int = 100,
    temperature: float = 1.0,
    prompt: str = "",
    seed: int | None = None,
) -> None:
    """Draw text from the best model of a run.

    Args:
        run: Run directory.
        tokens: Words or characters to draw.
        temperature: Below 1: nearer to the likeliest words; above 1: more random.
        prompt: Text to continue.
        seed: The same seed gives the same text.
    """
    from normrnn.experiments import training

    print(training.sample(run, tokens, temperature=temperature, prompt=prompt, seed=seed))


def posteriors(
    run: RunArgument,
    data: Annotated[Path, arg(metavar="DIR")],
    out: Annotated[Path, arg(metavar="PREFIX")],
    priors: bool = False,
    prior_floor: float | None = None,
    device: str = "cpu",
    threads: int = 0,
) -> None:
    """Natural-log posteriors per frame and state, as Kaldi's decoders read them.

    Writes PREFIX.ark and PREFIX.scp.

    Args:
        run: Run directory.
        data: Kaldi directory with feats.scp, of the features the network was trained on.
        out: Where to write.
        priors: Subtract the log priors of the states: scaled log-likelihoods, which is what a
            hybrid decoder wants.
        prior_floor: With --priors, training frames that a state counts as having at least; 1
            unless given.
        device: Where to compute.
        threads: Threads of the tensor library; 0 is its own choice.
    """
    from normrnn.runs.environment import set_threads
    from normrnn.speech.task import write_posteriors

    if prior_floor is not None and not priors:
        raise UsageError("--prior-floor needs --priors")
    set_threads(threads)
    floor = (1.0 if prior_floor is None else prior_floor) if priors else None
    utterances, frames = write_posteriors(run, data, out, floor, device)
    print(f"{out}.scp: {utterances:,} utterances, {frames:,} frames")


def export(
    run: RunArgument,
    out: Annotated[Path, arg(aliases=["-o"], metavar="PATH")],
    format: Literal["torch", "onnx", "safetensors", "program"] | None = None,
    quantize: Literal["none", "int8"] = "none",
    opset: int | None = None,
) -> None:
    """The best model of a run, its normalisation folded into plain weights, with a model card.

    Args:
        run: Run directory.
        out: Directory to make, for the model and README.md; or the file, its card beside it.
        format: Plain tensors for torch (.pt) or in safetensors, an ONNX graph, or a program of
            torch.export (.pt2). None: by the suffix of the file, else torch.
        quantize: Weights of the ONNX graph as int8.
        opset: Version of ONNX's operators to write.
    """
    from normrnn.deploy import export as exports
    from normrnn.deploy.card import info

    small = None if quantize == "none" else quantize
    try:
        file = exports.export(run, out, format, quantize=small, opset=opset)
    except ValueError as error:  # what cannot be exported, and why
        raise UserError(str(error)) from None
    print(f"{file}: {file.stat().st_size / 1e6:,.2f} MB, with its model card\n")
    for code in re.findall(r"```python\n(.*?)```", info(file), re.DOTALL):
        print(code)


def gradients(arguments: list[str]) -> int:
    """Record gradients of trained runs or of an untrained recipe."""
    if arguments and (Path(arguments[0]) / CONFIG).exists():
        return parse(_trained_gradients, "gradients RUN", arguments, imports=True) or 0
    usage = "normrnn gradients RUN_DIR... [OPTIONS] measures trained runs"
    default, rest = split_recipe("gradients", arguments, usage)

    def options(
        config: Annotated[Config, arg(name="")] = default,
        norms: str = default.norm,
        batches: int = 4,
        output: Output = GRADIENTS,
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
        _measure(((f"norm {one.norm}", one, _task(one)) for one in configs), batches, output)

    return parse(options, f"gradients {default.recipe}", rest, imports=True) or 0


def _trained_gradients(
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")],
    data: str = "",
    batches: int = 4,
    output: Output = GRADIENTS,
) -> None:
    """Norms of dL/dh_t of the best models, step by step.

    Args:
        runs: Run directories.
        data: Where the data is now, if it moved.
        batches: Training batches to measure on.
        output: JSON file to write.
    """
    _measure((_trained_task(path, data) for path in runs), batches, output)


def _task(config: Config) -> "Task":
    import torch

    task = task_of(config).open(config)
    torch.manual_seed(config.seed)
    return task.build(torch.device("cpu"))


def _trained_task(path: Path, data: str) -> "tuple[str, Config, Task]":
    from normrnn.experiments.training import load
    from normrnn.runs.store import RunDirectory

    config = RunDirectory(path).config()
    config = replace(config, data=data or config.data)
    task = _task(config)
    if config.data_sha256 != task.sha256:
        raise UserError(f"{config.data} is not what {path} was trained on")
    task.model = load(path)
    return path.name, config, task


def _measure(measured: "Iterable[tuple[str, Config, Task]]", batches: int, output: Path) -> None:
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
