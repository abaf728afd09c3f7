"""The appendix's settings."""

from dataclasses import replace

import pytest

from normrnn.errors import UsageError
from normrnn.recipes import recipe
from normrnn.text.config import LanguageConfig


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
    assert replace(config, norm="hidden").norm == "hidden"
    with pytest.raises(UsageError, match="peephole is for cell lstm"):
        replace(config, model=replace(m, peephole="all"))
