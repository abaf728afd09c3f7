"""Commands that describe: doctor, recipes, info and the words for the tab key."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from normrnn.cli import COMMANDS
from normrnn.commands.options import entry
from normrnn.extras import extras, install_command, missing
from normrnn.recipes import RECIPES


def doctor(json: bool = False) -> None:
    """Print versions, compiled kernels, threads, devices and optional packages.

    Args:
        json: Print it as JSON.
    """
    import torch

    from normrnn.runs.environment import available_devices, environment

    machine = environment(torch.get_num_threads())
    found = {
        **{name: machine[name] for name in ("normrnn", "python", "torch", "numpy", "system")},
        **{"processor": machine["cpu"], "cores": machine["cores"], "threads": machine["threads"]},
        "kernels": machine["recurrence"],
        "devices": available_devices(),
        "extras": {name: {"missing": missing(name)} for name in extras()},
    }
    print(dumps(found, indent=2) if json else _doctor_text(found))


def _doctor_text(found: dict[str, Any]) -> str:
    kernels = found["kernels"]
    if kernels.get("kernels") == "torch":
        in_use = "not in use: install a C compiler (or unset NORMRNN_NATIVE=0) for faster layers"
    else:
        threads = "on torch's threads" if kernels.get("threads") else "on one thread"
        in_use = f"{kernels['kernels']}, {threads}"
    lines = [
        ("normrnn", f"{found['normrnn']}, Python {found['python']}"),
        ("torch", f"{found['torch']}, numpy {found['numpy']}"),
        ("machine", f"{found['processor']}, {found['system']}"),
        ("threads", f"{found['threads']} of {found['cores']} cores"),
        ("devices", ", ".join(found["devices"])),
        ("kernels", in_use),
    ]
    for name, extra in found["extras"].items():
        state = "installed"
        if extra["missing"]:
            state = f"missing {', '.join(extra['missing'])}: {install_command(name)}"
        lines.append((f"[{name}]", state))
    return "\n".join(f"{name:<10}{text}" for name, text in lines)


def info(path: Annotated[Positional[Path], arg(metavar="PATH")]) -> None:
    """What a trained network is, how it was trained, what it reaches and how to load it.

    Args:
        path: A run directory, a directory that `normrnn export` made, or one of their files.
    """
    from normrnn.deploy.card import info

    print(info(path), end="")


def recipes() -> None:
    """List the recipes: what each reproduces, the length of training and whether it needs data."""
    for name, recipe in RECIPES.items():
        config = recipe()
        needs = "" if config.data else ", --data needed"
        print(f"{entry(name)}\n{' ' * 24}{config.epochs} epochs{needs}")


_COMPLETION = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_normrnn() {
  local word="${COMP_WORDS[COMP_CWORD]}" second="${COMP_WORDS[2]}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="COMMANDS"
  elif [ "${word#-}" != "$word" ]; then
    [ "${second#-}" != "$second" ] && second=""
    words="$(normrnn "${COMP_WORDS[1]}" ${second:+"$second"} --help 2>/dev/null |
      grep -oE -e '--[a-z][a-z.-]*' | sort -u)"
  elif [ "$COMP_CWORD" -eq 2 ]; then
    case "${COMP_WORDS[1]}" in train|compare|search|gradients) words="RECIPES";; esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _normrnn normrnn"""


def completion() -> str:
    """Return shell code that completes commands, recipes and options; elsewhere file names."""
    return _COMPLETION.replace("COMMANDS", " ".join(COMMANDS)).replace("RECIPES", " ".join(RECIPES))
