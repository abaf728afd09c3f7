"""A trained model from its run directory."""

import json
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

from normrnn.errors import UserError
from normrnn.runs.environment import named_device
from normrnn.runs.store import CONFIG, MODEL, VOCABULARY, RunDirectory
from normrnn.speech.config import SpeechConfig
from normrnn.speech.model import AcousticModel
from normrnn.speech.task import build_model as build_acoustic
from normrnn.text.config import LanguageConfig
from normrnn.text.model import LanguageModel
from normrnn.text.task import build_model
from normrnn.text.vocabulary import Vocabulary

Model = LanguageModel | AcousticModel


def load(run: str | Path, device: str | torch.device = "cpu") -> Model:
    """The best model of a run, in eval mode.

    `.vocabulary` of a language model says what its ids mean. A UserError says what is wrong with a
    directory that holds no usable model. docs/notebook.md has a whole example.

    >>> load("no-such-run")
    Traceback (most recent call last):
    normrnn.errors.UserError: no-such-run is no run directory with a config.json
    """
    is_speech = isinstance(RunDirectory(Path(run)).config(), SpeechConfig)
    return load_acoustic(run, device) if is_speech else load_language(run, device)


def load_acoustic(run: str | Path, device: str | torch.device = "cpu") -> AcousticModel:
    """What must be an acoustic model."""
    directory = RunDirectory(Path(run))
    config = directory.config(SpeechConfig)
    weights = _weights(directory)
    dim, classes = (len(weights.get(name, ())) for name in ("mean", "label_counts"))
    model = build_acoustic(config, dim, classes)
    _fill(model, weights, directory)
    return model.to(named_device(device)).eval()


def load_language(run: str | Path, device: str | torch.device = "cpu") -> LanguageModel:
    """What must be a language model."""
    directory = RunDirectory(Path(run))
    config = directory.config(LanguageConfig)
    weights = _weights(directory)
    content = directory.read(VOCABULARY)
    vocabulary = Vocabulary.from_json(content)
    known = len(weights.get("embedding.weight", ()))
    if known != len(vocabulary):
        raise UserError(
            f"{VOCABULARY} of {run} has {len(vocabulary)} symbols, its network {known}: they do"
            " not belong together"
        )
    written = directory.tensors_metadata(MODEL).get(VOCABULARY)  # older runs have none
    if written not in (None, sha256(content).hexdigest()):
        raise UserError(f"{VOCABULARY} of {run} is not the one that its network was trained with")
    model = build_model(config, len(vocabulary))
    _fill(model, weights, directory)
    model.vocabulary = vocabulary
    return model.to(named_device(device)).eval()


def _weights(directory: RunDirectory) -> dict[str, Tensor]:
    if not directory.has(MODEL):
        raise UserError(f"{directory.path} has no {MODEL} yet: the first validation writes it")
    weights, config = directory.read_tensors(MODEL), directory.tensors_metadata(MODEL).get(CONFIG)
    if config is not None:  # older runs have none
        directory.check_config(directory.config(), json.loads(config), MODEL)
    return weights


def _fill(model: nn.Module, weights: dict[str, Tensor], directory: RunDirectory) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{MODEL} of {directory.path} does not fit its {CONFIG}: {reason}"
        ) from None
