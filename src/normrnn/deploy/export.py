"""Write a run, one of our networks or a user's own model to a file, with a model card beside it."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.config.registry import task_of
from normrnn.deploy.card import CARD, SUFFIXES, ModelCard, describe_run, read_card
from normrnn.deploy.networks import Exportable, folded, recurrent, with_layers
from normrnn.errors import UsageError
from normrnn.files import expanded, write_whole
from normrnn.nn import LiGRU
from normrnn.nn.base import Normalised
from normrnn.runs.environment import named_device
from normrnn.runs.records import CHECKPOINT, CONFIG, MODEL
from normrnn.runs.store import RunDirectory, sealed_tensors

FORMAT = "normrnn export 1"
_OPTIONS = {
    nn.Linear: ["in_features", "out_features"],
    nn.Embedding: ["num_embeddings", "embedding_dim"],
    nn.RNNBase: ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional"],
}
_READ = {
    "torch": """\
import torch

saved = torch.load({name}, weights_only=True)
modules, weights, notes = saved["modules"].items(), saved["weights"], saved["notes"]
""",
    "safetensors": """\
import json, torch, safetensors

with safetensors.safe_open({name}, "pt") as file:
    notes, weights = file.metadata(), {{n: file.get_tensor(n) for n in file.keys()}}
modules = json.loads(notes["modules"]).items()
""",
}
_VALUES = """\
values = {n: weights.pop(n) for n in ("mean", "scale") if n in weights}
"""
_BUILD = """\
model = {model}
for name, m in modules:
    layer = getattr({library}, m["type"])(**m["options"])
    model = model.set_submodule(name, layer) or model if name else layer
model.load_state_dict(weights)
model.eval().requires_grad_(False)
"""


def export(
    model: nn.Module | str | Path,
    path: str | Path,
    format: str | None = None,
    *,
    example: tuple[Any, ...] | Tensor | None = None,
    dynamic: Any = None,
    quantize: str | None = None,
    opset: int | None = None,
) -> Path:
    """Write a trained network for use without this library, and a model card beside it.

    Args:
        model: a run directory, one of its networks, or any model that holds our layers; its
            normalisation is folded into plain weights, with the statistics it has, where it folds.
        path: a file with the format's suffix, or a directory to make for ``model`` with that
            suffix and the card, README.md.
        format: ``"torch"`` (``.pt``), a dict that ``torch.load(weights_only=True)`` reads;
            ``"safetensors"``; ``"onnx"``, with ONNX's own recurrent operators, or a Scan for layers
            that do not fold; ``"program"`` (``.pt2``), torch.export's. Default:
            that of the suffix of ``path``, ``"torch"`` for a directory.
        example: arguments of your own model, for onnx and program: it is traced with them. A
            tuple, or a tensor if that is the only one.
        dynamic: the axes of those that may change by the argument's name,
            ``{"x": {0: "T", 1: "B"}}``; the parts of a tuple are ``state.0``, ``state.1``. The
            default is the first two of every tensor but features, the batch of a state (layers, B,
            H) in a tuple. Also what torch.export calls ``dynamic_shapes``.
        quantize: ``"int8"``, for onnx: weights in a quarter of the space.
        opset: the version of ONNX's operators, for onnx, from 18, the default.

    Returns:
        The file; its card says how to load it.

    What a format cannot express is a ValueError with the reason and what to do instead.

    >>> import tempfile, torch, normrnn
    >>> layer = normrnn.LSTM(3, 4, norm=None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = export(layer, Path(folder) / "layer.pt")
    ...     sorted(torch.load(file, weights_only=True)["weights"])
    ['bias_hh_l0', 'bias_ih_l0', 'weight_hh_l0', 'weight_ih_l0']
    """
    path = expanded(path)
    names = {suffix: name for name, suffix in SUFFIXES.items()}
    format = format or names.get(path.suffix, "torch")
    if format not in SUFFIXES:
        raise ValueError(f"unknown format={format!r}: choose one of {', '.join(SUFFIXES)}")
    if quantize not in (None, "int8") or (quantize and format != "onnx"):
        raise ValueError(f"quantize={quantize!r} with format={format!r}: 'int8' is for 'onnx'")
    if opset is not None and format != "onnx":
        raise ValueError(f"opset={opset} with format={format!r}: it is for 'onnx'")
    file, card = _target(path, SUFFIXES[format])
    if isinstance(model, nn.Module):
        network = getattr(model, "_orig_mod", model)  # a compiled model has other names
        kind, count = type(network).__name__, sum(p.numel() for p in network.parameters())
        summary = f"`{kind}`, {count:,} parameters before folding; its layers are plain ones."
        about = ModelCard(kind, {"Model": summary})
    else:
        run = RunDirectory(expanded(model))
        network = task_of(run.config()).load(run, named_device("cpu"))
        about = describe_run(run)
    make: Any = getattr(network, "exportable", lambda: Exportable(network))
    source: Exportable = make()
    if example is not None:
        source.example = example if type(example) is tuple else (example,)
    source.dynamic = source.dynamic if dynamic is None else dynamic
    if format in ("torch", "safetensors"):
        content, code = _tensors(source, format, file.name)
    else:
        from normrnn.deploy import traced  # imports the compiler: seconds

        if source.example is None:
            raise ValueError(f"format={format!r} needs example=, a tuple of your model's arguments")
        if format == "onnx":
            content, code = traced.onnx_graph(source, file.name, opset, quantize)
        else:
            content, code = traced.program(source, file.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, *content)
    write_whole(card, about.card(code).encode())
    return file


def _target(path: Path, suffix: str) -> tuple[Path, Path]:
    """Return the file to write and its card; UsageError if other files would be overwritten."""
    if path.suffix == suffix and not path.is_dir():
        file, card = path, path.with_suffix(".md")
    elif path.suffix in SUFFIXES.values() or path.is_file():
        raise UsageError(f"{path}: name a directory, or a file that ends in {suffix}")
    elif path.suffix[1:2].isalpha() and not path.is_dir():  # model-1.0 is a directory to make
        known = ", ".join(SUFFIXES.values())
        raise UsageError(f"{path}: unknown suffix {path.suffix}, expected one of {known}")
    else:
        file, card = path / f"model{suffix}", path / CARD
    if file.name in (MODEL, CHECKPOINT) and (file.parent / CONFIG).exists():
        raise UsageError(f"{file} is a file of the run: it would be overwritten")
    if card.exists() and read_card(card) is None:
        raise UsageError(f"{card} exists and is not a model card: export to another directory")
    return file, card


def _tensors(source: Exportable, format: str, name: str) -> tuple[list[Any], str]:
    """Return the content of a file, and code that rebuilds the network with torch alone: of a
    user's own model its recurrent layers, since other code builds the rest."""
    if not any(isinstance(layer, Normalised) for layer in recurrent(source.network).values()):
        raise ValueError(f"{type(source.network).__name__} holds no layer of normrnn to fold")
    plain = with_layers(source.network, lambda m, name: folded(m, name, keep=isinstance(m, LiGRU)))
    # Clones: safetensors refuses a tensor that has two names.
    weights = {name: value.cpu().clone() for name, value in plain.state_dict().items()}
    described = recurrent(plain) | (dict(plain.named_children()) if source.usage else {})
    modules = {name: _description(module) for name, module in described.items()}
    if format == "torch":
        saved = {"format": FORMAT, "modules": modules, "weights": weights}
        buffer = io.BytesIO()  # torch's writer ends the process if a disk is full
        torch.save({**saved, "notes": dict(source.notes)}, buffer)
        content = [buffer.getbuffer()]
    else:
        metadata = {"format": "pt", "normrnn": FORMAT, "modules": json.dumps(modules)}
        *content, _ = sealed_tensors(weights, {**metadata, **source.notes})
    code = _READ[format].format(name=json.dumps(name))
    code += _VALUES if source.usage and "mean" in weights else ""
    library, own = "torch.nn", "MyModel()  # yours: any layers will do where it has recurrent ones"
    if any(module["type"] == "LiGRU" for module in modules.values()):
        code, library = f"import normrnn\n{code}", 'normrnn if m["type"] == "LiGRU" else torch.nn'
    code += _BUILD.format(model="torch.nn.Module()" if source.usage else own, library=library)
    return content, code + source.usage


def _description(module: nn.Module) -> dict[str, Any]:
    """Return class name and arguments of a module of torch.nn."""
    names = next(names for kind, names in _OPTIONS.items() if isinstance(module, kind))
    options = {name: getattr(module, name) for name in names}
    if isinstance(module, nn.RNNBase):
        options |= {"proj_size": module.proj_size} if module.proj_size else {}
        options |= {"nonlinearity": module.nonlinearity} if isinstance(module, nn.RNN) else {}
        options |= {"norm": None} if isinstance(module, LiGRU) else {}
    return {"type": type(module).__name__, "options": options}
