"""The format onnx: the network as a graph with ONNX's own LSTM, GRU and RNN operators.

Our networks are written by hand from their folded weights: torch's new exporter (dynamo=True)
freezes the number of time steps, its old one has no peepholes and none of our ragged batches.

Tensors are written one at a time. That is protobuf's rule of merging: a file may hold the same
message in parts, and a reader puts lists together.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from normrnn.deploy.parts import Direction, Parts, Recurrent
from normrnn.errors import UserError
from normrnn.extras import export_extra
from normrnn.files import replacing

OPSET, LOWEST = 17, 13
LIMIT = 2**31 - 1
TOO_LARGE = "a network of more than 2 GB does not fit into one ONNX file"
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""ONNX's order of torch's gates: i o f c of i f g o, z r h of r z n."""


class Graph:
    """Nodes, inputs and outputs, and weights that are written when their turn comes."""

    def __init__(self) -> None:
        self.onnx: Any = export_extra("onnx")
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        """Name -> tensor, or a function that gives it."""

    def __call__(self, kind: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> str:
        """Adds a node; the name of its first output."""
        self.nodes.append(
            self.onnx.helper.make_node(kind, list(inputs), list(outputs), **attributes)
        )
        return outputs[0]

    def constant(self, name: str, value: Any) -> str:
        """A tensor, or a function that gives one when it is written."""
        self.weights[name] = value
        return name

    def write(
        self, file: IO[bytes], inputs: list[Any], outputs: list[Any], notes: Any, opset: int
    ) -> None:
        onnx, make = self.onnx, self.onnx.helper
        graph = make.make_graph(self.nodes, "normrnn", inputs, outputs)
        domain = [make.make_opsetid("", opset)]
        ir = make.find_min_ir_version_for(domain)
        model = make.make_model(graph, opset_imports=domain, ir_version=ir, producer_name="normrnn")
        make.set_model_props(model, dict(notes))
        written = file.write(model.SerializeToString())
        for name, value in self.weights.items():
            tensor: Any = value() if callable(value) else value
            array = tensor.detach().cpu().contiguous().numpy()
            part = onnx.ModelProto()
            part.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
            written += file.write(part.SerializeToString())
            if written > LIMIT:
                raise UserError(TOO_LARGE)


def check_opset(opset: int | None) -> None:
    """ValueError if files cannot be written for that version of ONNX's operators."""
    newest = export_extra("onnx").defs.onnx_opset_version()
    if opset is not None and not LOWEST <= opset <= newest:
        raise ValueError(f"opset={opset}: expected a number from {LOWEST} to {newest}")


def write(parts: Parts, path: Path, card: str, opset: int | None = None) -> None:
    """Language models: tokens (T, B), h0[, c0] -> logits, hn[, cn]; others: features (T, B, F),
    lengths (B,) -> log_posteriors (T, B, C), 0 in the padding."""
    graph = Graph()
    make = graph.onnx.helper.make_tensor_value_info
    real, whole = graph.onnx.TensorProto.FLOAT, graph.onnx.TensorProto.INT64
    rnn = parts.recurrent
    weight = graph.constant("decoder.weight", lambda: _float(parts.decoder.weight.t()))
    if parts.embedding is not None:
        table = graph.constant("embedding.weight", lambda: _float(parts.embedding))
        x = graph("Gather", [table, "tokens"], "embedded")
        state = [rnn.layers * rnn.directions, "B", rnn.hidden]
        names = "hc"[: rnn.states]
        x = recurrent(graph, rnn, x, "", [f"{s}0" for s in names], [f"{s}n" for s in names])
        _decoded(graph, parts, x, weight, "logits")
        inputs = [make("tokens", whole, ["T", "B"])]
        inputs += [make(f"{s}0", real, state) for s in names]
        outputs = [make("logits", real, ["T", "B", parts.classes])]
        outputs += [make(f"{s}n", real, state) for s in names]
    else:
        assert parts.mean is not None
        assert parts.scale is not None
        mean = graph.constant("mean", _float(parts.mean))
        scale = graph.constant("scale", _float(parts.scale))
        x = graph("Mul", [graph("Sub", ["features", mean], "centred"), scale], "normalised")
        lengths = graph("Cast", ["lengths"], "lengths32", to=graph.onnx.TensorProto.INT32)
        inside = _inside(graph, "features", "lengths")
        nothing = graph.constant("nothing", torch.zeros(()))
        # The operator does not look at padding, but its int8 form takes a range from all of x.
        x = graph("Where", [inside, x, nothing], "frames")
        x = recurrent(graph, rnn, x, lengths)
        x = graph("LogSoftmax", [_decoded(graph, parts, x, weight, "scores")], "logs", axis=-1)
        graph("Where", [inside, x, nothing], "log_posteriors")
        inputs = [
            make("features", real, ["T", "B", len(parts.mean)]),
            make("lengths", whole, ["B"]),
        ]
        outputs = [make("log_posteriors", real, ["T", "B", parts.classes])]
    with replacing(path) as file:
        graph.write(file, inputs, outputs, {"card": card, **parts.notes}, opset or OPSET)


def recurrent(
    graph: Graph,
    rnn: Recurrent,
    x: str,
    lengths: str,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> str:
    """A stack on x (T, B, I); `before` and `after` name the states (layers · D, B, H), if any."""
    kind, D = rnn.kind, rnn.directions
    sizes = graph.constant("rnn.sizes", torch.tensor([0, 0, D * rnn.hidden]))
    if rnn.layers > 1 and before:
        each = graph.constant("rnn.each", torch.tensor([D] * rnn.layers))
        for name in before:
            graph("Split", [name, each], *(f"{name}.{k}" for k in range(rnn.layers)), axis=0)
    for layer in range(rnn.layers):
        names = [f"rnn.{layer}.{letter}" for letter in "WRB"]
        own = map(graph.constant, names, weights(rnn, layer))
        inputs = [x, *own, lengths]
        inputs += [f"{name}.{layer}" if rnn.layers > 1 else name for name in before]
        if kind == "LSTM" and rnn.peepholes:
            own = graph.constant(f"rnn.{layer}.P", lambda k=layer: peepholes(rnn, k))
            inputs += [""] * (7 - len(inputs)) + [own]
        finals = [f"{name}.{layer}" if rnn.layers > 1 else name for name in after]
        y = graph(kind, inputs, f"rnn.{layer}.y", *finals, **attributes(rnn))
        y = graph("Transpose", [y], f"rnn.{layer}.rows", perm=[0, 2, 1, 3])  # (T, D, B, H)
        x = graph("Reshape", [y, sizes], f"rnn.{layer}.output")
    if rnn.layers > 1:
        for name in after:
            graph("Concat", [f"{name}.{k}" for k in range(rnn.layers)], name, axis=0)
    return x


def attributes(rnn: Recurrent) -> dict[str, Any]:
    """Those of the operator."""
    D = rnn.directions
    found = {"direction": "bidirectional" if D == 2 else "forward", "hidden_size": rnn.hidden}
    if rnn.kind == "GRU":
        found["linear_before_reset"] = 1
    if rnn.kind == "RNN":
        found["activations"] = [rnn.mode.partition("_")[2].capitalize()] * D
    return found


def weights(rnn: Recurrent, layer: int) -> list[Callable[[], Tensor]]:
    """W (D, C, I), R (D, C, H) and B (D, 2C) of a layer, each made when it is asked for."""
    order, D = _GATES[rnn.kind], rnn.directions

    def of(part: Callable[[Direction], Tensor]) -> Callable[[], Tensor]:
        def stacked() -> Tensor:
            directions = (rnn.direction(layer * D + d) for d in range(D))
            return torch.stack([_float(part(direction)) for direction in directions])

        return stacked

    def gates(value: Tensor) -> Tensor:
        blocks = value.chunk(len(order))
        return torch.cat([blocks[gate] for gate in order])

    return [
        of(lambda direction: gates(direction.w_ih)),
        of(lambda direction: gates(direction.w_hh)),
        of(lambda direction: torch.cat([gates(direction.b_ih), gates(direction.b_hh)])),
    ]


def peepholes(rnn: Recurrent, layer: int) -> Tensor:
    """P (D, 3H), of i, o and f; 0 for those that are not there."""

    def of(direction: Direction) -> Tensor:
        zero = direction.w_hh.new_zeros(rnn.hidden)
        i, f, o = (zero if p is None else p for p in direction.peephole)
        return _float(torch.cat([i, o, f]))

    D = rnn.directions
    return torch.stack([of(rnn.direction(layer * D + d)) for d in range(D)])


def _decoded(graph: Graph, parts: Parts, x: str, weight: str, name: str) -> str:
    product = graph(
        "MatMul", [x, weight], f"{name}.product" if parts.decoder.bias is not None else name
    )
    if parts.decoder.bias is None:
        return product
    bias = graph.constant("decoder.bias", _float(parts.decoder.bias))
    return graph("Add", [product, bias], name)


def _inside(graph: Graph, features: str, lengths: str) -> str:
    """Whether a frame (T, B, 1) lies inside its sequence."""
    constant = graph.constant
    zero, one = constant("zero", torch.tensor(0)), constant("one", torch.tensor(1))
    last = constant("last", torch.tensor([-1]))
    first, second = constant("first", torch.tensor([0])), constant("second", torch.tensor([1]))
    time = graph("Gather", [graph("Shape", [features], "shape"), zero], "time")
    steps = graph("Unsqueeze", [graph("Range", [zero, time, one], "steps"), second], "column")
    row = graph("Unsqueeze", [lengths, first], "row")
    return graph("Unsqueeze", [graph("Less", [steps, row], "inside"), last], "mask")


def _float(value: Any) -> Tensor:
    return value.detach().float().cpu()


def snippet(parts: Parts | None, name: str) -> str:
    """Code that runs the file with onnxruntime alone."""
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
