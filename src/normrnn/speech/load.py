"""The network that a config describes, fresh or as a run trained it."""

from functools import partial

import torch

from normrnn.runs.environment import built
from normrnn.runs.store import RunDirectory
from normrnn.speech.config import SpeechConfig
from normrnn.speech.model import AcousticModel


def build_model(config: SpeechConfig, dim: int, classes: int) -> AcousticModel:
    """The network the config describes, freshly initialised."""
    m = config.model
    make = partial(
        AcousticModel,
        dim,
        classes,
        m.hidden,
        m.layers,
        bidirectional=m.bidirectional,
        **m.options(config.normalisation),
        count_padding=m.count_padding,
    )
    return built(make)


def load(run: RunDirectory, device: torch.device) -> AcousticModel:
    """The best model of a run, in eval mode; UserError for what is none."""
    config, weights = run.config(SpeechConfig), run.weights()
    dim, classes = (len(weights.get(name, ())) for name in ("mean", "label_counts"))
    model = build_model(config, dim, classes)
    run.fill(model, weights)
    return model.to(device).eval()
