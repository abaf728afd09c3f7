"""The paper's settings, field by field."""

from dataclasses import replace

import pytest

from normrnn import recipes
from normrnn.recipes import RECIPES, recipe
from normrnn.text.config import LanguageConfig

PAPER = {
    # hidden, init, dropout, steps, clip, epochs, decay, after epoch
    "ptb-small": (200, 0.1, 0.0, 20, 10, 15, 2.0, 6),
    "ptb-medium": (650, 0.05, 0.5, 35, 5, 40, 1.2, 6),
    "ptb-large": (1500, 0.04, 0.65, 35, 5, 55, 1.15, 15),
    "ptb-small-authors": (200, 0.1, 0.0, 20, 5, 5, 2.0, 4),
}


@pytest.mark.parametrize("name", PAPER)
def test_penn_treebank_settings(name: str) -> None:
    config = recipe(name)
    assert isinstance(config, LanguageConfig)
    m, o, t = config.model, config.optimizer, config.train
    settings = (m.hidden, m.init, m.dropout, t.steps, o.clip_norm, config.epochs, o.decay)
    assert (*settings, o.decay_after) == PAPER[name]
    assert (m.layers, m.peephole, m.gamma, t.batch) == (2, "none", None, 32)
    assert (o.name, o.lr, o.momentum, o.weight_decay) == ("sgd", 1.0, 0.0, 0.0)
    assert o.loss == "sum_over_time"
    assert config.norm == "none"


def test_the_appendix() -> None:
    """The best setting of the paper's baseline; --norm hidden is all the other arm needs."""
    config = recipe("ptb-char")
    assert isinstance(config, LanguageConfig)
    m, o, t = config.model, config.optimizer, config.train
    assert (m.cell, m.hidden, m.layers, m.embedding) == ("rnn", 250, 3, 250)
    assert (m.initialiser, m.dropout, m.time_steps, t.steps) == ("glorot", 0, 100, 100)
    assert (o.name, o.lr, o.momentum, t.batch, o.loss) == ("sgd", 0.42, 0.95, 32, "mean")
    assert (o.clip_norm, o.decay, config.epochs) == (0, 1, 20)
    assert (config.text.level, config.text.unknown, t.reading) == ("char", False, "sequences")


def test_variants_of_the_small_network_differ_from_it_as_they_say() -> None:
    small, authors = recipes.ptb_small(), recipes.ptb_small_authors()
    regularised = recipes.ptb_small_regularised()
    assert (small.train.segments, authors.train.segments, authors.model.eps) == (1, 2, 1e-6)
    m = regularised.model
    assert m.dropout_kind == "locked"
    assert min(m.dropout, m.weight_drop) > 0
    assert replace(m, dropout=0.0, dropout_kind="element", weight_drop=0.0) == small.model


def test_wsj_settings() -> None:
    config = recipes.wsj()
    m, o, t = config.model, config.optimizer, config.train
    assert (m.layers, m.hidden, m.bidirectional, m.peephole) == (5, 250, True, "output")
    assert (o.name, o.lr, o.momentum, o.loss) == ("sgd", 1e-4, 0.9, "sum_over_time")
    assert (o.clip_norm, o.decay, o.weight_decay) == (0.0, 1.0, 0.0)  # a fixed learning rate
    assert (t.batch, t.max_frames, t.piece_frames) == (24, 1300, 0)
    assert config.norm == "none"


def test_speech_in_the_small_differs_from_the_paper_as_it_says() -> None:
    paper, mini = recipes.wsj(), recipes.librispeech_mini()
    small, depth = recipes.librispeech_mini_small(), recipe("librispeech-mini-depth")
    assert replace(mini.model, peephole="output") == paper.model
    assert (mini.train.max_frames, mini.train.piece_frames) == (0, 400)
    assert (small.model.hidden, small.model.layers) == (128, 3)
    same = replace(small.model, hidden=mini.model.hidden, layers=mini.model.layers)
    assert replace(small, recipe=mini.recipe, model=same) == mini
    evaluation = replace(small.evaluation, test_speakers=3)
    assert replace(small, recipe=depth.recipe, evaluation=evaluation) == depth


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_knows_its_name_and_what_it_reproduces(name: str) -> None:
    assert recipe(name).recipe == name
    assert len(recipes.summary(name)) > 20
