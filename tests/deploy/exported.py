"""Exports called as their users call them, without this library."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SUFFIXES = {"torch": "pt", "safetensors": "safetensors", "onnx": "onnx", "program": "pt2"}


def code(card: str) -> str:
    """The code of a model card."""
    (block,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return block


def run_without(program: str, folder: Path, *modules: str) -> str:
    """The output of a program where these modules are not installed."""
    block = f"import sys\nfor name in {modules!r}: sys.modules[name] = None\n"
    command = [sys.executable, "-I", "-W", "ignore", "-c", block + program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules(file: Path) -> tuple[nn.ModuleDict, dict[str, Tensor]]:
    """Plain modules, and values beside them."""
    if file.suffix == ".pt":
        saved = torch.load(file, weights_only=True)
        made, weights = saved["modules"], saved["weights"]
    else:
        with safetensors.safe_open(str(file), "pt") as opened:
            made = json.loads(opened.metadata()["modules"])
        weights = load_file(file)
    values = {name: weights.pop(name) for name in ("mean", "scale") if name in weights}
    found = {name: getattr(nn, m["type"])(**m["options"]) for name, m in made.items()}
    model: Any = nn.ModuleDict(found)
    model.load_state_dict(weights)
    return model.requires_grad_(False), values


def session(file: Path) -> Any:
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


def onnx_run(file: Path, **inputs: Tensor) -> list[Tensor]:
    """What onnxruntime computes of inputs by name."""
    found = session(file).run(None, {name: value.numpy() for name, value in inputs.items()})
    return [torch.from_numpy(value) for value in found]


def logits(file: Path, tokens: Tensor, state: tuple[Tensor, ...]) -> list[Tensor]:
    """Logits and the state after them, of any format."""
    if file.suffix == ".onnx":
        return onnx_run(file, tokens=tokens, **dict(zip(("h0", "c0"), state, strict=False)))
    if file.suffix == ".pt2":
        return list(torch.export.load(file).module()(tokens, *state))
    model, _ = modules(file)
    lstm = len(state) == 2
    output, after = model["rnn"](model["embedding"](tokens), state if lstm else state[0])
    return [model["decoder"](output), *(after if lstm else (after,))]


def log_posteriors(file: Path, features: Tensor, lengths: Tensor) -> Tensor:
    """Padded (T, B, C) of padded features, of any format."""
    if file.suffix == ".onnx":
        return onnx_run(file, features=features, lengths=lengths)[0]
    if file.suffix == ".pt2":
        return torch.export.load(file).module()(features, lengths)
    model, values = modules(file)
    rows = (features - values["mean"]) * values["scale"]
    packed = pack_padded_sequence(rows, lengths, enforce_sorted=False)
    padded, _ = pad_packed_sequence(model["rnn"](packed)[0])
    return model["decoder"](padded).log_softmax(-1)
