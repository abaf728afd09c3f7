"""The format onnx, written by torch's exporters.

Layers that fold become ONNX's LSTM, GRU and RNN operators. The older exporter (dynamo=False) is
used for them, because the newer one (dynamo=True) fixes the number of time steps. Layers that do
not fold have no operator in ONNX: the newer exporter sees a scan (`normrnn.ops.scan`) and writes
ONNX's Scan.
"""

import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normrnn.deploy.parts import (
    Direction,
    Parts,
    Recurrent,
    dense_or_padded,
    scannable,
    without_norms,
)
from normrnn.deploy.program import example_of
from normrnn.errors import UserError
from normrnn.extras import export_extra
from normrnn.files import write_whole
from normrnn.nn.base import Normalised

OPSET, LOWEST, SCAN_OPSET = 17, 13, 18
HIGHEST_TRACED = 20
"""The highest version that the older exporter writes; later ones are converted from it."""
LIMIT = 2**31 - 1
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""ONNX's order of torch's gates: i o f c of i f g o, z r h of r z n."""


def check_opset(opset: int | None) -> None:
    """Raise ValueError if files cannot be written for that version of ONNX's operators."""
    newest = export_extra("onnx").defs.onnx_opset_version()
    if opset is not None and not LOWEST <= opset <= newest:
        raise ValueError(f"opset={opset}: expected a number from {LOWEST} to {newest}")


def write_network(parts: Parts, path: Path, opset: int | None = None) -> None:
    """Write one of our networks.

    Language models: tokens (T, B), h0[, c0] -> logits, hn[, cn]; others: features (T, B, F),
    lengths (B,) -> log_posteriors (T, B, C), 0 in the padding.
    """
    rnn = parts.recurrent
    folds = has_operator(rnn.layer)
    model, given, axes = example_of(parts, OperatorLayer(rnn) if folds else None)
    states = [f"{name[0]}n" for name in given if name in ("h0", "c0")]
    outputs = ("logits", *states) if parts.embedding is not None else ("log_posteriors",)
    _write(model.float(), given, axes, outputs, folds, path, parts.notes, opset)


def write_model(
    model: nn.Module,
    example: tuple[Any, ...],
    dynamic: Mapping[str, Mapping[int, str]] | None,
    path: Path,
    opset: int | None = None,
) -> None:
    """Write a user's own model; `dynamic` names the axes that may change."""
    folds = all(map(has_operator, model.modules()))
    plain = without_norms(model, _exportable) if folds else scannable(model)
    tensors = _named(plain, example)
    free = _free(plain, tensors) if dynamic is None else dynamic
    if unknown := [name for name in free if name not in tensors]:
        raise ValueError(
            f"dynamic= has axes of {unknown[0]!r}, and the tensors of example= are "
            f"{', '.join(tensors)}"
        )
    axes = {name: dict(free.get(name, {})) for name in tensors}
    called = _Called(plain, example)
    _write(called, tensors, axes, (), folds, path, {}, opset)


def has_operator(module: nn.Module) -> bool:
    """Whether a module is not recurrent, or a recurrent layer that ONNX has an operator for."""
    if isinstance(module, nn.RNNBase):
        try:
            Recurrent(module).check()
        except ValueError:
            return False
    return True


def _write(
    model: nn.Module,
    given: Mapping[str, Tensor],
    axes: Mapping[str, Mapping[int, str]],
    outputs: Sequence[str],
    folds: bool,
    path: Path,
    notes: Mapping[str, str],
    opset: int | None,
) -> None:
    onnx: Any = export_extra("onnx")
    model = model.eval().requires_grad_(False)
    if sum(value.nbytes for value in model.state_dict().values()) > LIMIT:
        raise UserError("a network of more than 2 GB does not fit into one ONNX file")
    export = _with_operators if folds else _with_scan
    with _quiet():
        content = export(model, given, axes, outputs, opset)
    onnx.helper.set_model_props(content, dict(notes))
    write_whole(path, content.SerializeToString())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' warnings on shapes, their age and packages that are missing."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _with_operators(
    model: nn.Module, given: Any, axes: Any, outputs: Sequence[str], opset: int | None
) -> Any:
    onnx: Any = export_extra("onnx")
    traced: Any = BytesIO()
    version = opset or OPSET
    options: Any = {"dynamo": False, "input_names": [*given], "output_names": [*outputs] or None}
    options |= {"dynamic_axes": axes, "opset_version": min(version, HIGHEST_TRACED)}
    torch.onnx.export(model, (*given.values(),), traced, **options)
    content = onnx.load_model_from_string(traced.getvalue())
    traced.close()
    if not content.graph.input:
        raise ValueError(
            "the tracer saw nothing of what the model does with its input: it would be a "
            "constant in the file"
        )
    if version > HIGHEST_TRACED:
        content = onnx.version_converter.convert_version(content, version)
    return content


def _with_scan(
    model: nn.Module, given: Any, axes: Any, outputs: Sequence[str], opset: int | None
) -> Any:
    export_extra("onnxscript")
    if opset is not None and opset < SCAN_OPSET:
        raise ValueError(
            f"opset={opset}: a layer without an operator of its own in ONNX needs {SCAN_OPSET}"
        )
    shapes: Any = tuple(axes[name] or None for name in given)
    options: Any = {
        "dynamo": True,
        "input_names": [*given],
        "output_names": [*outputs] or None,
        "dynamic_shapes": (shapes,) if isinstance(model, _Called) else shapes,
        "opset_version": opset or SCAN_OPSET,
        "verbose": False,
    }
    program: Any = torch.onnx.export(model, (*given.values(),), **options)
    content = program.model_proto
    del content.graph.value_info[:]  # shapes of weights, which int8 transposes
    return content


class _Operator(torch.autograd.Function):
    """ONNX's operator; the tracer needs only the shapes of its results."""

    @staticmethod
    def forward(ctx: Any, rnn: Recurrent, ragged: bool, *given: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        x = given[0]
        T, B, _ = x.shape
        final = x.new_zeros(rnn.directions, B, rnn.hidden)
        return x.new_zeros(T, *final.shape), *[final.clone() for _ in range(rnn.states)]

    @staticmethod
    def symbolic(g: Any, rnn: Recurrent, ragged: bool, *given: Any) -> Any:
        ends = {str: "_s", int: "_i", list: "_s"}
        named = {f"{name}{ends[type(value)]}": value for name, value in attributes(rnn).items()}
        inputs = list(given)
        if not ragged:  # sequence_lens is optional
            inputs.insert(4, g.op("prim::Constant"))
            inputs[4].setType(torch._C.OptionalType.ofTensor())
        return g.op(rnn.kind, *inputs, outputs=1 + rnn.states, **named)


class OperatorLayer(nn.Module):
    """A stack of ONNX operators in the place of one of our layers, with its signature."""

    def __init__(self, rnn: Recurrent) -> None:
        super().__init__()
        self.rnn, self.batch_first = rnn, rnn.layer.batch_first
        for layer in range(rnn.layers):
            for name, value in zip("WRB", weights(rnn, layer), strict=True):
                self.register_buffer(f"{name}{layer}", value)
            self.register_buffer(f"P{layer}", peepholes(rnn, layer))

    def forward(
        self, input: Tensor, hx: Any = None, lengths: Tensor | None = None, resets: None = None
    ) -> tuple[Tensor, Any]:
        """(T, B, I) or batch first -> outputs, and the state after each sequence's last step."""
        dense_or_padded(input, lengths, resets)
        rnn, x = self.rnn, input.transpose(0, 1) if self.batch_first else input
        T, B, D = x.shape[0], x.shape[1], rnn.directions
        ragged = []
        if lengths is not None:  # int8 takes a range from all of x, padding included
            inside = torch.arange(T, device=x.device)[:, None] < lengths[None]
            x = torch.where(inside[:, :, None], x, torch.zeros_like(x))
            ragged = [lengths.to(torch.int32)]
        if hx is None:
            hx = (x.new_zeros(rnn.layers * D, B, rnn.hidden),) * rnn.states
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        after = []
        for layer in range(rnn.layers):
            own = [getattr(self, f"{name}{layer}") for name in "WRB"]
            before = [state[layer * D : (layer + 1) * D] for state in states]
            more = [getattr(self, f"P{layer}")] if rnn.has_peepholes else []
            x, *final = _Operator.apply(rnn, bool(ragged), x, *own, *ragged, *before, *more)
            x = x.transpose(1, 2).flatten(2)
            after.append(final)
        found = tuple(map(torch.cat, zip(*after, strict=True)))
        output = x.transpose(0, 1) if self.batch_first else x
        return output, found if rnn.mode == "LSTM" else found[0]

    def __getattr__(self, name: str) -> Any:
        """Attributes of the layer, as `hidden_size` for a state of zeros."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["rnn"].layer, name)


class _Called(nn.Module):
    """The model as a function of the tensors among its arguments; the others are fixed.

    torch's exporter would name the parts of a tuple after the arguments that follow it, and take a
    dict at the end for keywords.
    """

    def __init__(self, model: nn.Module, example: tuple[Any, ...]) -> None:
        super().__init__()
        self.model = model
        values, self.shape = pytree.tree_flatten(example)
        self.fixed = [None if isinstance(value, Tensor) else value for value in values]
        self.places = [k for k, value in enumerate(values) if isinstance(value, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        """Call the model."""
        values = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        return self.model(*pytree.tree_unflatten(values, self.shape))


def _exportable(layer: nn.RNNBase) -> nn.Module:
    """Return a module for torch's exporter in the place of a folded layer."""
    recurrent = Recurrent(layer)
    recurrent.check()
    if any(weight.dtype == torch.float64 for weight in layer.parameters()):
        raise ValueError(
            f"{type(layer).__name__} is float64, in which onnxruntime has no recurrent operators: "
            "export model.float(), with float32 in example="
        )
    if not isinstance(layer, Normalised):
        return layer
    return OperatorLayer(recurrent)


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """List the leaves of an argument in the order in which torch flattens it."""
    if isinstance(value, Mapping):
        parts = [*value.items()]
    elif isinstance(value, tuple | list):
        parts = [*enumerate(value)]
    else:
        return [(name, value)]
    return [leaf for key, part in parts for leaf in _leaves(f"{name}.{key}", part)]


def _named(model: nn.Module, example: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the tensors of the arguments by name: `x`, `state.0`, `state.1`."""
    given = inspect.signature(model.forward).bind(*example).arguments
    found = {}
    for name, value in (leaf for item in given.items() for leaf in _leaves(*item)):
        if isinstance(value, Tensor):
            found[name] = value
        elif not isinstance(value, bool | int | float | str | None):
            raise ValueError(f"example= has a {type(value).__name__} for {name}: give a tensor")
    return found


def _free(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Name the axes that may change: the first two, of a state in a tuple its batch.

    Names are unique: equal names would promise equal sizes.
    """
    states = {
        (one.num_layers * (1 + one.bidirectional), one.hidden_size)
        for one in model.modules()
        if isinstance(one, nn.RNNBase | OperatorLayer)
    }
    found = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        is_state = "." in name and len(shape) == 3 and (shape[0], shape[2]) in states
        axes = (1,) if is_state else range(min(2, len(shape)))
        found[name] = {axis: f"{name}.axis{axis}" for axis in axes}
    return found


def attributes(rnn: Recurrent) -> dict[str, Any]:
    """Return the attributes of the operator."""
    D = rnn.directions
    found = {"direction": "bidirectional" if D == 2 else "forward", "hidden_size": rnn.hidden}
    if rnn.kind == "GRU":
        found["linear_before_reset"] = 1
    if rnn.kind == "RNN":
        found["activations"] = [rnn.mode.partition("_")[2].capitalize()] * D
    return found


def weights(rnn: Recurrent, layer: int) -> list[Tensor]:
    """Return W (D, C, I), R (D, C, H) and B (D, 2C) of a layer."""
    order, D = _GATES[rnn.kind], rnn.directions

    def gates(value: Tensor) -> Tensor:
        blocks = value.chunk(len(order))
        return torch.cat([blocks[gate] for gate in order])

    directions = [rnn.direction(layer * D + d) for d in range(D)]
    parts: list[Callable[[Direction], Tensor]] = [
        lambda d: gates(d.w_ih),
        lambda d: gates(d.w_hh),
        lambda d: torch.cat([gates(d.b_ih), gates(d.b_hh)]),
    ]
    return [torch.stack([_float(part(d)) for d in directions]) for part in parts]


def peepholes(rnn: Recurrent, layer: int) -> Tensor:
    """Return P (D, 3H) of i, o and f; 0 where there is no peephole."""

    def of(direction: Direction) -> Tensor:
        zero = direction.w_hh.new_zeros(rnn.hidden)
        i, f, o = (zero if p is None else p for p in direction.peephole)
        return _float(torch.cat([i, o, f]))

    D = rnn.directions
    return torch.stack([of(rnn.direction(layer * D + d)) for d in range(D)])


def _float(value: Any) -> Tensor:
    return value.detach().float().cpu()


def snippet(parts: Parts | None, name: str) -> str:
    """Return code that runs the file with onnxruntime alone."""
    file = json.dumps(name)
    start = f"import numpy, onnxruntime\n\nsession = onnxruntime.InferenceSession({file})\n"
    if parts is None:
        return start
    rnn = parts.recurrent
    if parts.embedding is None:
        assert parts.mean is not None
        return (
            f'{start}features = numpy.zeros((50, 2, {len(parts.mean)}), "float32")'
            "  # padded (T, B, F)\n"
            "lengths = numpy.array([50, 30])\n"
            'given = {"features": features, "lengths": lengths}\n'
            "(log_posteriors,) = session.run(None, given)  # (T, B, states)\n"
        )
    size = f"{rnn.layers * rnn.directions}, 2, {rnn.hidden}"
    states = ", ".join(f'"{s}0"' for s in "hc"[: rnn.states])
    return (
        f'{start}state = [numpy.zeros(({size}), "float32")] * {rnn.states}\n'
        'tokens = numpy.zeros((5, 2), "int64")  # ids (T, B)\n'
        '# session.get_modelmeta().custom_metadata_map["vocabulary"] says what they mean\n'
        f'given = {{"tokens": tokens, **dict(zip([{states}], state))}}\n'
        "logits, *state = session.run(None, given)  # (T, B, symbols)\n"
    )
