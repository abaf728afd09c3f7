"""One function per experiment, each returning one complete typed config.

>>> recipe("ptb-small").train.steps
20
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from normrnn.config.base import Config
from normrnn.config.jsonio import from_dict
from normrnn.errors import UsageError, UserError
from normrnn.recipes.char import ptb_char
from normrnn.recipes.ptb import ptb_large, ptb_medium, ptb_small, ptb_small_authors
from normrnn.recipes.quickstart import quickstart
from normrnn.recipes.speech import librispeech_mini, wsj

RECIPES: dict[str, Callable[[], Config]] = {
    "quickstart": quickstart,
    "ptb-small": ptb_small,
    "ptb-small-authors": ptb_small_authors,
    "ptb-medium": ptb_medium,
    "ptb-large": ptb_large,
    "ptb-char": ptb_char,
    "wsj": wsj,
    "librispeech-mini": librispeech_mini,
}


def recipe(name: str) -> Config:
    """The config of the named recipe; an unknown name is an error that lists the choices."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"no recipe {name!r}{hint} There are: {', '.join(RECIPES)}")
    return RECIPES[name]()


def read_config(values: Mapping[str, Any]) -> Config:
    """The config that a run saved; its recipe's name says of which kind it is."""
    name = values.get("recipe") if isinstance(values, Mapping) else None
    if not isinstance(name, str) or name not in RECIPES:
        raise UserError(f"config has a recipe {repr(name)[:60]} that is not known here")
    return from_dict(type(RECIPES[name]()), values)


def summary(name: str) -> str:
    """What the recipe reproduces: the first line of its docstring."""
    return (RECIPES[name].__doc__ or "").strip().splitlines()[0]
