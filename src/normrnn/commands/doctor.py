"""`normrnn doctor`: what is installed, what is in use, what is missing."""

import os
from json import dumps
from pathlib import Path
from typing import Any

from normrnn.extras import install_command, is_installed

EXTRAS = {
    "report": ("pictures, HTML reports, TensorBoard", ("matplotlib", "tensorboard", "jinja2")),
    "export": ("ONNX files", ("onnx", "onnxscript", "onnxruntime")),
    "search": ("normrnn search", ("optuna",)),
    "speech": ("reading of audio, alignment", ("kaldi-native-fbank", "soundfile", "pocketsphinx")),
    "gpu": ("Triton kernels", ("triton",)),
    "docs": ("documentation site", ("sphinx", "myst-nb", "furo", "nbclient", "ipykernel")),
}
"""Extra -> what it brings, and its packages."""


def command(json: bool = False) -> None:
    """Print versions, compiled kernels, threads, devices, caches and optional packages, and what a
    missing one would bring.

    Args:
        json: Print it as JSON.
    """
    found = findings()
    print(dumps(found, indent=2) if json else _text(found))


def findings() -> dict[str, Any]:
    """Return everything that is printed, as plain values."""
    import torch

    from normrnn.runs.environment import available_devices, environment

    machine = environment(torch.get_num_threads())
    return {
        **{name: machine[name] for name in ("normrnn", "python", "torch", "numpy", "system")},
        "processor": machine["cpu"],
        "cores": machine["cores"],
        "threads": machine["threads"],
        "kernels": machine["recurrence"],
        "devices": available_devices(),
        "cache": _cache(),
        "extras": {
            name: {"missing": [p for p in packages if not is_installed(p)], "brings": brings}
            for name, (brings, packages) in EXTRAS.items()
        },
    }


def _cache() -> dict[str, Any]:
    """Return where compiled kernels are kept, and their size in bytes."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return {"path": None, "bytes": 0}
    folder = base / "normrnn"
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {"path": str(folder), "bytes": sum(path.stat().st_size for path in files)}


def _text(found: dict[str, Any]) -> str:
    kernels, cache = found["kernels"], found["cache"]
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
        ("cache", f"{cache['path'] or 'none'}, {cache['bytes'] / 1e6:.0f} MB"),
    ]
    for name, extra in found["extras"].items():
        state = "installed"
        if extra["missing"]:
            state = f"missing {', '.join(extra['missing'])}: no {extra['brings']}"
            state += f"\n{'':<10}{install_command(name)}"
        lines.append((f"[{name}]", state))
    return "\n".join(f"{name:<10}{text}" for name, text in lines)
