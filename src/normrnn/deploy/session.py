"""An ONNX file run by onnxruntime, and made smaller."""

from pathlib import Path
from typing import Any

from normrnn.errors import UserError
from normrnn.extras import export_extra

Session = Any
"""onnxruntime's InferenceSession, which has no types."""


def session(path: Path) -> Session:
    """On the CPU."""
    runtime = export_extra("onnxruntime")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def quantise(path: Path, smaller: Path) -> None:
    """Weights of the products, of the lookup table and of LSTMs as int8; what they are multiplied
    with is made int8 on the way. Other recurrent operators have no int8 form and stay as they
    are."""
    quantization, onnx = export_extra("onnxruntime.quantization"), export_extra("onnx")
    # A graph that is written by hand has nothing to be simplified: no need to be told so.
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
