"""The formats torch and safetensors: tensors, and a description of plain torch.nn modules.

Reading them executes nothing: torch's file is a dict of tensors and plain values that
`torch.load(..., weights_only=True)` reads, safetensors has the plain values as JSON.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.deploy.parts import Parts, Recurrent, without_norms
from normrnn.files import write_whole
from normrnn.nn.base import Normalised
from normrnn.runs.store import sealed_tensors

FORMAT = "normrnn export 1"


@dataclass(frozen=True)
class Portable:
    """A network of torch.nn's modules: their classes and arguments by name, and their weights."""

    modules: dict[str, dict[str, Any]]
    weights: dict[str, Tensor]
    values: dict[str, Tensor] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    usage: str = ""
    own: bool = False
    """Whether the user's own code builds the network around the modules."""

    @classmethod
    def of_parts(cls, parts: Parts) -> "Portable":
        """Describe one of our networks."""
        rnn, decoder = parts.recurrent, parts.decoder
        rnn.check_torch()
        modules = {"rnn": rnn.description()}
        weights = {f"rnn.{name}": value for name, value in rnn.plain.state_dict().items()}
        sizes = {"in_features": decoder.in_features, "out_features": decoder.out_features}
        modules["decoder"] = {"type": "Linear", "options": sizes}
        weights |= {f"decoder.{name}": p.detach() for name, p in decoder.named_parameters()}
        if parts.embedding is None:
            assert parts.mean is not None
            assert parts.scale is not None
            values = {"mean": parts.mean, "scale": parts.scale}
            return cls(modules, weights, values, parts.notes, _SPEECH.format(F=len(parts.mean)))
        rows, columns = parts.embedding.shape
        table = {"num_embeddings": rows, "embedding_dim": columns}
        modules["embedding"] = {"type": "Embedding", "options": table}
        weights["embedding.weight"] = parts.embedding
        return cls(modules, weights, {}, parts.notes, _TEXT)

    @classmethod
    def of_model(cls, model: nn.Module) -> "Portable":
        """Describe a user's own model; raise ValueError if it has no layer of ours that folds."""
        # A layer may have several names, and its weights are listed under each of them.
        every = model.named_modules(remove_duplicate=False)
        names = {n: m for n, m in every if isinstance(m, Normalised)}
        if not names:
            raise ValueError(f"{type(model).__name__} holds no layer of normrnn: nothing to fold")
        plain, modules = without_norms(model, lambda layer: Recurrent(layer).check_torch()), {}
        for name in names:
            layer = plain.get_submodule(name)
            assert isinstance(layer, nn.RNNBase)
            modules[name] = Recurrent(layer).description("dropout")
        weights = {name: value.detach() for name, value in plain.state_dict().items()}
        usage = _LENGTHS if any(layer.takes_lengths for layer in names.values()) else ""
        usage += _RESETS if any(layer.takes_resets for layer in names.values()) else ""
        return cls(modules, weights, own=True, usage=usage)

    def tensors(self) -> dict[str, Tensor]:
        """Return all on the CPU; a tensor that has two names is copied, to be written twice."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, value in (self.weights | self.values).items():
            value = value.cpu().contiguous()
            place = value.untyped_storage().data_ptr()
            found[name] = value.clone() if place in seen else value
            seen.add(place)
        return found


def write_torch(portable: Portable, path: Path) -> None:
    """Write a dict that `torch.load(weights_only=True)` reads."""
    tensors = portable.tensors()
    saved = {
        "format": FORMAT,
        "modules": portable.modules,
        "weights": {name: tensors[name] for name in portable.weights},
        "values": {name: tensors[name] for name in portable.values},
        "notes": dict(portable.notes),
    }
    buffer = io.BytesIO()  # torch's writer ends the process if a disk is full
    torch.save(saved, buffer)
    write_whole(path, buffer.getbuffer())


def write_safetensors(portable: Portable, path: Path) -> None:
    """Write the same as safetensors, with a checksum."""
    metadata = {"format": "pt", "normrnn": FORMAT, "modules": json.dumps(portable.modules)}
    content, _ = sealed_tensors(portable.tensors(), {**metadata, **portable.notes})
    write_whole(path, content)


def snippet(portable: Portable, name: str, format: str) -> str:
    """Return code that rebuilds the network from the file with torch alone."""
    read = (_OWN if portable.own else _OURS)[format].format(name=json.dumps(name))
    return f"{read}{portable.usage}"


_OURS = {
    "torch": """\
import torch

saved = torch.load({name}, weights_only=True)
model = torch.nn.ModuleDict(
    {{n: getattr(torch.nn, m["type"])(**m["options"]) for n, m in saved["modules"].items()}}
)
model.load_state_dict(saved["weights"])
model.requires_grad_(False)
values, notes = saved["values"], saved["notes"]
""",
    "safetensors": """\
import json, torch, safetensors

with safetensors.safe_open({name}, "pt") as file:
    notes, weights = file.metadata(), {{n: file.get_tensor(n) for n in file.keys()}}
values = {{n: weights.pop(n) for n in ("mean", "scale") if n in weights}}
modules = json.loads(notes["modules"]).items()
model = torch.nn.ModuleDict({{n: getattr(torch.nn, m["type"])(**m["options"]) for n, m in modules}})
model.load_state_dict(weights)
model.requires_grad_(False)
""",
}
_OWN = {
    "torch": """\
import torch

saved = torch.load({name}, weights_only=True)
model = MyModel()  # yours: any layers will do where it has recurrent ones
for name, m in saved["modules"].items():
    layer = getattr(torch.nn, m["type"])(**m["options"])
    model = model.set_submodule(name, layer) or model if name else layer
model.load_state_dict(saved["weights"])
model.eval()
""",
    "safetensors": """\
import json, torch, safetensors

with safetensors.safe_open({name}, "pt") as file:
    notes, weights = file.metadata(), {{n: file.get_tensor(n) for n in file.keys()}}
model = MyModel()  # yours: any layers will do where it has recurrent ones
for name, m in json.loads(notes["modules"]).items():
    layer = getattr(torch.nn, m["type"])(**m["options"])
    model = model.set_submodule(name, layer) or model if name else layer
model.load_state_dict(weights)
model.eval()
""",
}
_LENGTHS = """
# Where yours gave lengths= to a layer: nn.utils.rnn.pack_padded_sequence(x, lengths,
# enforce_sorted=False) before it, pad_packed_sequence after.
"""
_RESETS = """
# Where yours gave resets= to a layer: cut the sequence there, and give no state.
"""
_TEXT = """
tokens = torch.zeros(5, 2, dtype=torch.long)  # ids (T, B); notes["vocabulary"] says what they mean
output, state = model["rnn"](model["embedding"](tokens))  # the state: what comes next goes on from
logits = model["decoder"](output)  # (T, B, symbols)
"""
_SPEECH = """
features, lengths = torch.randn(50, 2, {F}), [50, 30]  # padded (T, B, F)
rows = (features - values["mean"]) * values["scale"]
packed = torch.nn.utils.rnn.pack_padded_sequence(rows, lengths, enforce_sorted=False)
output, _ = torch.nn.utils.rnn.pad_packed_sequence(model["rnn"](packed)[0])
log_posteriors = model["decoder"](output).log_softmax(-1)  # (T, B, states)
"""
