"""A call as a flat list of tensors and a few plain values, and back: what an operator can take.

The order is x, h0, c0, resets, what zoneout keeps of h and c, those of the plug as its fields
come, then those of every direction. A plug's fields are tensors, pairs of them (a mean and a
variance), or numbers; a new kind of plug needs nothing here.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple, get_args

from torch import Tensor

from normrnn.ops.call import (
    GATES,
    Call,
    Cell,
    InputNorm,
    Inputs,
    Peephole,
    Plug,
    RecurrentNorm,
    Zoneout,
)
from normrnn.ops.steps import Steps

Flat = Sequence[Tensor | None]
X, H0, C0, RESETS, KEPT_H, KEPT_C, FIRST = range(7)
"""Places in the flat order; the plug's begin at ``FIRST``."""
OF_A_CELL = 7
"""w_ih, w_hh, bias_hn, three peepholes and w_hr."""


class Spec(NamedTuple):
    """What is computed, but for tensors and the layout of rows."""

    mode: str
    reverse: tuple[bool, ...]
    plug: str
    """The name of its class."""
    numbers: tuple[float, ...]

    @property
    def first_cell(self) -> int:
        """Where the tensors of the directions begin."""
        return FIRST + len(_KINDS[self.plug].tensors)

    @property
    def parts(self) -> int:
        """Of a state."""
        return 2 if self.mode == "LSTM" else 1

    @property
    def options(self) -> dict[str, Any]:
        """The plug's numbers by name."""
        kind = _KINDS[self.plug]
        return {name: of(v) for (name, of), v in zip(kind.numbers, self.numbers, strict=True)}

    @property
    def measures(self) -> bool:
        """Whether the batch's own statistics are taken."""
        return self._is("batch", False)

    @property
    def by_step(self) -> bool:
        """Whether they are those of every step; inside the steps there is no choice."""
        return self._is("per_step", True)

    @property
    def judges_steps(self) -> bool:
        """Whether steps of W_x x whose rows are all equal are normalised with given statistics."""
        return self.measures and self.by_step and self.plug in _OF_INPUT

    def _is(self, name: str, otherwise: bool) -> bool:
        place = _KINDS[self.plug].places.get(name)
        return otherwise if place is None else bool(self.numbers[place])

    def channels(self, H: int) -> int:
        """Of a direction's statistics."""
        C = GATES[self.mode] * H
        return 2 * C + H * self.options["cell"] if self.plug == RecurrentNorm.__name__ else C

    def place(self, name: str) -> int | None:
        """Where a tensor of the plug is; the second of a pair is ``name.1``."""
        names = _KINDS[self.plug].tensors
        return FIRST + names.index(name) if name in names else None


class _Kind(NamedTuple):
    build: Any
    tensors: tuple[str, ...]
    numbers: tuple[tuple[str, type], ...]
    places: dict[str, int]
    """Of the numbers."""


def _kind(plug: Any) -> _Kind:
    tensors: list[str] = []
    numbers: list[tuple[str, type]] = []
    for field in fields(plug):
        kind: Any = (get_args(field.type) or (field.type,))[0]
        if kind in (bool, int, float):
            numbers.append((field.name, kind))
        else:
            pair = [f"{field.name}.1"] if kind is not Tensor else []
            tensors += [field.name, *pair]
    places = {name: k for k, (name, _) in enumerate(numbers)}
    return _Kind(plug, tuple(tensors), tuple(numbers), places)


_OF_INPUT = InputNorm.__name__, RecurrentNorm.__name__
_KINDS = {plug.__name__: _kind(plug) for plug in get_args(Plug)}


def is_known(plug: str) -> bool:
    """Whether there is a plug of this name."""
    return plug in _KINDS


def number_names(plug: str) -> list[str]:
    """The names of a plug's numbers, in order."""
    return [name for name, _ in _KINDS[plug].numbers]


def flattened(call: Call, inputs: Inputs, plug: Plug) -> tuple[Spec, list[Tensor | None]]:
    name = type(plug).__name__
    kind, own = _KINDS[name], vars(plug)
    spec = Spec(call.mode, call.reverse, name, tuple(float(own[n]) for n, _ in kind.numbers))
    h0, c0 = (*(inputs.state or ()), None, None)[:2]
    tensors = [inputs.x, h0, c0, call.resets, *call.zoneout]
    for field in kind.tensors:
        value = own[field.removesuffix(".1")]
        if isinstance(value, tuple):
            value = value[field.endswith(".1")]
        tensors.append(value)
    w_ih = inputs.w_ih or (None,) * len(inputs.cells)
    for weight, (w_hh, bias_hn, (i, f, o), w_hr) in zip(w_ih, inputs.cells, strict=True):
        tensors += (weight, w_hh, bias_hn, i, f, o, w_hr)
    return spec, tensors


def restored(spec: Spec, steps: Steps, tensors: Sequence[Any]) -> tuple[Call, Inputs, Plug]:
    x, h0, c0, resets, *kept = tensors[:FIRST]
    kind = _KINDS[spec.plug]
    values: dict[str, Any] = spec.options
    for name, value in zip(kind.tensors, tensors[FIRST:], strict=False):
        if f"{name}.1" in kind.tensors:
            values[name] = None if value is None else (value,)
        elif name.endswith(".1"):
            first = name.removesuffix(".1")
            values[first] = None if value is None else (*values[first], value)
        else:
            values[name] = value
    w_ih, cells = [], []
    for first in range(spec.first_cell, len(tensors), OF_A_CELL):
        weight, w_hh, bias_hn, *peephole, w_hr = tensors[first : first + OF_A_CELL]
        w_ih += [] if weight is None else [weight]
        cells.append(Cell(w_hh, bias_hn, Peephole(*peephole), w_hr))
    state = None if h0 is None else (h0,) if c0 is None else (h0, c0)
    call = Call(spec.mode, steps, spec.reverse, resets, Zoneout(*kept))
    return call, Inputs(x, cells, state, w_ih), kind.build(**values)
