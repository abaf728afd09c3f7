"""The formats onnx and program, which torch's exporters write.

Both trace the same copy: exporters see our layers as torch's `scan` (`normrnn.ops.scan`), so that
files do not need this package. In ONNX, layers that fold are ONNX's LSTM, GRU and RNN operators.
"""

import copy
import inspect
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as shapes
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from normrnn.deploy.networks import Exportable, folded, recurrent, with_layers
from normrnn.errors import UserError
from normrnn.extras import import_extra

OPSET = 18
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""ONNX's order of torch's gates: i o f c of i f g o, z r h of r z n."""
_NOT_PACKED = (
    "an export takes no PackedSequence, which needs normrnn to run: give its layers tensors, with "
    "lengths= where they are padded"
)
_PROGRAM = """\
import torch

# unpickles: only for files of people you trust
model = torch.export.load({name}).module()
"""
_ONNX = """\
import numpy, onnxruntime

session = onnxruntime.InferenceSession({name})
"""


def program(source: Exportable, name: str) -> tuple[list[bytes], str]:
    """Return the content of a torch.export program, and code that loads it with torch alone."""
    exported, tensors, _ = _traced(source, lambda layer: layer)
    buffer = io.BytesIO()  # torch's writer ends the process if a disk is full
    extra = {f"{note}.json": text for note, text in source.notes.items()}
    torch.export.save(exported, buffer, extra_files=extra)
    code = _PROGRAM.format(name=json.dumps(name))
    code += "".join(f"# The archive has {file}.\n" for file in extra)
    if len(tensors) == len(source.example or ()):  # each argument is a tensor
        code += _inputs(tensors, "torch")
        code += f"outputs = model(*inputs.values())  # {', '.join(source.outputs)}\n"
    return [buffer.getvalue()], code


def onnx_graph(
    source: Exportable, name: str, opset: int | None, quantize: str | None
) -> tuple[list[bytes], str]:
    """Return the content of an ONNX file, and code that runs it with onnxruntime alone."""
    onnx: Any = import_extra("onnx", "export")
    import_extra("onnxscript", "export")
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and not OPSET <= opset <= newest:
        raise ValueError(f"opset={opset}: expected a number from {OPSET} to {newest}")
    program, tensors, axes = _traced(source, _with_operators)
    with _quiet():
        exported: Any = torch.onnx.export(
            program,
            (),
            input_names=[*tensors],
            output_names=[*source.outputs],
            opset_version=opset or OPSET,
            verbose=False,
        )
    model = exported.model_proto
    for input in model.graph.input:
        for axis, label in axes.get(input.name, {}).items():
            input.type.tensor_type.shape.dim[axis].dim_param = str(label)
    del model.graph.value_info[:]  # shapes of weights, which int8 transposes
    onnx.helper.set_model_props(model, dict(source.notes))
    code = _ONNX.format(name=json.dumps(name))
    code += "".join(f"# Its custom_metadata_map has {note!r}.\n" for note in source.notes)
    code += _inputs(tensors, "numpy")
    code += f"outputs = session.run(None, inputs)  # {', '.join(source.outputs)}\n"
    return [_quantised(model) if quantize else model.SerializeToString()], code


def _inputs(tensors: Mapping[str, Tensor], library: str) -> str:
    """Return code of inputs: numbers that are 0, and lengths, tokens and other integers of 1."""
    code = "inputs = {}\n"
    for name, tensor in tensors.items():
        fill = "zeros" if tensor.is_floating_point() else "ones"
        dtype = str(tensor.dtype).replace("torch", library)
        code += f'inputs["{name}"] = {library}.{fill}({tuple(tensor.shape)}, dtype={dtype})\n'
    return code


def _traced(
    source: Exportable, operators: Callable[[Any], nn.Module]
) -> tuple[ExportedProgram, dict[str, Tensor], Mapping[str, Mapping[int, Any]]]:
    """Trace a copy of a network in which layers are folded where they fold.

    `operators` changes those that fold. Returns the program, the tensors of its arguments by name,
    and the names of the axes that may change. ValueError for layers that need the statistics of a
    batch.
    """
    assert source.example is not None
    if any(isinstance(value, PackedSequence) for value in source.example):
        raise ValueError(_NOT_PACKED)

    def change(layer: nn.RNNBase, name: str) -> nn.Module:
        try:
            new: Any = operators(folded(layer, name, keep=True))
        except ValueError:
            new = copy.deepcopy(layer).eval()
            if not all(n.is_fixed for n in new.normalisers()):
                raise
        new.register_forward_pre_hook(_check_lengths, with_kwargs=True)
        return new

    model = with_layers(source.network, change)
    arguments = dict(inspect.signature(model.forward).bind(*source.example).arguments)
    leaves, _ = pytree.tree_flatten_with_path(arguments)
    tensors = {_name(path): value for path, value in leaves if isinstance(value, Tensor)}
    dynamic = _dynamic_axes(model, tensors) if source.dynamic is None else source.dynamic
    axes = dynamic if isinstance(dynamic, Mapping) else {}
    if unknown := axes.keys() - tensors.keys():
        raise ValueError(
            f"dynamic= has axes of {min(unknown)!r}, and the tensors of example= are "
            f"{', '.join(tensors)}"
        )
    if isinstance(dynamic, Mapping):
        free: Any = Dim.DYNAMIC(min=1)  # type: ignore[operator]

        def sizes(path: Any, _: Any) -> Any:
            own = axes.get(_name(path), {})
            return {axis: free if isinstance(d, str) else d for axis, d in own.items()} or None

        dynamic = pytree.tree_map_with_path(sizes, arguments)
    # Sizes that are equal by chance, a batch of 3 and a GRU's gates, stay independent.
    apart: Any = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with _quiet(), torch.no_grad(), apart:
        program = torch.export.export(model, source.example, dynamic_shapes=dynamic, strict=False)
    if any(str(node.target).startswith("normrnn.") for node in program.graph.nodes):
        raise ValueError(_NOT_PACKED)
    return program, tensors, axes


def _name(path: tuple[Any, ...]) -> str:
    """Name a tensor among nested arguments: `x`, `state.0`, `state.1`."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _dynamic_axes(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Name the axes that may change: the first two but features, of a state in a tuple its batch.

    Names are unique: equal names would promise equal sizes.
    """
    sizes = {
        (layer.num_layers * (1 + layer.bidirectional), layer.hidden_size)
        for layer in recurrent(model).values()
    }
    free = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        axes = range(min(2, max(1, len(shape) - tensor.is_floating_point()), len(shape)))
        if "." in name and len(shape) == 3 and (shape[0], shape[2]) in sizes:
            axes = range(1, 2)
        free[name] = {axis: f"{name.replace('.', '_')}_axis{axis}" for axis in axes}
    return free


def _check_lengths(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError if the lengths of the example would become part of the file."""
    values = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    if not isinstance(values.get("lengths"), Tensor | None):
        raise ValueError("lengths= has to be a tensor, or an export would keep those of example=")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' warnings on shapes and on packages that are missing."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _with_operators(layer: Any) -> nn.Module:
    """Make a folded layer run as ONNX's operators; without one for it, it is unchanged."""
    weights = dict(layer.named_parameters())
    has_more = layer.proj_size or any(layer.zoneout) or layer.learn_initial_state
    is_float = all(weight.dtype == torch.float32 for weight in weights.values())
    kind, directions = layer.mode.partition("_")[0], ("", "_reverse")[: 1 + layer.bidirectional]
    if has_more or not is_float or kind not in _GATES:
        return layer
    order, zero = _GATES[kind], torch.zeros(layer.hidden_size)

    def weight(name: str, copies: int = 1) -> Tensor:
        return weights.get(name, zero.repeat(copies)).detach()

    def gates(name: str) -> Tensor:
        blocks = weight(name, len(order)).chunk(len(order))
        return torch.cat([blocks[gate] for gate in order])

    def stacked(n: int, value: Callable[[str], Tensor]) -> Tensor:
        return torch.stack([value(f"l{n}{direction}") for direction in directions])

    layer.onnx_weights = [
        (
            stacked(n, lambda end: gates(f"weight_ih_{end}")),
            stacked(n, lambda end: gates(f"weight_hh_{end}")),
            stacked(n, lambda end: torch.cat([gates(f"bias_{x}h_{end}") for x in "ih"])),
            stacked(n, lambda end: torch.cat([weight(f"weight_c{g}_{end}") for g in "iof"])),
        )
        for n in range(layer.num_layers)
    ]
    for name in weights:
        delattr(layer, name)
    layer.forward = MethodType(_operators, layer)
    return layer


def _operators(
    layer: Any, input: Tensor, hx: Any = None, lengths: Tensor | None = None, resets: Any = None
) -> tuple[Tensor, Any]:
    """Forward pass of a layer, (T, B, I) or batch first, in ONNX's operators."""
    if resets is not None:
        raise ValueError("ONNX takes no resets=: cut the sequences there, and give no state")
    if not isinstance(input, Tensor) or input.dim() != 3:
        raise ValueError("ONNX takes batches (T, B, I), with lengths= where they are padded")
    kind, D, H = layer.mode.partition("_")[0], 1 + layer.bidirectional, layer.hidden_size
    x = input.transpose(0, 1) if layer.batch_first else input
    T, B = x.shape[:2]
    if lengths is not None:  # int8 takes a range from all of x, padding included
        inside = torch.arange(T, device=x.device)[:, None] < lengths[None]
        x = torch.where(inside[:, :, None], x, torch.zeros_like(x))
        lengths = lengths.to(torch.int32)
    states = 2 if kind == "LSTM" else 1
    if hx is None:
        hx = (x.new_zeros(layer.num_layers * D, B, H),) * states
    before = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    attributes: dict[str, Any] = {"direction": "bidirectional" if D == 2 else "forward"}
    attributes |= {"hidden_size": H} | ({"linear_before_reset": 1} if kind == "GRU" else {})
    if kind == "RNN":
        attributes["activations"] = [layer.mode.partition("_")[2].capitalize()] * D
    after = []
    for n, (*weights, peepholes) in enumerate(layer.onnx_weights):
        state = [h[n * D : (n + 1) * D] for h in before]
        more = [peepholes] if layer.peephole is not None else []
        x, *final = torch.onnx.ops.symbolic_multi_out(
            kind,
            [x, *weights, lengths, *state, *more],
            attributes,
            dtypes=[torch.float32] * (1 + states),
            shapes=[(T, D, B, H)] + [(D, B, H)] * states,
            version=14,
        )
        x = x.transpose(1, 2).flatten(2)
        after.append(final)
    output = x.transpose(0, 1) if layer.batch_first else x
    final = tuple(map(torch.cat, zip(*after, strict=True)))
    return output, final if kind == "LSTM" else final[0]


def _quantised(model: Any) -> bytes:
    """Return the graph with the weights of products, of the embedding and of LSTMs as int8.

    Their inputs are quantised dynamically. GRU and RNN operators have no int8 form and are kept.
    """
    quantization = import_extra("onnxruntime.quantization", "export")
    # Silences the advice to simplify the graph first.
    model.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    with tempfile.TemporaryDirectory() as scratch:
        file, kind = Path(scratch, "model.onnx"), quantization.QuantType.QInt8
        try:
            quantization.quantize_dynamic(model, str(file), weight_type=kind, per_channel=False)
            return file.read_bytes()
        except Exception as error:  # of many types, where a file cannot be written
            raise UserError(f"int8: {type(error).__name__} in {scratch}: {error}") from None
