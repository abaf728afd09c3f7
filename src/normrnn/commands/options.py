"""A recipe's config with the flags of the command line on top."""

from collections.abc import Callable
from typing import TypeVar

import tyro

from normrnn.errors import UsageError
from normrnn.recipes import RECIPES, recipe, summary
from normrnn.recipes.config import Config

T = TypeVar("T")


def split_recipe(command: str, arguments: list[str]) -> tuple[Config, list[str]]:
    """The config of the recipe named first, and the remaining arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<18} {summary(name)}" for name in RECIPES)
        usage = f"usage: normrnn {command} RECIPE [OPTIONS]"
        text = f"{usage}\n\n{listed}\n\nnormrnn {command} RECIPE --help lists the options."
        if not arguments:
            raise UsageError(f"{command} needs a recipe\n\n{text}")
        print(text)
        raise SystemExit(0)
    return recipe(arguments[0]), arguments[1:]


def parse(function: Callable[..., T], command: str, arguments: list[str]) -> T:
    """Call `function` with what tyro reads from the arguments; exit code 2 on a mistake."""
    return tyro.cli(function, args=arguments, prog=f"normrnn {command}")
