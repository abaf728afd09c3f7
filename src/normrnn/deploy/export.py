"""Write a run, one of our networks or a user's own model to a file, with a model card beside it."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.config.registry import task_of
from normrnn.deploy import tensors
from normrnn.deploy.card import About, of_run
from normrnn.deploy.onnxfile import check_opset
from normrnn.deploy.parts import Parts
from normrnn.errors import UsageError, UserError
from normrnn.files import expanded, is_utf8, open_regular, write_whole
from normrnn.runs.environment import named_device
from normrnn.runs.names import CHECKPOINT, CONFIG, MODEL, PREVIOUS
from normrnn.runs.store import RunDirectory

SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors", "onnx": ".onnx", "program": ".pt2"}
CARD = "README.md"
OWN = (MODEL, CHECKPOINT, PREVIOUS)
"""Files of a run with such suffixes."""


def export(
    model: nn.Module | str | Path,
    path: str | Path,
    format: str = "torch",
    *,
    example: tuple[Any, ...] | Tensor | None = None,
    dynamic: Any = None,
    quantize: str | None = None,
    opset: int | None = None,
    data: str = "",
) -> Path:
    """Write a trained network for use without this library, and a model card beside it.

    Args:
        model: a run directory, one of its networks, or any model that holds our layers; its
            normalisation is folded into plain weights, with the statistics it has, where it folds.
        path: a file with the format's suffix, or a directory to make for ``model`` with that
            suffix and the card, README.md.
        format: ``"torch"`` (``.pt``), a dict that ``torch.load(weights_only=True)`` reads;
            ``"safetensors"``; ``"onnx"``, with ONNX's own recurrent operators, or a Scan for layers
            that do not fold; ``"program"`` (``.pt2``), torch.export's.
        example: arguments of your own model, for onnx and program: it is traced with them. A
            tuple, or a tensor if that is the only one.
        dynamic: the axes of those that may change: for onnx by the argument's name,
            ``{"x": {0: "T", 1: "B"}}``, the parts of a tuple ``state.0``, ``state.1`` (default: the
            first two of every tensor, the batch of a state (layers, B, H) in a tuple), for program
            what torch.export calls ``dynamic_shapes``.
        quantize: ``"int8"``, for onnx: weights in a quarter of the room. The card of a run has the
            loss on its validation data before and after.
        opset: the version of ONNX's operators, for onnx; by default 17, and 18 for a Scan.
        data: where that data is now, if not where it was in training.

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
    if format not in SUFFIXES:
        raise ValueError(f"unknown format={format!r}: choose one of {', '.join(SUFFIXES)}")
    if quantize not in (None, "int8") or (quantize and format != "onnx"):
        raise ValueError(f"quantize={quantize!r} with format={format!r}: 'int8' is for 'onnx'")
    if opset is not None and format != "onnx":
        raise ValueError(f"opset={opset} with format={format!r}: it is for 'onnx'")
    file, card = target(expanded(path), format)
    run = None
    if isinstance(model, nn.Module):
        network = getattr(model, "_orig_mod", model)  # a compiled model has other names
        about = _of_model(network)
    else:
        run = RunDirectory(expanded(model))
        network = task_of(run.config()).load(run, named_device("cpu"))
        about = of_run(run)
    ours: Any = getattr(network, "plain_parts", None)
    parts: Any = None if ours is None else ours()
    if example is None and hasattr(network, "example_inputs"):
        example = network.example_inputs()  # type: ignore[operator]
        if format == "program" and dynamic is None:
            dynamic = network.dynamic_shapes()  # type: ignore[operator]
    if parts is not None and format in ("torch", "safetensors"):
        parts.recurrent.check()
    if parts is None and format in ("onnx", "program") and example is None:
        raise ValueError(
            f"format={format!r} traces your own model: give example=, a tuple of its arguments"
        )
    if format == "onnx":
        check_opset(opset)
    _refuse_other(card)
    write, snippet = _writer(format, network, parts, _arguments(example), dynamic, opset)
    file.parent.mkdir(parents=True, exist_ok=True)
    sections = {}
    if quantize is None:
        write(file)
    else:
        sections["Quantisation"] = _quantised(write, file, run, data)
    write_whole(card, about.card(snippet(file.name), sections).encode())
    return file


def _arguments(example: Any) -> tuple[Any, ...]:
    """Return the arguments as a tuple; a packed sequence, itself a tuple, is one argument."""
    if isinstance(example, Tensor | PackedSequence):
        return (example,)
    if not isinstance(example, tuple | None):
        raise ValueError(
            f"example= is a tuple of the model's arguments, got a {type(example).__name__}"
        )
    return example or ()


def _writer(
    format: str,
    network: nn.Module,
    parts: Parts | None,
    example: Any,
    dynamic: Any,
    opset: int | None,
) -> tuple[Callable[[Path], None], Callable[[str], str]]:
    """Return what writes the network to a file, and the code that loads a file of a given name."""
    write: Any
    if format in ("torch", "safetensors"):
        known = tensors.Portable
        portable = known.of_model(network) if parts is None else known.of_parts(parts)
        write = tensors.write_torch if format == "torch" else tensors.write_safetensors
        return partial(write, portable), lambda name: tensors.snippet(portable, name, format)
    if format == "onnx":
        from normrnn.deploy import onnxfile as maker

        if parts is None:
            write = partial(maker.write_model, network, example, dynamic, opset=opset)
        else:
            write = partial(maker.write_network, parts, opset=opset)
    else:
        from normrnn.deploy import program as maker

        if parts is None:
            write = partial(maker.write_traced, network, example, dynamic)
        else:
            write = partial(maker.write, parts)
    return write, partial(maker.snippet, parts)


def _quantised(
    write: Callable[[Path], None], file: Path, run: RunDirectory | None, data: str
) -> str:
    """Write an int8 file; return what that does to the size, and to a run's loss."""
    from normrnn.deploy.session import quantise, session

    # onnx accepts only names in UTF-8.
    with tempfile.TemporaryDirectory(dir=file.parent if is_utf8(file.parent) else None) as scratch:
        whole, smaller = Path(scratch) / "whole.onnx", Path(scratch) / "smaller.onnx"
        write(whole)
        quantise(whole, smaller)
        sizes = [path.stat().st_size / 1e6 for path in (whole, smaller)]
        words = f"Dynamic int8 weights: {sizes[1]:,.2f} MB instead of {sizes[0]:,.2f}."
        if run is not None:
            loss = task_of(run.config()).exported_loss
            try:
                before, after = (loss(run, data, session(path)) for path in (whole, smaller))
            except UserError as error:
                raise UserError(
                    f"the loss before and after is measured on the run's validation data: {error};"
                    " --data says where it is now"
                ) from None
            measure = run.config().own_measure
            words += (
                f" Loss on the validation data: {before:.4f} nats before, {after:.4f} after"
                f" ({measure.name} {measure.text(before)} and {measure.text(after)})."
            )
        write_whole(file, smaller.read_bytes())
    return words


def _refuse_other(card: Path) -> None:
    """Raise UsageError if the card would overwrite a file that is not a card."""
    if card.exists():
        with open_regular(card) as file:
            text = file.read(100).decode(errors="replace")
        if text.strip() and not About.is_card(text):
            raise UsageError(f"{card} exists and is not a model card: export to another directory")


def target(path: Path, format: str) -> tuple[Path, Path]:
    """Return the file to write and its card."""
    suffix = SUFFIXES[format]
    if path.suffix in SUFFIXES.values() and not path.is_dir():
        if path.suffix != suffix:
            raise UsageError(f"{path} does not fit the format {format}: it writes {suffix} files")
        if path.name in OWN and (path.parent / CONFIG).exists():
            raise UsageError(f"{path} is a file of the run: it would be overwritten")
        return path, path.with_suffix(".md")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: name a directory, or a file that ends in {suffix}")
    if (path / CONFIG).exists():
        raise UsageError(f"{path} is a run directory: its own files would be overwritten")
    return path / f"model{suffix}", path / CARD


def _of_model(model: nn.Module) -> About:
    count = sum(parameter.numel() for parameter in model.parameters())
    kind = type(model).__name__
    summary = f"`{kind}`, {count:,} parameters before folding; its recurrent layers are plain ones."
    return About(title=kind, summary=summary)
