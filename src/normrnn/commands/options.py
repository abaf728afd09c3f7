"""A recipe's config with the flags of the command line on top."""

import functools
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import Positional, Suppress, arg

from normrnn.config.base import Config
from normrnn.config.extensions import find, is_import_path, is_recipe, use
from normrnn.config.jsonio import to_dict
from normrnn.errors import UsageError
from normrnn.recipes import RECIPES, read_config, recipe, summary
from normrnn.terminal import below

T = TypeVar("T")
EXAMPLES = {
    "train": "normrnn train quickstart --norm frame --epochs 3 --out runs/one",
    "compare": "normrnn compare arrays --data mine.npz --norms none,sequence --seeds 3",
    "search": "normrnn search quickstart --norms none,frame --trials 20 --epochs 3",
    "evaluate": "normrnn evaluate runs/one",
    "report": "normrnn report runs/mine -o report.html",
    "verdict": "normrnn verdict runs/mine --details",
    "gradients": "normrnn gradients runs/none runs/hidden -o gradients.json",
    "prepare ptb": "normrnn prepare ptb DIR",
    "prepare librispeech": "normrnn prepare librispeech LibriSpeech/dev-clean --out data/speech",
    "prepare kaldi": "normrnn prepare kaldi --data data/train --ali exp/tri4b_ali --out data/wsj",
    "posteriors": "normrnn posteriors runs/one --data data/dev --out exp/dev --priors",
    "score": "normrnn score runs/one text.txt",
    "sample": "normrnn sample runs/one --tokens 50",
    "export": "normrnn export runs/one -o model --format onnx",
    "info": "normrnn info runs/one",
    "doctor": "normrnn doctor --json > machine.json",
    "recipes": "normrnn recipes",
}
"""Command -> an example, shown in its help."""
_FILES = ("--out", "--output", "-o")


Directory = Annotated[Path | None, arg(metavar="DIR")]
Use = Annotated[str, arg(metavar="MODULE:NAME")]
RunArgument = Annotated[Positional[Path], arg(metavar="RUN")]


def split_recipe(
    command: str,
    arguments: list[str],
    runs: str = "",
    *,
    run_directory: bool = False,
    hide_norm: bool = False,
) -> tuple[Config, list[str]]:
    """Return the config of the recipe named first, and the remaining arguments.

    `runs` is a line of help on what the command does with run directories, if it takes them; with
    `run_directory` the config may be that of a run. `hide_norm` hides the option --norm, for
    commands that take --norms.
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
        own = "  MODULE:NAME            A recipe of your own; --path DIR says where it is."
        text = f"{usage}\n\n{listed}\n{own}\n\nexample: {EXAMPLES[command]}\n"
        text += f"normrnn {command} RECIPE --help lists the options."
        if not arguments:
            raise UsageError(f"{command} needs a recipe\n\n{text}")
        print(text)
        raise SystemExit(0)
    name, *rest = arguments
    rest = import_named(rest)
    if is_import_path(name):
        use(name, _value(rest, "--path"))
    elif run_directory and name not in RECIPES and Path(name).is_dir():
        from normrnn.runs.store import RunDirectory

        return RunDirectory(Path(name)).config(), rest
    config = recipe(name)
    return _without_norm(config) if hide_norm else config, rest


def named_function(arguments: list[str]) -> str:
    """Return the import path that comes first, if it is that of a training function."""
    name = arguments[0] if arguments else ""
    if not is_import_path(name):
        return ""
    found = find(name, _value(arguments, "--path"))
    return name if callable(found) and not is_recipe(found) else ""


def import_named(arguments: list[str]) -> list[str]:
    """Import what --use, --norm and --norms name by import path; return the arguments with the
    normalisations by their own names."""
    path, result = _value(arguments, "--path"), list(arguments)
    for option in ("--use", "--norm", "--norms"):
        given = _value(arguments, option) or ""
        names = given.split(",")
        own = {name: use(name, path) for name in names if is_import_path(name)}
        if own and option != "--use":
            text = ",".join(own.get(name, name) for name in names)
            result = [a.replace(given, text) if a.endswith(given) else a for a in result]
    return result


def _value(arguments: list[str], option: str) -> str | None:
    """Return the value of an option, before tyro has parsed the arguments.

    >>> _value(["--seeds", "2", "--path=a"], "--path"), _value(["--path", "b"], "--path")
    ('a', 'b')
    """
    for name, value in zip(arguments, [*arguments[1:], None], strict=False):
        if name == option:
            return value
        if name.startswith(f"{option}="):
            return name.partition("=")[2]
    return None


def _without_norm(config: Config) -> Config:
    """Return the config as a class without the option `norm`."""
    kind = type(config)
    norm = ("norm", Suppress[str], field(default=config.norm))
    hidden = make_dataclass(kind.__name__, [norm], bases=(kind,), frozen=True, kw_only=True)
    return hidden(**{f.name: getattr(config, f.name) for f in fields(config)})


def chosen_config(config: Config) -> Config:
    """Return what was parsed from a config without the option `norm`, in its own class."""
    return read_config(to_dict(config))


def parse(function: Callable[..., T], command: str, arguments: list[str], more: str = "") -> T:
    """Call `function` with what tyro reads from the arguments; `more` is a part of the help."""
    words = [_expanded(argument) for argument in arguments]
    for name, value in zip(words, [*words[1:], None], strict=False):
        if (name in _FILES and value == "") or name in [f"{file}=" for file in _FILES]:
            raise UsageError(f"{name.rstrip('=')} needs a name")

    @functools.wraps(function)
    def parsed(*args: Any, **kwargs: Any) -> Callable[[], T]:
        return functools.partial(function, *args, **kwargs)

    text = (inspect.getdoc(function) or "").partition("Args:")[0].strip()
    text += f"\n\n{more}" if more else ""
    example = EXAMPLES.get(command) or EXAMPLES.get(command.split()[0])
    problem = io.StringIO()  # not a terminal: printed below without colours, and escaped
    try:
        with redirect_stderr(problem), redirect_stdout(below(sys.stdout)):  # help has colours
            call = tyro.cli(
                parsed,
                args=words,
                prog=f"normrnn {command}",
                description=f"{text}\n\nexample: {example}" if example else None,
            )
    except SystemExit:
        print(problem.getvalue(), end="", file=sys.stderr)
        raise
    return call()  # type: ignore[operator]


def run_command(function: Callable[..., None], command: str, arguments: list[str]) -> None:
    """Run a command whose options are the arguments of a function."""
    reads_run = "run" in inspect.signature(function).parameters
    (parse_of_run if reads_run else parse)(function, command, arguments)


def parse_of_run(function: Callable[..., T], command: str, arguments: list[str]) -> T:
    """Parse the options of a command that reads runs, which may be of a user's own recipe."""
    more = (
        "Of a run with a recipe or norm of your own: --use MODULE:NAME imports it, --path DIR says"
        " where its module is."
    )
    return parse(function, command, _without_imports(import_named(arguments)), more)


def _without_imports(arguments: list[str]) -> list[str]:
    """Return the arguments without --use and --path, which `import_named` has read.

    >>> _without_imports(["RUN", "--use", "m:f", "--path=d", "-o", "x"])
    ['RUN', '-o', 'x']
    """
    kept, names = [], ("--use", "--path")
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument.startswith(tuple(f"{name}=" for name in names)):
            kept += [] if argument in names or before in names else [argument]
    return kept


def _expanded(argument: str) -> str:
    """Expand ~ also in `--out=~/runs`, which a shell leaves alone.

    >>> _expanded("--out=~no-such-user/runs")
    '--out=~no-such-user/runs'
    """
    name, equals, value = argument.partition("=")
    if equals and name.startswith("--"):
        return f"{name}={os.path.expanduser(value)}"  # noqa: PTH111  keeps unknown users
    return os.path.expanduser(argument)  # noqa: PTH111
