"""The graph break of our layers under torch.compile.

A module of its own, imported only once the compiler is: ``torch.compiler.disable`` imports the
compiler, which takes seconds that most programs never need.
"""

from typing import Any

import torch


def _run(layer: Any, input: Any, hx: Any, lengths: Any) -> Any:
    return layer.run(input, hx, lengths)


run: Any = torch.compiler.disable(_run)
"""Runs the layer eagerly."""
