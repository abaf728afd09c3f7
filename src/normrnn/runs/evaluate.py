"""Everything that can be said about a trained run, for `normrnn evaluate`."""

from pathlib import Path
from typing import Any

import torch

from normrnn.engine.task import Row, Tensors
from normrnn.errors import UserError
from normrnn.report.curves import epoch_averages
from normrnn.report.runs import load as load_run
from normrnn.runs.environment import named_device
from normrnn.runs.load import load_acoustic, load_language
from normrnn.runs.metrics import with_bits
from normrnn.runs.store import EVALUATION, MODEL, RunDirectory
from normrnn.seal import sealed_json
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import read_speech
from normrnn.speech.task import SpeechEvaluator
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import encode_texts
from normrnn.text.evaluation import LONG_WINDOW, score, set_statistics, using
from normrnn.text.files import read_texts
from normrnn.text.model import LanguageModel
from normrnn.text.task import RUNNING, Evaluator, deciding_statistics, finite_rows

NO_PERPLEXITY = (
    "batch statistics refused: they see the future of the window, so that what they give a"
    " language model is no perplexity; the same holds for its losses in training mode"
)


def evaluate(run: Path, data: str = "", device: str = "cpu", one_stream: bool = True) -> Any:
    """Evaluate the best model of `run`; what evaluation.json holds.

    `data` is where the text is now, if not where it was, or another one.
    """
    directory = RunDirectory(run)
    place = named_device(device)
    if isinstance(directory.config(), SpeechConfig):
        return _evaluate_speech(directory, data, place)
    return _evaluate_language(directory, data, place, one_stream)


def keep(run: Path, result: Any) -> None:
    """Write evaluation.json."""
    RunDirectory(run).write(EVALUATION, sealed_json(result))


def _evaluate_language(
    directory: RunDirectory, data: str, place: torch.device, one_stream: bool
) -> Any:
    run = directory.path
    model = load_language(run, place)
    assert model.vocabulary is not None
    config = directory.config(LanguageConfig)
    texts = read_texts(data or config.data)
    evaluator = Evaluator(config, encode_texts(texts, model.vocabulary), place)
    if deciding_statistics(config) == "recalibrated":
        _check_pair(directory)
        set_statistics(model, directory.read_tensors(RUNNING))
    population = evaluator.population(model, _never)
    rows = [row for s in ("valid", "test") for row in evaluator.rows(model, s, population, _never)]
    rows += _train_eval(model, evaluator, population)
    # Sequences from zero state are the same however many are read at once.
    if one_stream and config.train.reading == "streams":
        rows += _one_stream(model, evaluator, population)
    if config.text.level == "char":
        rows = [with_bits(row) for row in rows]
    finite = finite_rows(rows)
    if not finite:
        raise UserError(f"the model of {run} gives no finite loss on {texts.source}")
    notes = [NO_PERPLEXITY] if config.normalisation.looks_ahead else []
    notes += [
        f"{row['split']} with {row['statistics']} statistics left out: its loss is {row['loss']}"
        for row in rows
        if row not in finite
    ]
    rows = finite
    return {
        "recipe": config.recipe,
        "norm": config.norm,
        "seed": config.seed,
        "data_sha256": texts.sha256,
        "same_data": texts.sha256 == config.data_sha256,
        "rows": rows,
        "train_epochs": epoch_averages(load_run(run)),
        "authors_protocol": _authors(config, rows),
        "notes": notes,
    }


def _evaluate_speech(directory: RunDirectory, data: str, device: torch.device) -> Any:
    config = directory.config(SpeechConfig)
    model = load_acoustic(directory.path, device)
    corpus = read_speech(data or config.data)
    return {
        "recipe": config.recipe,
        "norm": config.norm,
        "seed": config.seed,
        "data_sha256": corpus.sha256,
        "same_data": config.data_sha256 in (corpus.sha256, corpus.labels_sha256),
        "rows": list(SpeechEvaluator(config, corpus, device).rows(model, _never)),
    }


def _check_pair(directory: RunDirectory) -> None:
    """The running statistics must be of the model beside them: a kill can fall between the two."""
    of = {directory.tensors_metadata(name).get("updates") for name in (MODEL, RUNNING)}
    if len(of) > 1:
        raise UserError(
            f"{directory.path} was stopped while its best model was written: {MODEL} and {RUNNING}"
            " are of different updates; training goes on from there and writes both"
        )


def window_for_one_stream(config: LanguageConfig) -> int:
    """Long windows, except where statistics belong to positions in the training window."""
    fixed = config.model.time_steps or config.train.reading == "sequences"
    return config.train.steps if fixed else LONG_WINDOW


def _authors(config: LanguageConfig, rows: list[Row]) -> list[Row]:
    """The authors' own figure: batch statistics, mean of the mini-batches' perplexities."""
    if config.text.level == "char":
        return []  # their code that we know of is the one for words
    wanted = "batch" if config.normalisation.keeps_statistics else "running"
    return [
        {k: row[k] for k in ("split", "statistics", "batch_ppl", "streams")}
        for row in rows
        if row["statistics"] == wanted and row["split"] in ("valid", "test") and "batch_ppl" in row
    ]


def _train_eval(model: LanguageModel, evaluator: Evaluator, population: Tensors) -> list[Row]:
    if "train_eval" not in evaluator.texts:
        return []
    deciding = deciding_statistics(evaluator.config)
    with using(model, population if deciding == "recalibrated" else {}):
        return [evaluator.score(model, "train_eval", _never).row("train_eval", deciding)]


def _one_stream(model: LanguageModel, evaluator: Evaluator, population: Tensors) -> list[Row]:
    text, steps = evaluator.text("test", 1), window_for_one_stream(evaluator.config)
    kinds: dict[Any, Tensors] = {"running": {}, "recalibrated": population}
    if not population:
        del kinds["recalibrated"]
    rows = []
    for kind, statistics in kinds.items():
        with using(model, statistics):
            row = score(model, text, steps, _never).row("test", kind)
        # A mean over these long windows is nobody's protocol.
        del row["batch_ppl"]
        rows.append(row)
    return rows


def _never() -> None:
    """Nobody asks an evaluation to stop but Ctrl-C itself."""
