"""The network that a config describes, fresh or as a run trained it."""

from functools import partial
from hashlib import sha256

import torch

from normrnn.errors import UserError
from normrnn.runs.environment import built
from normrnn.runs.names import MODEL, VOCABULARY
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.model import LanguageModel
from normrnn.text.vocabulary import Vocabulary


def build_model(config: LanguageConfig, vocab_size: int) -> LanguageModel:
    """The network the config describes, freshly initialised."""
    m = config.model
    make = partial(
        LanguageModel,
        vocab_size,
        m.hidden,
        m.layers,
        cell=m.cell,
        embedding=m.embedding or None,
        **m.options(config.normalisation),
        time_steps=m.time_steps or None,
        init=m.init if m.initialiser == "uniform" else m.initialiser,
    )
    return built(make)


def load(run: RunDirectory, device: torch.device) -> LanguageModel:
    """The best model of a run with its vocabulary, in eval mode; UserError for what is none."""
    config = run.config(LanguageConfig)
    weights = run.weights()
    content = run.read(VOCABULARY)
    vocabulary = Vocabulary.from_json(content)
    known = len(weights.get("embedding.weight", ()))
    if known != len(vocabulary):
        raise UserError(
            f"{VOCABULARY} of {run.path} has {len(vocabulary)} symbols, its network {known}: they"
            " do not belong together"
        )
    written = run.tensors_metadata(MODEL).get(VOCABULARY)  # older runs have none
    if written not in (None, sha256(content).hexdigest()):
        raise UserError(
            f"{VOCABULARY} of {run.path} is not the one that its network was trained with"
        )
    model = build_model(config, len(vocabulary))
    run.fill(model, weights)
    model.vocabulary = vocabulary
    return model.to(device).eval()
