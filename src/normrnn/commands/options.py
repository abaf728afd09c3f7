"""Command lines: the recipe or function that comes first, import paths, and options by tyro."""

import argparse
import functools
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import Positional, arg

from normrnn.config.base import Config
from normrnn.config.registry import is_import_path, use, use_norms
from normrnn.errors import UsageError
from normrnn.experiments.training import import_names, resolve
from normrnn.recipes import RECIPES, summary
from normrnn.terminal import below

T = TypeVar("T")
IMPORTS = (  # in the help of commands that import
    "MODULE:NAME is a user-defined recipe or norm. --path DIR says where its module is; --use"
    " MODULE:NAME imports what a run was trained with."
)

Directory = Annotated[Path | None, arg(metavar="DIR")]
RunArgument = Annotated[Positional[Path], arg(metavar="RUN")]


def split_recipe(command: str, arguments: list[str], runs: str = "") -> tuple[Any, list[str]]:
    """Return the config of the recipe named first, and the remaining arguments.

    Of a command that takes run directories, `runs` is a line of help on that, and the config may be
    that of a run. For `compare` the first argument may also name a training function, which is
    returned.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        usage = f"usage: normrnn {command} RECIPE [OPTIONS]"
        usage += f"\n       {runs}" if runs else ""
        listed = "\n".join(map(entry, RECIPES))
        text = f"{usage}\n\n{listed}\n\n{IMPORTS}\n\nexample: normrnn {command} quickstart\n"
        text += f"normrnn {command} RECIPE --help lists the options."
        if not arguments:
            raise UsageError(f"{command} needs a recipe\n\n{text}")
        print(text)
        raise SystemExit(0)
    name, *rest = arguments
    rest, path = import_named(rest)
    if runs and not is_import_path(name) and name not in RECIPES and Path(name).is_dir():
        from normrnn.runs.store import RunDirectory

        return RunDirectory(Path(name)).config(), rest
    found = resolve(name, path)
    if command != "compare" and not isinstance(found, Config):
        use(name, path)  # raises
    return found, rest


def entry(name: str) -> str:
    """Return what a recipe reproduces, in a line or two."""
    start = f"{name:<23} "
    return textwrap.fill(summary(name), 80, initial_indent=start, subsequent_indent=" " * 24)


def import_named(arguments: list[str]) -> tuple[list[str], str | None]:
    """Import what --use, --norm and --norms name by import path, from the directory --path.

    Return the arguments without --use and --path, with normalisations by their own names, and the
    directory.

    >>> import_named(["RUN", "--norms", "none,frame", "--path=d", "-o", "x"])
    (['--norms', 'none,frame', 'RUN', '-o', 'x'], 'd')
    """
    parser = argparse.ArgumentParser("normrnn", usage="", add_help=False, allow_abbrev=False)
    for option in ("--path", "--use", "--norm", "--norms"):
        parser.add_argument(option)
    named, rest = parser.parse_known_args(arguments)
    import_names(named.use, named.path)
    for option in ("norm", "norms"):
        if (names := getattr(named, option)) is not None:
            rest = [f"--{option}", use_norms(names, named.path), *rest]
    return rest, named.path


def parse(
    function: Callable[..., T], command: str, arguments: list[str], imports: bool = False
) -> T:
    """Call `function` with what tyro reads from the arguments; `imports`: which may have import
    paths."""
    words = [_expanded(word) for word in (import_named(arguments)[0] if imports else arguments)]
    for option in ("--out", "--output", "-o"):
        if f"{option}=" in words or (option, "") in pairwise(words):
            raise UsageError(f"{option} needs a name")

    @functools.wraps(function)
    def parsed(*args: Any, **kwargs: Any) -> Callable[[], T]:
        return functools.partial(function, *args, **kwargs)

    text = (inspect.getdoc(function) or "").partition("Args:")[0].strip()
    text += f"\n\n{IMPORTS}" if imports else ""
    problem = io.StringIO()  # not a terminal: printed below without colours, and escaped
    try:
        with redirect_stderr(problem), redirect_stdout(below(sys.stdout)):  # help has colours
            call = tyro.cli(parsed, args=words, prog=f"normrnn {command}", description=text)
    except SystemExit:
        print(problem.getvalue(), end="", file=sys.stderr)
        raise
    return call()  # type: ignore[operator]


def _expanded(argument: str) -> str:
    """Expand ~ also in `--out=~/runs`, which a shell leaves alone.

    >>> _expanded("--out=~no-such-user/runs")
    '--out=~no-such-user/runs'
    """
    name, equals, value = argument.partition("=")
    if equals and name.startswith("--"):
        return f"{name}={os.path.expanduser(value)}"  # noqa: PTH111  keeps unknown users
    return os.path.expanduser(argument)  # noqa: PTH111
