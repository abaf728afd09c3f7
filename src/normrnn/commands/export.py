"""`normrnn export RUN -o PATH`."""

import re
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from normrnn.errors import UserError


def command(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    out: Annotated[Path, arg(aliases=["-o"], metavar="PATH")],
    format: Literal["torch", "onnx", "safetensors"] | None = None,
) -> None:
    """The best model of a run, its normalisation folded into plain weights, with a model card.

    Args:
        run: Run directory.
        out: Directory to make, for the model and README.md; or the file, its card beside it.
        format: Plain tensors for torch (.pt) or in safetensors, or an ONNX graph. None: by the
            suffix of the file, else torch.
    """
    from normrnn.deploy.card import beside
    from normrnn.deploy.export import export

    try:
        file = export(run, out, format)
    except ValueError as error:  # what cannot be exported, and why
        raise UserError(str(error)) from None
    print(f"{file}: {file.stat().st_size / 1e6:,.2f} MB, with its model card\n")
    for code in re.findall(r"```python\n(.*?)```", beside(file) or "", re.DOTALL):
        print(code)
