"""An ONNX file run by onnxruntime, and made smaller."""

from pathlib import Path
from typing import Any

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
    quantization.quantize_dynamic(
        str(path), str(smaller), weight_type=quantization.QuantType.QInt8, per_channel=False
    )
