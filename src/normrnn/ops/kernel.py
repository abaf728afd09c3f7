"""The compiled recurrence. There is none yet: everything runs in :mod:`normrnn.ops.loop`."""

from collections.abc import Sequence

from torch import Tensor

from normrnn.ops.call import Call, Cell, Plug, Result, State


def serves(
    call: Call,  # noqa: ARG001
    pre: Tensor,  # noqa: ARG001
    cells: Sequence[Cell],  # noqa: ARG001
    state: State | None,  # noqa: ARG001
    plug: Plug,  # noqa: ARG001
) -> bool:
    """Whether the kernel takes this call."""
    return False


def recur(
    call: Call, pre: Tensor, cells: Sequence[Cell], state: State | None, plug: Plug
) -> Result:
    """As :func:`normrnn.ops.recurrence.recur`."""
    raise NotImplementedError
