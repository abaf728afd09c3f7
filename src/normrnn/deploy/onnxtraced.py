"""A user's own model in the format onnx, by torch's exporter.

By the old one (dynamo=False), whose recurrent operators have dynamic time and batch: the new one
freezes the number of time steps of torch's layers. It knows torch's layers, so normalisation is
folded into those; for peepholes and ``lengths=``, which they have not, the operator is named here.

A layer that does not fold has no operator in ONNX. It goes through the new exporter (dynamo=True),
which sees a scan (:mod:`normrnn.ops.scan`) and writes ONNX's Scan.
"""

import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normrnn.deploy.onnxfile import LIMIT, TOO_LARGE, attributes, peepholes, weights
from normrnn.deploy.parts import Parts, Recurrent, dense_or_padded, scannable, without_norms
from normrnn.deploy.program import example_of
from normrnn.errors import UserError
from normrnn.extras import export_extra
from normrnn.files import replacing
from normrnn.nn.base import Normalised

SCAN_OPSET = 18
"""What torch's new exporter writes itself; lower ones it would have to convert."""


class _Operator(torch.autograd.Function):
    """ONNX's operator; the tracer needs the shapes of its results alone."""

    @staticmethod
    def forward(ctx: Any, rnn: Recurrent, *given: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        x = given[0]
        T, B, _ = x.shape
        final = x.new_zeros(rnn.directions, B, rnn.hidden)
        return x.new_zeros(T, *final.shape), *[final.clone() for _ in range(rnn.states)]

    @staticmethod
    def symbolic(g: Any, rnn: Recurrent, *given: Any) -> Any:
        ends = {str: "_s", int: "_i", list: "_s"}
        named = {f"{name}{ends[type(value)]}": value for name, value in attributes(rnn).items()}
        return g.op(rnn.kind, *given, outputs=1 + rnn.states, **named)


class _Standing(nn.Module):
    """A stack of plain recurrent layers in the place of ours, and called as ours are.

    Whether a call has lengths is known when the model is traced, not before. So there is torch's
    layer for what that knows, and the operator for the rest; the tracer leaves out what is not
    used.
    """

    def __init__(self, rnn: Recurrent, plain: nn.Module | None) -> None:
        super().__init__()
        self.rnn, self.plain, self.batch_first = rnn, plain, rnn.layer.batch_first
        for layer in range(rnn.layers):
            for name, value in zip("WRB", weights(rnn, layer), strict=True):
                self.register_buffer(f"{name}{layer}", value())
            self.register_buffer(f"P{layer}", peepholes(rnn, layer))

    def forward(
        self, input: Tensor, hx: Any = None, lengths: Tensor | None = None, resets: None = None
    ) -> tuple[Tensor, Any]:
        """(T, B, I) or batch first -> outputs, and the state after each sequence's last step."""
        if self.plain is not None and lengths is None and resets is None:
            return self.plain(input, hx)
        dense_or_padded(input, lengths, resets)
        rnn, x = self.rnn, input.transpose(0, 1) if self.batch_first else input
        T, B, D = x.shape[0], x.shape[1], rnn.directions
        if lengths is None:
            steps = x.new_full((B,), T)
        else:  # int8 takes a range from all of x, padding too
            steps, inside = lengths, torch.arange(T, device=x.device)[:, None] < lengths[None]
            x = torch.where(inside[:, :, None], x, torch.zeros_like(x))
        if hx is None:
            hx = (x.new_zeros(rnn.layers * D, B, rnn.hidden),) * rnn.states
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        after = []
        for layer in range(rnn.layers):
            own = [getattr(self, f"{name}{layer}") for name in "WRB"]
            before = [state[layer * D : (layer + 1) * D] for state in states]
            more = [getattr(self, f"P{layer}")] if rnn.peepholes else []
            x, *final = _Operator.apply(rnn, x, *own, steps.to(torch.int32), *before, *more)
            x = x.transpose(1, 2).flatten(2)
            after.append(final)
        found = tuple(map(torch.cat, zip(*after, strict=True)))
        output = x.transpose(0, 1) if self.batch_first else x
        return output, found if rnn.mode == "LSTM" else found[0]

    def __getattr__(self, name: str) -> Any:
        """What a model asks its layer for, as ``hidden_size`` for a state of zeros."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["rnn"].layer, name)


class _Called(nn.Module):
    """The model as a function of the tensors among its arguments; all else stays as it is.

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
        """What the model returns."""
        values = list(self.fixed)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        return self.model(*pytree.tree_unflatten(values, self.shape))


def _exportable(layer: nn.RNNBase) -> nn.Module:
    """What torch's exporter knows of a layer that folded already."""
    recurrent = Recurrent(layer)
    recurrent.check()
    if any(weight.dtype == torch.float64 for weight in layer.parameters()):
        raise ValueError(
            f"{type(layer).__name__} is float64, in which onnxruntime has no recurrent operators: "
            "export model.float(), with float32 in example="
        )
    if not isinstance(layer, Normalised):
        return layer
    return _Standing(recurrent, None if recurrent.peepholes else layer.fold())


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """What an argument is made of, in the order in which torch flattens it."""
    if isinstance(value, Mapping):
        parts = [*value.items()]
    elif isinstance(value, tuple | list):
        parts = [*enumerate(value)]
    else:
        return [(name, value)]
    return [leaf for key, part in parts for leaf in _leaves(f"{name}.{key}", part)]


def _named(model: nn.Module, example: tuple[Any, ...]) -> dict[str, Tensor]:
    """The tensors of the arguments in their order, by name: ``x``, ``state.0``, ``state.1``."""
    given = inspect.signature(model.forward).bind(*example).arguments
    found = {}
    for name, value in (leaf for item in given.items() for leaf in _leaves(*item)):
        if isinstance(value, Tensor):
            found[name] = value
        elif not isinstance(value, bool | int | float | str | None):
            raise ValueError(f"example= has a {type(value).__name__} for {name}: give a tensor")
    return found


def _free(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Names for the axes that may change: the first two, of a state in a tuple its batch.

    No two are called alike, since that would say that they are of one size.
    """
    states = {
        (one.num_layers * (1 + one.bidirectional), one.hidden_size)
        for one in model.modules()
        if isinstance(one, nn.RNNBase | _Standing)
    }
    found = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        is_state = "." in name and len(shape) == 3 and (shape[0], shape[2]) in states
        axes = (1,) if is_state else range(min(2, len(shape)))
        found[name] = {axis: f"{name}.axis{axis}" for axis in axes}
    return found


def write_traced(
    model: nn.Module,
    example: tuple[Any, ...],
    dynamic: Mapping[str, Mapping[int, str]] | None,
    path: Path,
    card: str,
    opset: int | None = None,
) -> None:
    """`dynamic` names the axes that may change."""
    onnx: Any = export_extra("onnx")
    folds = all(map(has_operator, model.modules()))
    plain = without_norms(model, _exportable).eval() if folds else scannable(model)
    tensors = _named(plain, example)
    free = _free(plain, tensors) if dynamic is None else dynamic
    if strange := [name for name in free if name not in tensors]:
        raise ValueError(
            f"dynamic= has axes of {strange[0]!r}, and the tensors of example= are "
            f"{', '.join(tensors)}"
        )
    axes = {name: dict(free.get(name, {})) for name in tensors}
    if not folds:
        _write_scan(_Called(plain, example), tensors, axes, (), path, {"card": card}, opset)
        return
    with replacing(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tracer that looks at shapes, and of its age
        traced: Any = BytesIO()
        how: Any = {"dynamo": False, "input_names": [*tensors], "dynamic_axes": axes}
        how |= {"opset_version": opset}
        torch.onnx.export(_Called(plain, example), (*tensors.values(),), traced, **how)
        content = onnx.load_model_from_string(traced.getvalue())
        if not content.graph.input:
            raise ValueError(
                "the tracer saw nothing of what the model does with its input: it would be a "
                "constant in the file"
            )
        onnx.helper.set_model_props(content, {"card": card})
        file.write(content.SerializeToString())


def has_operator(module: nn.Module) -> bool:
    """Whether a module is not recurrent, or a recurrent layer that ONNX has an operator for."""
    if isinstance(module, nn.RNNBase):
        try:
            Recurrent(module).check()
        except ValueError:
            return False
    return True


def write_parts(parts: Parts, path: Path, card: str, opset: int | None = None) -> None:
    """One of our networks whose recurrence has no operator in ONNX; arguments and results are
    named as in the files of :mod:`normrnn.deploy.onnxfile`."""
    model, given, axes = example_of(parts)
    states = [f"{name[0]}n" for name in given if name in ("h0", "c0")]
    outputs = ("logits", *states) if parts.embedding is not None else ("log_posteriors",)
    _write_scan(model, given, axes, outputs, path, {"card": card, **parts.notes}, opset)


def _write_scan(
    model: nn.Module,
    given: Mapping[str, Tensor],
    axes: Mapping[str, Mapping[int, str]],
    outputs: Sequence[str],
    path: Path,
    notes: Mapping[str, str],
    opset: int | None,
) -> None:
    """By torch's new exporter, with the recurrence as ONNX's operator Scan."""
    onnx: Any = export_extra("onnx")
    export_extra("onnxscript")
    if opset is not None and opset < SCAN_OPSET:
        raise ValueError(
            f"opset={opset}: a layer without an operator of its own in ONNX needs {SCAN_OPSET}"
        )
    shapes: Any = tuple(axes[name] or None for name in given)
    how: Any = {
        "dynamo": True,
        "input_names": [*given],
        "output_names": [*outputs] or None,
        "dynamic_shapes": (shapes,) if isinstance(model, _Called) else shapes,
        "opset_version": opset or SCAN_OPSET,
        "verbose": False,
    }
    model = model.eval().requires_grad_(False)
    logger = logging.getLogger("torch.onnx")  # of operators of packages that are not there
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a part of torch that is young
            made: Any = torch.onnx.export(model, (*given.values(),), **how)
    finally:
        logger.setLevel(level)
    content = made.model_proto
    del content.graph.value_info[:]  # shapes of weights, which int8 transposes
    onnx.helper.set_model_props(content, dict(notes))
    if content.ByteSize() > LIMIT:
        raise UserError(TOO_LARGE)
    with replacing(path) as file:
        file.write(content.SerializeToString())
