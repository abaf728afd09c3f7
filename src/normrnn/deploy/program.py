"""The format program: torch.export's, with dynamic time and batch.

Exporters see our layers as torch's `scan` (`normrnn.ops.scan`), so a file needs torch alone.
"""

import copy
import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as shapes

from normrnn.deploy.parts import Parts, scannable
from normrnn.files import write_whole

State = tuple[Tensor, ...]


class TextModel(nn.Module):
    """Tokens (T, B), h0[, c0] -> logits, hn[, cn]."""

    def __init__(self, parts: Parts, rnn: nn.Module) -> None:
        super().__init__()
        assert parts.embedding is not None
        self.embedding = nn.Embedding.from_pretrained(parts.embedding)
        self.rnn, self.decoder = rnn, copy.deepcopy(parts.decoder)

    def forward(self, tokens: Tensor, h0: Tensor, c0: Tensor | None = None) -> State:
        state = h0 if c0 is None else (h0, c0)
        output, after = self.rnn(self.embedding(tokens), state)
        return self.decoder(output), *((after,) if isinstance(after, Tensor) else after)


class SpeechModel(nn.Module):
    """Features (T, B, F), lengths (B,) -> log posteriors, 0 in the padding."""

    mean: Tensor
    scale: Tensor

    def __init__(self, parts: Parts, rnn: nn.Module) -> None:
        super().__init__()
        self.register_buffer("mean", parts.mean)
        self.register_buffer("scale", parts.scale)
        self.rnn, self.decoder = rnn, copy.deepcopy(parts.decoder)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        output, _ = self.rnn((features - self.mean) * self.scale, lengths=lengths)
        logs = self.decoder(output).log_softmax(-1)
        time = torch.arange(features.shape[0], device=features.device)
        return torch.where((time[:, None] < lengths)[:, :, None], logs, 0.0)


def example_of(
    parts: Parts, layer: nn.Module | None = None
) -> tuple[nn.Module, dict[str, Tensor], dict[str, dict[int, str]]]:
    """Return one of our networks to be traced, its arguments by name, and their dynamic axes.

    `layer` takes the place of the recurrent layer; by default one that exporters can trace.
    """
    rnn = parts.recurrent
    layer = layer or scannable(rnn.layer)
    assert layer is not None
    if parts.embedding is None:
        assert parts.mean is not None
        given = {"features": torch.zeros(3, 2, len(parts.mean)), "lengths": torch.tensor([3, 2])}
        return SpeechModel(parts, layer), given, {"features": {0: "T", 1: "B"}, "lengths": {0: "B"}}
    size = rnn.layers * rnn.directions, 2, rnn.hidden
    names = [f"{letter}0" for letter in "hc"[: rnn.states]]
    # Separate tensors: torch.export merges two arguments that are one tensor.
    given = {"tokens": torch.zeros(3, 2, dtype=torch.long)}
    given |= {name: torch.zeros(size) for name in names}
    axes = {"tokens": {0: "T", 1: "B"}, **{n: {1: "B"} for n in names}}
    return TextModel(parts, layer), given, axes


def write(parts: Parts, path: Path) -> None:
    """Write one of our networks."""
    model, given, axes = example_of(parts)
    dims = {"T": Dim("T"), "B": Dim("B")}
    dynamic = tuple({axis: dims[name] for axis, name in of.items()} for of in axes.values())
    _write(model, (*given.values(),), dynamic, path, parts.notes)


def write_traced(model: nn.Module, example: tuple[Any, ...], dynamic: Any, path: Path) -> None:
    """Write a user's own model; `dynamic` is torch.export's `dynamic_shapes`."""
    _write(scannable(model), example, dynamic, path, {})


def _write(model: nn.Module, example: Any, dynamic: Any, path: Path, notes: Any) -> None:
    # Sizes that are equal by chance, a batch of 3 and a GRU's gates, stay independent.
    apart: Any = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    model = model.eval().requires_grad_(False)  # or the backward pass is traced too
    with warnings.catch_warnings(), torch.no_grad(), apart:
        warnings.simplefilter("ignore")  # experimental parts of torch
        program = torch.export.export(model, example, dynamic_shapes=dynamic, strict=False)
    if any(str(node.target).startswith("normrnn.") for node in program.graph.nodes):
        raise ValueError(
            "the program would need normrnn to run: give its layers tensors, with lengths= where "
            "they are padded, not packed sequences"
        )
    buffer = io.BytesIO()  # torch's writer ends the process if a disk is full
    extra = {f"{name}.json": text for name, text in notes.items()}
    torch.export.save(program, buffer, extra_files=extra)
    write_whole(path, buffer.getbuffer())


def snippet(parts: Parts | None, name: str) -> str:
    """Return code that runs the file with torch alone."""
    start = (
        "import torch\n\n# unpickles: only for files of people you trust\n"
        f"model = torch.export.load({json.dumps(name)}).module()\n"
    )
    if parts is None:
        return start
    rnn = parts.recurrent
    if parts.embedding is None:
        assert parts.mean is not None
        return (
            f"{start}features, lengths = torch.randn(50, 2, {len(parts.mean)}), "
            "torch.tensor([50, 30])  # padded (T, B, F)\n"
            "log_posteriors = model(features, lengths)  # (T, B, states)\n"
        )
    size = f"{rnn.layers * rnn.directions}, 2, {rnn.hidden}"
    return (
        f"{start}state = [torch.zeros({size})] * {rnn.states}\n"
        "tokens = torch.zeros(5, 2, dtype=torch.long)  # ids (T, B): vocabulary.json in the file\n"
        "logits, *state = model(tokens, *state)  # (T, B, symbols)\n"
    )
