"""A recipe's config with the flags of the command line on top."""

import contextlib
import functools
import io
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar

import tyro
from tyro.conf import Suppress

from normrnn.config.base import Config
from normrnn.errors import UsageError
from normrnn.recipes import RECIPES, recipe, summary
from normrnn.terminal import below

T = TypeVar("T")
_PLAIN = {
    "invalid literal for int() with base 10:": "no whole number",
    "could not convert string to float:": "no number",
}
_FILES = ("--out", "--output", "-o", "--png")


def split_recipe(command: str, arguments: list[str], runs: str = "") -> tuple[Config, list[str]]:
    """Return the config of the recipe named first, and the remaining arguments.

    `runs` is a line of help on what the command does with run directories, if it takes them.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        listed = "\n".join(
            textwrap.fill(
                summary(name), 80, initial_indent=f"  {name:<22} ", subsequent_indent=" " * 25
            )
            for name in RECIPES
        )
        usage = f"usage: normrnn {command} RECIPE [OPTIONS]"
        usage += f"\n       {runs}" if runs else ""
        text = f"{usage}\n\n{listed}\n\nnormrnn {command} RECIPE --help lists the options."
        if not arguments:
            raise UsageError(f"{command} needs a recipe\n\n{text}")
        print(text)
        raise SystemExit(0)
    return recipe(arguments[0]), arguments[1:]


def without_norm(config: Config) -> Config:
    """Return the config as a class without the option `norm`, for commands that take --norms."""
    kind = type(config)
    norm = ("norm", Suppress[str], field(default=config.norm))
    hidden = make_dataclass(kind.__name__, [norm], bases=(kind,), frozen=True, kw_only=True)
    return hidden(**{f.name: getattr(config, f.name) for f in fields(config)})


def parse(function: Callable[..., T], command: str, arguments: list[str]) -> T:
    """Call `function` with what tyro reads from the arguments; UsageError on a mistake."""
    arguments = [_at_home(argument) for argument in arguments]
    for name, value in zip(arguments, [*arguments[1:], None], strict=False):
        if (name in _FILES and value == "") or name in [f"{file}=" for file in _FILES]:
            raise UsageError(f"{name.rstrip('=')} needs a name")
    spoken = io.StringIO()
    with contextlib.ExitStack() as quiet:
        quiet.enter_context(contextlib.redirect_stderr(spoken))
        # tyro colours its help.
        quiet.enter_context(contextlib.redirect_stdout(below(sys.stdout)))

        @functools.wraps(function)
        def understood(*args: Any, **kwargs: Any) -> T:
            quiet.close()  # what the command itself says is for the user as it stands
            return function(*args, **kwargs)

        try:
            return tyro.cli(understood, args=arguments, prog=f"normrnn {command}")
        except SystemExit as end:
            if spoken.getvalue() and end.code:
                raise UsageError(_sentence(spoken.getvalue(), command)) from None
            raise


def _at_home(argument: str) -> str:
    """A shell leaves the ~ of `--out=~/runs` alone.

    >>> _at_home("--out=~no-such-user/runs")
    '--out=~no-such-user/runs'
    """
    name, equals, value = argument.partition("=")
    if equals and name.startswith("--") and value.startswith("~"):
        return f"{name}={os.path.expanduser(value)}"  # noqa: PTH111  another's home stays as it is
    return os.path.expanduser(argument) if argument.startswith("~") else argument  # noqa: PTH111


def _sentence(box: str, command: str) -> str:
    """tyro explains a mistake in a box of several parts; this is the gist of it.

    >>> _sentence("╭─ Oh ─╮\\n│ Missing │\\n│ value. │\\n│ ──── │\\n│ For more │\\n╰──╯", "train")
    'missing value; normrnn train --help lists the options'
    """
    parts: list[list[str]] = [[]]  # the title, the problem, similar names, where to read on
    for line in box.splitlines():
        text = line.strip("│╭╮╰╯ ")  # without these where the terminal has plain ASCII only
        if not text.strip("─-") or line.startswith("╭"):
            parts.append([])
        else:
            parts[-1].append(text)
    problem = " ".join(parts[1]).rstrip(".").removeprefix("Error parsing ")
    if missing := _missing(box):
        problem = f"missing {', '.join(missing)}"
    for python, plain in _PLAIN.items():
        problem = re.sub(f"{re.escape(python)} (.*)", rf"\1 is {plain}", problem)
    near = [lines[1].split()[0] for lines in parts if lines and lines[0].startswith("Perhaps you")]
    meant = f"; perhaps {near[0].rstrip(',')}?" if near else ";"
    return f"{problem[:1].lower()}{problem[1:]}{meant} normrnn {command} --help lists the options"


def _missing(box: str) -> list[str]:
    """Names of the required options that a call lacks, without their help.

    >>> _missing("│ Missing from normrnn export: │\\n│     --out PATH │\\n│         A file. │")
    ['--out PATH']
    """
    lines = [(len(line) - len(line.lstrip("│ ")), line.strip("│ ")) for line in box.splitlines()]
    start = next((i for i, (_, text) in enumerate(lines) if text.startswith("Missing from ")), None)
    if start is None:
        return []
    listed = itertools.takewhile(lambda line: line[1].strip("─-"), lines[start:])
    return [text for indent, text in listed if indent == lines[start][0] + 4]
