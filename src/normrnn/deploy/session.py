"""Run an ONNX file with onnxruntime, and quantise it."""

from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.extras import export_extra

Session = Any
"""onnxruntime's InferenceSession, which has no types."""


def session(path: Path) -> Session:
    """Return a session on the CPU."""
    runtime = export_extra("onnxruntime")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def quantise(path: Path, smaller: Path) -> None:
    """Store the weights of products, of the embedding and of LSTMs as int8.

    Their inputs are quantised dynamically. GRU and RNN operators have no int8 form and are kept.
    """
    quantization, onnx = export_extra("onnxruntime.quantization"), export_extra("onnx")
    # Silences the advice to simplify the graph first.
    prepared = onnx.ModelProto()
    onnx.helper.set_model_props(prepared, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with path.open("ab") as file:
        file.write(prepared.SerializeToString())
    try:
        quantization.quantize_dynamic(
            str(path), str(smaller), weight_type=quantization.QuantType.QInt8, per_channel=False
        )
    # onnx and onnxruntime raise exceptions of many types where a file cannot be written.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"the int8 file cannot be made in {path.parent} ({reason}): is the disk full?"
        ) from None
