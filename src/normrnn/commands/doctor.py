"""`normrnn doctor`: what is installed, what is in use, what is missing."""

from json import dumps
from typing import Any

from normrnn.extras import extras, install_command, missing


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
    print(dumps(found, indent=2) if json else _text(found))


def _text(found: dict[str, Any]) -> str:
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
