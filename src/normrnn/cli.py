"""The command line. Each command is a module that is imported when it is called.

`normrnn --help` must answer at once: nothing here or in `commands` imports torch at the top.
"""

import difflib
import importlib
import inspect
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from normrnn.errors import UsageError, UserError, is_out_of_memory
from normrnn.terminal import escaping
from normrnn.version import __version__

COMMANDS = {
    "train": "train a recipe, or resume a run",
    "recipes": "list the recipes and what they reproduce",
    "evaluate": "evaluate a trained run under all statistics",
    "report": "print the verdict on runs; write curves and tables",
    "verdict": "compare variants: which is better, which is faster",
    "compare": "train with several normalisations and compare them",
    "search": "search the settings of a recipe, every norm with each",
    "gradients": "gradients of the hidden states, step by step",
    "prepare": "check or make the data of a recipe",
    "posteriors": "write an acoustic model's outputs for Kaldi",
    "score": "score a text with a trained run",
    "sample": "draw text from a trained run",
    "export": "write a trained network for use without this library",
    "doctor": "what is installed, in use and missing on this machine",
    "info": "describe a run, an export or one of their files",
}
_MODULES = {  # of commands whose modules have another name
    **dict.fromkeys(("train", "compare", "search"), "training"),
    **dict.fromkeys(("doctor", "info", "recipes"), "about"),
    "verdict": "report",
    **dict.fromkeys(("evaluate", "score", "sample", "posteriors", "export", "gradients"), "models"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    code = guarded(_run, list(sys.argv[1:] if argv is None else argv))
    if argv is None:  # from here on Ctrl-C would only print a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


@escaping()
def guarded(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command and return its exit code; UserError is printed as one line."""
    try:
        code = command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has ended; drop what is left in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the shell convention: 128 + SIGPIPE
    except UserError as error:
        print(f"normrnn: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"normrnn: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        said = "out of memory" if is_out_of_memory(error) else _report(error, arguments)
        print(f"normrnn: {said}", file=sys.stderr)
        return 1


def _report(error: Exception, arguments: list[str]) -> str:
    """Write the stack trace to a file that only this user can read, since arguments may hold a
    password; return the message that names it."""
    import tempfile
    import traceback

    what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    about = f"normrnn {__version__}, Python {sys.version}\n{arguments}\n\n"
    text = about + "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(".txt", "normrnn-error-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode(errors="replace"))
    except OSError:
        return f"unexpected error ({what}); no file could be written for the details"
    return f"unexpected error ({what}); the details are in {path}"


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] == "--completion":
        print(importlib.import_module("normrnn.commands.about").completion())
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"\n\n{_usage()}"
        raise UsageError(f"no command {command!r}{hint}")
    module = importlib.import_module(f"normrnn.commands.{_MODULES.get(command, command)}")
    function = getattr(module, command)
    parameters = inspect.signature(function).parameters
    if "arguments" in parameters:
        return function(rest)
    # One that reads a run may need imports for it.
    importlib.import_module("normrnn.commands.options").parse(
        function, command, rest, imports="run" in parameters
    )
    return 0


def _usage() -> str:
    lines = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    return f"""\
usage: normrnn COMMAND ...

Batch-normalised recurrent networks (Laurent et al. 2015).

{lines}

normrnn COMMAND --help lists the options of a command.
eval "$(normrnn --completion)" completes words in bash and zsh."""


if __name__ == "__main__":
    main()
