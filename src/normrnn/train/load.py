"""A trained model from its run directory."""

from pathlib import Path

import torch

from normrnn.data.vocabulary import Vocabulary
from normrnn.errors import UserError
from normrnn.models.language import LanguageModel
from normrnn.train.language import build_model
from normrnn.train.rundir import MODEL, VOCABULARY, RunDirectory


def load(run: str | Path, device: str | torch.device = "cpu") -> LanguageModel:
    """The best model of a run, in eval mode; `.vocabulary` says what its ids mean.

    A UserError says what is wrong with a directory that holds no usable model.
    """
    directory = RunDirectory(Path(run))
    config = directory.config()
    if not directory.has(MODEL):
        raise UserError(f"{run} has no {MODEL} yet: the first validation writes it")
    weights = directory.read_tensors(MODEL)
    vocabulary = Vocabulary.from_json(directory.read(VOCABULARY))
    known = len(weights.get("embedding.weight", ()))
    if known != len(vocabulary):
        raise UserError(
            f"{VOCABULARY} of {run} has {len(vocabulary)} symbols, its network {known}: they do"
            " not belong together"
        )
    model = build_model(config, len(vocabulary))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{MODEL} of {run} does not fit its {'config.json'}: {reason}") from None
    model.vocabulary = vocabulary
    return model.to(device).eval()
