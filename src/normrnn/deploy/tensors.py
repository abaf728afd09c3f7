"""The formats torch and safetensors: tensors, and a description of plain torch.nn modules.

A LiGRU, which torch does not have, is described as this package's, without normalisation.

Reading them executes nothing: torch's file is a dict of tensors and plain values that
`torch.load(..., weights_only=True)` reads, safetensors has the plain values as JSON.
"""

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.deploy.networks import Network, folded, recurrent, with_layers
from normrnn.files import write_whole
from normrnn.nn import LiGRU
from normrnn.nn.base import Normalised
from normrnn.runs.store import sealed_tensors

FORMAT = "normrnn export 1"


def write(network: nn.Module, path: Path, format: str) -> str:
    """Write a network of torch.nn's modules; return code that rebuilds it with torch alone.

    Of a user's own model the recurrent layers are described, since other code builds the rest.
    """
    layers = [layer for layer in recurrent(network).values() if isinstance(layer, Normalised)]
    if not layers:
        raise ValueError(f"{type(network).__name__} holds no layer of normrnn: nothing to fold")
    usage = network.usage if isinstance(network, Network) else None
    notes = dict(network.notes) if isinstance(network, Network) else {}
    plain = with_layers(
        network, lambda layer, name: folded(layer, name, keep=isinstance(layer, LiGRU))
    )
    weights = _separate({name: value.detach() for name, value in plain.state_dict().items()})
    modules = {name: _description(layer) for name, layer in recurrent(plain).items()}
    if usage is not None:
        modules |= {name: _description(module) for name, module in plain.named_children()}
    values = {n: weights.pop(n) for n in ("mean", "scale") if usage is not None and n in weights}
    if format == "torch":
        saved = {"format": FORMAT, "modules": modules, "weights": weights, "values": values}
        buffer = io.BytesIO()  # torch's writer ends the process if a disk is full
        torch.save({**saved, "notes": notes}, buffer)
        write_whole(path, buffer.getbuffer())
    else:
        metadata = {"format": "pt", "normrnn": FORMAT, "modules": json.dumps(modules)}
        *content, _ = sealed_tensors(weights | values, {**metadata, **notes})
        write_whole(path, *content)
    code = _READ[format].format(name=json.dumps(path.name))
    build = _MODEL if usage is None else _NETWORK
    if any(module["type"] == "LiGRU" for module in modules.values()):
        code = "import normrnn\n" + code
        build = build.replace("torch.nn, m", 'normrnn if m["type"] == "LiGRU" else torch.nn, m')
    code += build
    if usage is not None:
        return code + usage["tensors"]
    code += _LENGTHS if any(layer.takes_lengths for layer in layers) else ""
    return code + (_RESETS if any(layer.takes_resets for layer in layers) else "")


def _description(module: nn.Module) -> dict[str, Any]:
    """Return class name and arguments of a module of torch.nn."""
    if isinstance(module, nn.Linear):
        names = ["in_features", "out_features"]
    elif isinstance(module, nn.Embedding):
        names = ["num_embeddings", "embedding_dim"]
    else:
        names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional"]
        names += ["proj_size"] if module.proj_size else []
        names += ["nonlinearity"] if str(module.mode).startswith("RNN") else []
    options = {name: getattr(module, name) for name in names}
    if isinstance(module, LiGRU):
        options["norm"] = None
    return {"type": type(module).__name__, "options": options}


def _separate(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU; one that has two names is copied, to be written twice."""
    seen: set[int] = set()
    for name, value in weights.items():
        value = value.cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        weights[name] = value.clone() if place in seen else value
        seen.add(place)
    return weights


_READ = {
    "torch": """\
import torch

saved = torch.load({name}, weights_only=True)
modules, weights = saved["modules"].items(), saved["weights"]
values, notes = saved["values"], saved["notes"]
""",
    "safetensors": """\
import json, torch, safetensors

with safetensors.safe_open({name}, "pt") as file:
    notes, weights = file.metadata(), {{n: file.get_tensor(n) for n in file.keys()}}
modules = json.loads(notes["modules"]).items()
values = {{n: weights.pop(n) for n in ("mean", "scale") if n in weights}}
""",
}
_NETWORK = """\
model = torch.nn.ModuleDict({n: getattr(torch.nn, m["type"])(**m["options"]) for n, m in modules})
model.load_state_dict(weights)
model.eval().requires_grad_(False)
"""
_MODEL = """\
model = MyModel()  # yours: any layers will do where it has recurrent ones
for name, m in modules:
    layer = getattr(torch.nn, m["type"])(**m["options"])
    model = model.set_submodule(name, layer) or model if name else layer
model.load_state_dict({**weights, **values})
model.eval()
"""
_LENGTHS = """
# Where yours gave lengths= to a layer: nn.utils.rnn.pack_padded_sequence(x, lengths,
# enforce_sorted=False) before it, pad_packed_sequence after.
"""
_RESETS = """
# Where yours gave resets= to a layer: cut the sequence there, and give no state.
"""
