"""One function per experiment, each returning one complete typed config.

>>> recipe("ptb-small").train.steps
20
"""

from collections.abc import Callable

from normrnn.config.base import Config
from normrnn.config.registry import read_config, recipe, recipes, register
from normrnn.recipes.arrays import adding, arrays, permuted_mnist, sequential_mnist
from normrnn.recipes.paper import PAPER
from normrnn.recipes.speech import (
    librispeech_mini,
    librispeech_mini_depth,
    librispeech_mini_small,
    wsj,
)
from normrnn.recipes.text import (
    ptb_char,
    ptb_large,
    ptb_medium,
    ptb_small,
    ptb_small_authors,
    ptb_small_regularised,
    quickstart,
)

__all__ = ["RECIPES", "read_config", "recipe", "summary", "usual_norms"]

_OURS: tuple[Callable[[], Config], ...] = (
    quickstart,
    ptb_small,
    ptb_small_authors,
    ptb_small_regularised,
    ptb_medium,
    ptb_large,
    ptb_char,
    wsj,
    librispeech_mini,
    librispeech_mini_small,
    librispeech_mini_depth,
    arrays,
    adding,
    sequential_mnist,
    permuted_mnist,
)
for _make in _OURS:
    register(_make)

RECIPES = recipes()


def summary(name: str) -> str:
    """What the recipe reproduces: the first line of its docstring, and the paper's figures."""
    first = (RECIPES[name].__doc__ or "").strip().splitlines()[0]
    figures = PAPER[name].words if name in PAPER else ""
    return f"{first.rstrip('.')} ({figures})." if figures else first


def usual_norms(config: Config) -> tuple[str, str]:
    """Return the pair that the paper compared in this experiment, or the one that suits the task.

    Sequence-wise statistics include later frames, which a language model must not see.
    """
    if config.recipe in PAPER:
        return "none", PAPER[config.recipe].norm
    return "none", "frame" if config.predicts_inputs else "sequence"
