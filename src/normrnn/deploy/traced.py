"""The formats onnx and program, which torch's exporters write.

Exporters see our layers as torch's `scan` (`normrnn.ops.scan`), so that files do not need this
package. In ONNX, layers that fold are ONNX's LSTM, GRU and RNN operators instead.
"""

import inspect
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as shapes
from torch.utils import _pytree as pytree

from normrnn.deploy.networks import Network, recurrent, traceable
from normrnn.errors import UserError
from normrnn.extras import import_extra
from normrnn.files import write_whole
from normrnn.nn import LiGRU
from normrnn.nn.base import Normalised

OPSET = 18
LIMIT = 2**31 - 1
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""ONNX's order of torch's gates: i o f c of i f g o, z r h of r z n."""


def write_program(network: nn.Module, example: Any, dynamic: Any, path: Path) -> str:
    """Write a program of torch.export; return code that loads it with torch alone.

    `dynamic` is torch.export's `dynamic_shapes`, or the names of axes by argument.
    """
    if isinstance(dynamic, Mapping):
        dynamic = {
            name: {a: Dim(d, min=1) if isinstance(d, str) else d for a, d in axes.items()}
            for name, axes in dynamic.items()
        }
    model = traceable(network)
    # Sizes that are equal by chance, a batch of 3 and a GRU's gates, stay independent.
    apart: Any = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with _quiet(), torch.no_grad(), apart:
        program = torch.export.export(model, example, dynamic_shapes=dynamic, strict=False)
    if any(str(node.target).startswith("normrnn.") for node in program.graph.nodes):
        raise ValueError(
            "the program would need normrnn to run: give its layers tensors, with lengths= where "
            "they are padded, not packed sequences"
        )
    buffer = io.BytesIO()  # torch's writer ends the process if a disk is full
    notes = network.notes if isinstance(network, Network) else {}
    extra = {f"{name}.json": text for name, text in notes.items()}
    torch.export.save(program, buffer, extra_files=extra)
    write_whole(path, buffer.getbuffer())
    code = "import torch\n\n# unpickles: only for files of people you trust\n"
    code += f"model = torch.export.load({json.dumps(path.name)}).module()\n"
    return code + (network.usage["program"] if isinstance(network, Network) else _call(example))


def _call(example: tuple[Any, ...]) -> str:
    """Return code that calls a program with tensors of ones; nothing for other arguments."""
    if not all(isinstance(value, Tensor) for value in example):
        return ""
    ones = [f"torch.ones({tuple(t.shape)}, dtype={t.dtype})" for t in example]
    return f"outputs = model({', '.join(ones)})\n"


def check_opset(opset: int | None) -> None:
    """Raise ValueError if files cannot be written for that version of ONNX's operators."""
    newest = import_extra("onnx", "export").defs.onnx_opset_version()
    if opset is not None and not OPSET <= opset <= newest:
        raise ValueError(f"opset={opset}: expected a number from {OPSET} to {newest}")


def write_onnx(
    network: nn.Module, example: Any, dynamic: Any, opset: int | None, quantize: bool, path: Path
) -> str:
    """Write an ONNX graph; return code that runs it with onnxruntime alone.

    `dynamic` names the axes that may change, by argument; None: the first two of every tensor.
    """
    onnx: Any = import_extra("onnx", "export")
    import_extra("onnxscript", "export")
    if sum(value.nbytes for value in network.state_dict().values()) > LIMIT:
        raise UserError("a network of more than 2 GB does not fit into one ONNX file")
    if any(isinstance(module, LiGRU) for module in network.modules()):
        raise ValueError("ONNX has no operator for a LiGRU: choose the format program")
    model = traceable(network, _with_operators)
    tensors = _named(model, example)
    axes = _free(model, tensors) if dynamic is None else dynamic
    if unknown := [name for name in axes if name not in tensors]:
        raise ValueError(
            f"dynamic= has axes of {unknown[0]!r}, and the tensors of example= are "
            f"{', '.join(tensors)}"
        )
    called = _Called(model, example)
    with _quiet(), torch.no_grad():
        called(*tensors.values())  # errors of the call as they are, not inside the exporter's
        program: Any = torch.onnx.export(
            called,
            (*tensors.values(),),
            dynamo=True,
            input_names=[*tensors],
            output_names=network.outputs if isinstance(network, Network) else ["output"],
            dynamic_shapes=(tuple(dict(axes.get(name, {})) for name in tensors),),
            opset_version=opset or OPSET,
            verbose=False,
        )
    content = program.model_proto
    del program, model, called
    if len(content.graph.input) < len(tensors):
        raise ValueError("the exporter dropped an argument that the model does not depend on")
    del content.graph.value_info[:]  # shapes of weights, which int8 transposes
    if isinstance(network, Network):
        onnx.helper.set_model_props(content, dict(network.notes))
    write_whole(path, _quantised(content) if quantize else content.SerializeToString())
    code = "import numpy, onnxruntime\n\nsession = onnxruntime.InferenceSession"
    code += f"({json.dumps(path.name)})\n"
    if isinstance(network, Network):
        return code + network.usage["onnx"]
    ones = [
        f'    "{name}": numpy.ones({tuple(t.shape)}, "{str(t.dtype).partition(".")[2]}"),\n'
        for name, t in tensors.items()
    ]
    return f"{code}inputs = {{\n{''.join(ones)}}}\noutputs = session.run(None, inputs)\n"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' warnings on shapes and on packages that are missing."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _with_operators(layer: Normalised) -> nn.Module:
    """Make a folded layer run as ONNX's operators; without one for it, it is unchanged."""
    weights = dict(layer.named_parameters())
    is_float = all(weight.dtype == torch.float32 for weight in weights.values())
    has_more = layer.proj_size or any(layer.zoneout) or layer.learn_initial_state
    if has_more or not is_float:
        return layer
    kind, D = layer.mode.partition("_")[0], 1 + layer.bidirectional
    order = _GATES[kind]

    def gates(name: str) -> Tensor:
        zero = layer.weight_hh_l0.new_zeros(len(order) * layer.hidden_size)
        blocks = weights.get(name, zero).detach().chunk(len(order))
        return torch.cat([blocks[gate] for gate in order])

    def peepholes(suffix: str) -> Tensor:
        zero = layer.weight_hh_l0.new_zeros(layer.hidden_size)
        return torch.cat([weights.get(f"weight_c{g}_{suffix}", zero).detach() for g in "iof"])

    for number in range(layer.num_layers):
        suffixes = [f"l{number}{way}" for way in ("", "_reverse")[:D]]
        values = {
            "W": [gates(f"weight_ih_{suffix}") for suffix in suffixes],
            "R": [gates(f"weight_hh_{suffix}") for suffix in suffixes],
            "B": [torch.cat([gates(f"bias_{x}h_{s}") for x in "ih"]) for s in suffixes],
            "P": [peepholes(suffix) for suffix in suffixes],
        }
        for name, parts in values.items():
            layer.register_buffer(f"onnx_{name}{number}", torch.stack(parts))
    for name in weights:
        delattr(layer, name)
    layer.forward = partial(_operators, layer)  # type: ignore[method-assign]
    return layer


def _operators(
    layer: Any, input: Tensor, hx: Any = None, lengths: Tensor | None = None, resets: None = None
) -> tuple[Tensor, Any]:
    """Forward pass of a layer, (T, B, I) or batch first, in ONNX's operators."""
    del resets  # refused by a hook
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
    for number in range(layer.num_layers):
        weights = [getattr(layer, f"onnx_{name}{number}") for name in "WRB"]
        state = [h[number * D : (number + 1) * D] for h in before]
        more = [getattr(layer, f"onnx_P{number}")] if layer.peephole is not None else []
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


class _Called(nn.Module):
    """The model as a function of the tensors among its arguments; the others are fixed."""

    def __init__(self, model: nn.Module, example: tuple[Any, ...]) -> None:
        super().__init__()
        self.model = model
        values, self.shape = pytree.tree_flatten(example)
        self.fixed = [None if isinstance(value, Tensor) else value for value in values]
        self.places = [k for k, value in enumerate(values) if isinstance(value, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        values = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        return self.model(*pytree.tree_unflatten(values, self.shape))


def _named(model: nn.Module, example: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the tensors of the arguments by name: `x`, `state.0`, `state.1`."""
    arguments = inspect.signature(model.forward).bind(*example).arguments
    leaves, _ = pytree.tree_flatten_with_path(dict(arguments))
    tensors = {}
    for keys, value in leaves:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
        if isinstance(value, Tensor):
            tensors[name] = value
        elif not isinstance(value, bool | int | float | str | None):
            raise ValueError(f"example= has a {type(value).__name__} for {name}: give a tensor")
    return tensors


def _free(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Name the axes that may change: the first two, of a state in a tuple its batch.

    Of a model of cells, without a recurrent layer, the first one is the batch.

    Names are unique: equal names would promise equal sizes.
    """
    sizes = {
        (one.num_layers * (1 + one.bidirectional), one.hidden_size)
        for one in recurrent(model).values()
    }
    has_cells = not sizes and any(isinstance(m, nn.RNNCellBase) for m in model.modules())
    most, free = 1 if has_cells else 2, {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        is_state = "." in name and len(shape) == 3 and (shape[0], shape[2]) in sizes
        axes: Sequence[int] = (1,) if is_state else range(min(most, len(shape)))
        free[name] = {axis: f"{name.replace('.', '_')}_axis{axis}" for axis in axes}
    return free


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
        # onnx and onnxruntime raise exceptions of many types where a file cannot be written.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(
                f"the int8 file cannot be made in {scratch} ({reason}): is the disk full?"
            ) from None
