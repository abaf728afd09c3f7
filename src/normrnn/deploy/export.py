"""Write a run, one of our networks or a user's own model to a file, with a model card beside it."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.config.registry import task_of
from normrnn.deploy import tensors, traced
from normrnn.deploy.card import CARD, SUFFIXES, About, of_run
from normrnn.errors import UsageError
from normrnn.files import expanded, open_regular, write_whole
from normrnn.runs.environment import named_device
from normrnn.runs.names import CHECKPOINT, CONFIG, MODEL
from normrnn.runs.store import RunDirectory

RUN_FILES = (MODEL, CHECKPOINT)
"""Files of a run with such suffixes."""


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
            ``{"x": {0: "T", 1: "B"}}``; for onnx the parts of a tuple are ``state.0``, ``state.1``,
            and the default is the first two of every tensor, the batch of a state (layers, B, H) in
            a tuple; for program also what torch.export calls ``dynamic_shapes``.
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
    format = format_of(path) if format is None else format
    if format not in SUFFIXES:
        raise ValueError(f"unknown format={format!r}: choose one of {', '.join(SUFFIXES)}")
    if quantize not in (None, "int8") or (quantize and format != "onnx"):
        raise ValueError(f"quantize={quantize!r} with format={format!r}: 'int8' is for 'onnx'")
    if opset is not None and format != "onnx":
        raise ValueError(f"opset={opset} with format={format!r}: it is for 'onnx'")
    file, card = target(path, format)
    if isinstance(model, nn.Module):
        network = getattr(model, "_orig_mod", model)  # a compiled model has other names
        about = _of_model(network)
    else:
        run = RunDirectory(expanded(model))
        network = task_of(run.config()).load(run, named_device("cpu"))
        about = of_run(run)
    plain: Any = getattr(network, "plain_network", None)
    network = network if plain is None else plain()
    if example is None and format in ("onnx", "program"):
        example_of: Any = getattr(network, "example_inputs", None)
        if example_of is None:
            raise ValueError(
                f"format={format!r} traces your own model: give example=, a tuple of its arguments"
            )
        example, axes = example_of()
        dynamic = axes if dynamic is None else dynamic
    arguments = _arguments(example)
    if format == "onnx":
        traced.check_opset(opset)
        write = partial(traced.write_onnx, network, arguments, dynamic, opset, bool(quantize))
    elif format == "program":
        write = partial(traced.write_program, network, arguments, dynamic)
    else:
        write = partial(tensors.write, network, format=format)
    _refuse_other(card)
    new_folder = not file.parent.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        code = write(file)
    except Exception:
        if new_folder:
            with contextlib.suppress(OSError):
                file.parent.rmdir()
        raise
    write_whole(card, about.card(code).encode())
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


def _refuse_other(card: Path) -> None:
    """Raise UsageError if the card would overwrite a file that is not a card."""
    if card.exists():
        with open_regular(card) as file:
            text = file.read(100).decode(errors="replace")
        if text.strip() and not About.is_card(text):
            raise UsageError(f"{card} exists and is not a model card: export to another directory")


def format_of(path: Path) -> str:
    """Return the format of a file's suffix; "torch" if it has none."""
    return next((name for name, suffix in SUFFIXES.items() if suffix == path.suffix), "torch")


def target(path: Path, format: str) -> tuple[Path, Path]:
    """Return the file to write and its card."""
    suffix = SUFFIXES[format]
    if path.suffix in SUFFIXES.values() and not path.is_dir():
        if path.suffix != suffix:
            raise UsageError(f"{path} does not fit the format {format}: it writes {suffix} files")
        if path.name in RUN_FILES and (path.parent / CONFIG).exists():
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
