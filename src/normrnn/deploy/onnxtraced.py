"""A user's own model in the format onnx, by torch's exporter.

By the old one (dynamo=False), whose recurrent operators have dynamic time and batch: the new one
freezes the number of time steps. It knows torch's layers, so normalisation is folded into those;
for peepholes and ``lengths=``, which they have not, the operator is named here.
"""

import inspect
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.deploy.onnxfile import attributes, peepholes, weights
from normrnn.deploy.parts import Recurrent, dense_or_padded, without_norms
from normrnn.extras import export_extra
from normrnn.files import replacing
from normrnn.nn.base import Normalised


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


def _exportable(layer: nn.RNNBase) -> nn.Module:
    """What torch's exporter knows of a layer that folded already."""
    recurrent = Recurrent(layer)
    recurrent.check()
    if not isinstance(layer, Normalised):
        return layer
    return _Standing(recurrent, None if recurrent.peepholes else layer.fold())


def write_traced(
    model: nn.Module,
    example: tuple[Any, ...],
    dynamic: Mapping[str, Mapping[int, str]] | None,
    path: Path,
    card: str,
) -> None:
    """`dynamic` names the axes that may change."""
    onnx: Any = export_extra("onnx")
    plain = without_norms(model, _exportable).eval()
    names = [
        name for name, _ in zip(inspect.signature(plain.forward).parameters, example, strict=False)
    ]
    if dynamic is None:
        pairs = zip(names, example, strict=True)
        sized = {n: v for n, v in pairs if isinstance(v, Tensor)}
        dynamic = {n: dict(enumerate(("axis0", "axis1")[: v.dim()])) for n, v in sized.items()}
    axes = {name: dict(of) for name, of in dynamic.items()}
    with replacing(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tracer that looks at shapes, and of its age
        traced: Any = BytesIO()
        how: Any = {"dynamo": False, "input_names": names, "dynamic_axes": axes}
        torch.onnx.export(plain, example, traced, **how)
        content = onnx.load_model_from_string(traced.getvalue())
        if not content.graph.input:
            raise ValueError(
                "the tracer saw nothing of what the model does with its input: it would be a "
                "constant in the file"
            )
        onnx.helper.set_model_props(content, {"card": card})
        file.write(content.SerializeToString())
