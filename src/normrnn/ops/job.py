"""What the compiled kernels are told, `Job` of `kernels/job.h`, and the memory that they need.

All of it depends on shapes and options alone, so it is worked out once and kept: a call then
allocates its blocks, takes addresses and fills in the struct.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from normrnn.ops.call import GATES, InputNorm, Plain, RecurrentNorm, RowNorm, StepNorm
from normrnn.ops.flat import (
    C0,
    FIRST,
    H0,
    KEPT_C,
    KEPT_H,
    OF_A_CELL,
    RESETS,
    Flat,
    Spec,
    X,
)
from normrnn.ops.library import floats, library
from normrnn.ops.steps import Steps

JOB = (
    *("T", "B", "N", "H", "I", "D", "threads", "mode", "outer", "inner", "split"),
    *("ldi", "ldx", "ldo", "ldc", "per_step", "batch", "fixed_per_step", "keep"),
    *("eps", "sizes", "offsets", "resets", "x", "dx_in"),
)
"""`Job` without its directions: numbers, ε, addresses."""
DIRECTION = (
    *("reverse", "w_ih", "w_hh", "gamma", "beta", "gamma_hh", "gamma_c", "beta_c", "bias_hn"),
    *("peephole_i", "peephole_f", "peephole_o", "zone_h", "zone_c", "share_h", "share_c"),
    *("h0", "c0", "fixed_mean", "fixed_var"),
    *("stat_mean", "stat_var", "out", "hn", "cn", "pre", "mean", "scale", "shift", "gamma_h"),
    *("row_mean", "row_scale", "used_mean", "used_inv", "trace", "hat", "inv"),
    *("dout", "dhn", "dcn", "dx", "dp", "d_w_ih", "d_w_hh", "d_gamma", "d_beta", "d_gamma_hh"),
    *("d_units", "dh0", "dc0", "level", "slope"),
)
_ADDRESSES = JOB[JOB.index("eps") + 1 :]
LAYOUT = struct.Struct(f"{JOB.index('eps')}qd{len(_ADDRESSES)}q{2 * len(DIRECTION)}q")

KINDS = {
    Plain.__name__: (0, 0),
    InputNorm.__name__: (1, 0),
    StepNorm.__name__: (0, 1),
    RowNorm.__name__: (2, 2),
    RecurrentNorm.__name__: (1, 3),
    "shared": (3, 0),
}
"""What is normalised before the loop and inside a step, as `kernels/job.h` counts them; "shared"
is a StepNorm by given statistics that are the same at every step, without a way back."""
_COLUMNS, _FEATURES = 1, 2
_OVER_ROWS, _OVER_FEATURES, _PRODUCTS = 1, 2, 3
_SPLIT_UNITS, _SPLIT_ROWS = 0, 1
UNIT_SUMS = 6
BIAS_HN, WEIGHT_C, BIAS_C = 3, 4, 5
"""Rows of the sums that belong to units; peepholes are the first three."""


class Form(NamedTuple):
    """What is computed, whatever the batch."""

    mode: str
    reverse: tuple[bool, ...]
    plug: str
    H: int
    I: int  # noqa: E741
    eps: float
    batch: bool
    per_step: bool
    """Statistics of every step before the loop."""
    fixed_per_step: bool
    cell: bool
    masks: bool
    """Zoneout by masks, not by shares."""
    vector: int
    """Floats of a vector of the CPU."""
    width: int
    """Floats of a packed row of gates."""
    vectors: int
    """Of units."""
    channels: int
    """Of a direction's statistics."""

    @property
    def D(self) -> int:  # noqa: N802
        return len(self.reverse)

    @property
    def C(self) -> int:  # noqa: N802
        return GATES[self.mode] * self.H

    @property
    def ldx(self) -> int:
        """Floats between packed rows; as `apart` of `kernels/vector.h`, an odd number of lines."""
        return (-(-self.D * self.width // 16) | 1) * 16

    @property
    def by_step(self) -> bool:
        """Whether statistics are those of every step."""
        return self.per_step or KINDS[self.plug][1] == _OVER_ROWS

    @property
    def used(self) -> int:
        """Floats of what a step is normalised by, inside it."""
        cells = self.vectors * self.vector if KINDS[self.plug][1] == _PRODUCTS else 0
        return self.width + cells

    @property
    def kept_trace(self) -> int:
        """Vectors kept of a row and vector of units."""
        return {"LSTM": 7 if self.cell else 6, "GRU": 5}.get(self.mode, 1)

    def blocks(self, T: int, N: int, keep: bool) -> dict[str, int]:
        """Memory of the way there, in floats; sizes may be symbols."""
        outer, inner = KINDS[self.plug]
        D, K, units = self.D, T if self.per_step else 1, self.D * N * self.vectors * self.vector
        found = {"read": D * (2 * K + 2) * self.width}
        if outer == _FEATURES:
            found["rows"] = D * 2 * N
        if inner in (_OVER_ROWS, _PRODUCTS):
            found["used"] = D * 2 * T * self.used
        if keep or self.cell:
            found["trace"] = units * self.kept_trace
        if inner:
            found["hat"] = units * GATES[self.mode]
        if inner == _OVER_FEATURES:
            found["inv"] = D * 2 * N
        found["pre"] = N * self.ldx + self.vector
        return found

    def kept(self, T: int, N: int) -> int:
        """Floats of the block that the way back wants; without a norm before the loop it does
        not want the gate inputs, which come last."""
        blocks = self.blocks(T, N, True)
        if KINDS[self.plug][0] == 0:
            del blocks["pre"]
        return sum(_lines(size) for size in blocks.values())

    def statistics(self, T: int) -> tuple[int, int]:
        """The shape of a mean, or of a variance."""
        return (T if self.by_step else 1), self.D * self.channels


@lru_cache(maxsize=256)
def _form(
    spec: Spec,
    H: int,
    I: int,  # noqa: E741
    slots: bool,
    masks: bool,
    keep: bool,
) -> Form:
    loaded = library(H)
    assert loaded is not None
    options = spec.options
    batch, per_step = options.get("batch", False), options.get("per_step", False)
    shared = spec.plug == StepNorm.__name__ and not (batch or slots or keep)
    plug = "shared" if shared else spec.plug
    outer, inner = KINDS[plug]
    if inner == _PRODUCTS:
        per_step = True
    elif outer == _COLUMNS and not batch:  # shared over time they need no groups
        per_step = slots
    mode = ("RNN_TANH", "RNN_RELU", "LSTM", "GRU").index(spec.mode)
    widths = loaded.widths(mode, H)
    cell, eps = options.get("cell", False), options.get("eps", 0.0)
    how = eps, batch, per_step, slots, cell, masks
    sizes = loaded.vector, *widths, spec.channels(H)
    return Form(spec.mode, spec.reverse, plug, H, I, *how, *sizes)


def form_of(spec: Spec, tensors: Flat, keep: bool = True) -> Form:
    w_ih, w_hh = tensors[spec.first_cell : spec.first_cell + 2]
    place = spec.place("fixed")
    fixed = None if place is None else tensors[place]
    assert w_hh is not None
    slots = fixed is not None and bool(fixed.shape[0] > 1)
    H, features = w_hh.shape[1], 0 if w_ih is None else w_ih.shape[1]
    masks = any([t is not None and t.dtype == torch.bool for t in tensors[KEPT_H:FIRST]])  # noqa: C419
    # A layer's own sizes are never symbols.
    return _form(spec, int(H), int(features), slots, masks, keep)


class Plan(NamedTuple):
    """A struct to be filled in: every address is that of a source, plus bytes."""

    head: tuple[float, ...]
    recipe: tuple[tuple[int, int], ...]
    scratch: int
    """Floats of memory that nobody wants afterwards."""
    alive: tuple[Tensor, ...]
    """Whose addresses are among them."""

    def filled(self, addresses: list[int]) -> bytes:
        """``addresses`` of the sources; the first is 0, for what is not there."""
        return LAYOUT.pack(*self.head, *[addresses[k] + more for k, more in self.recipe])


GIVEN = "out", "hn", "cn", "statistics", "kept", "scratch"
"""Sources after the flat tensors; the way back has more."""
GRADS = "dout", "dhn", "dcn", "work"
"""And then those of the gradients, in the flat order."""
Present = tuple[bool, ...]


@lru_cache(maxsize=256)
def forward_plan(
    spec: Spec, form: Form, steps: Steps, present: Present, keep: bool, threads: int
) -> Plan:
    places = _Places(spec, form, steps, present, keep)
    directions = [places.forward(d) for d in range(form.D)]
    return places.plan(directions, threads, 0)


@lru_cache(maxsize=256)
def backward_plan(
    spec: Spec,
    form: Form,
    steps: Steps,
    present: Present,
    grads: Present,
    wanted: Present,
    threads: int,
) -> Plan:
    """``grads``: which of the outputs' gradients there are; ``wanted``: those of flat tensors."""
    places = _Places(spec, form, steps, present, True)
    directions = [places.forward(d) | places.backward(d, grads, wanted) for d in range(form.D)]
    last = sum(_lines(size) for size in places.work().values())
    return places.plan(directions, threads, last, wanted[X])


Source = tuple[int, int]


class _Places:
    """Where the fields of a job point to: a source, and bytes from its beginning."""

    def __init__(self, spec: Spec, form: Form, steps: Steps, present: Present, keep: bool):
        self.spec, self.form, self.steps, self.present, self.keep = (
            spec,
            form,
            steps,
            present,
            keep,
        )
        self.sizes, self.offsets = (
            torch.tensor(values, device="cpu") for values in (steps.sizes, steps.offsets)
        )
        unit = form.cell and not present[spec.place("weight_c") or 0]
        self.unit = floats(form.D * form.H).fill_(1) if unit else None

    def plan(
        self, directions: list[dict[str, Source]], threads: int, work: int, wants_x: bool = False
    ) -> Plan:
        form, steps = self.form, self.steps
        blocks = form.blocks(steps.time, steps.rows, self.keep)
        outer, inner = KINDS[form.plug]
        numbers: dict[str, float] = {
            "T": steps.time,
            "B": steps.batch,
            "N": steps.rows,
            "H": form.H,
            "I": form.I,
            "D": form.D,
            "threads": threads,
            "mode": ("RNN_TANH", "RNN_RELU", "LSTM", "GRU").index(form.mode),
            "outer": outer,
            "inner": inner,
            "split": _split(threads, form.D, steps.batch, form.H, inner),
            "ldi": form.I or form.D * form.C,
            "ldx": form.ldx,
            "ldo": form.D * form.H,
            "ldc": form.D * form.channels,
            "per_step": form.per_step,
            "batch": form.batch,
            "fixed_per_step": form.fixed_per_step,
            "keep": self.keep,
            "eps": form.eps,
        }
        first: dict[str, Source] = {
            "sizes": (0, self.sizes.data_ptr()),
            "offsets": (0, self.offsets.data_ptr()),
            "resets": self.flat(RESETS),
            "x": self.flat(X),
            "dx_in": (self.grad(X), 0) if wants_x else (0, 0),
        }
        recipe = [first[name] for name in _ADDRESSES]
        for fields in (directions[0], directions[-1]):
            recipe += [fields.get(name, (0, 0)) for name in DIRECTION]
        alive = (self.sizes, self.offsets, *([] if self.unit is None else [self.unit]))
        scratch = work or sum(map(_lines, blocks.values()))
        if self.keep and not work:
            scratch -= form.kept(steps.time, steps.rows)
        return Plan(
            tuple(numbers[name] for name in JOB[: len(numbers)]), tuple(recipe), scratch, alive
        )

    def flat(self, place: int | None, more: int = 0, size: int = 4) -> Source:
        """A flat tensor, from its entry ``more`` on, each of ``size`` bytes; nowhere if it is not
        there."""
        if place is None or not self.present[place]:
            return 0, 0
        return 1 + place, size * more

    def given(self, name: str, more: int) -> Source:
        return 1 + len(self.present) + GIVEN.index(name), 4 * more

    def grad(self, place: int) -> int:
        """The source of a flat tensor's gradient."""
        return 1 + len(self.present) + len(GIVEN) + len(GRADS) + place

    def block(self, name: str, more: int) -> Source:
        """In the block that is kept, or, where nothing is, in the scratch memory."""
        form, at, scratch = self.form, 0, not self.keep
        blocks = form.blocks(self.steps.time, self.steps.rows, self.keep)
        for other, size in blocks.items():
            if other == name:
                break
            at += _lines(size)
        if name == "pre" and self.keep and KINDS[form.plug][0] == 0:
            at, scratch = 0, True
        return self.given("scratch" if scratch else "kept", at + more)

    def forward(self, d: int) -> dict[str, Source]:
        form, spec = self.form, self.spec
        T, B, N, H, C, D = (
            self.steps.time,
            self.steps.batch,
            self.steps.rows,
            form.H,
            form.C,
            form.D,
        )
        outer, inner = KINDS[form.plug]
        K, width = T if form.per_step else 1, form.width
        read = d * (2 * K + 2)
        units = N * form.vectors * form.vector
        first = spec.first_cell + d * OF_A_CELL
        names = "w_ih", "w_hh", "bias_hn", "peephole_i", "peephole_f", "peephole_o"
        found = {name: self.flat(first + k) for k, name in enumerate(names)}
        vectors = {"gamma": "weight", "beta": "bias", "gamma_hh": "gamma_hh"}
        for field, name in vectors.items():
            found[field] = self.flat(spec.place(name), d * C)
        for field, name in {"fixed_mean": "fixed", "fixed_var": "fixed.1"}.items():
            found[field] = self.flat(spec.place(name), d * form.channels)
        if form.cell:  # having γ is what normalises the cell
            found["gamma_c"] = self.flat(spec.place("weight_c"), d * H)
            found["beta_c"] = self.flat(spec.place("bias_c"), d * H)
            if self.unit is not None:
                found["gamma_c"] = 0, self.unit.data_ptr() + 4 * d * H
        for place, name in ((KEPT_H, "h"), (KEPT_C, "c")):
            field = "zone" if form.masks else "share"
            found[f"{field}_{name}"] = self.flat(place, d * H, 1 if form.masks else 4)
        if form.batch:
            groups = form.statistics(T)[0]
            found["stat_mean"] = self.given("statistics", d * form.channels)
            found["stat_var"] = self.given("statistics", (groups * D + d) * form.channels)
        if form.mode == "LSTM":
            found["cn"] = self.given("cn", d * B * H)
        found |= {
            "reverse": (0, int(form.reverse[d])),
            "h0": self.flat(H0, d * B * H),
            "c0": self.flat(C0, d * B * H),
            "out": self.given("out", d * H),
            "hn": self.given("hn", d * B * H),
            "pre": self.block("pre", d * width),
            "mean": self.block("read", read * width),
            "scale": self.block("read", (read + K) * width),
            "shift": self.block("read", (read + 2 * K) * width),
            "gamma_h": self.block("read", (read + 2 * K + 1) * width),
        }
        if outer == _FEATURES:
            found["row_mean"] = self.block("rows", 2 * d * N)
            found["row_scale"] = self.block("rows", (2 * d + 1) * N)
        if inner in (_OVER_ROWS, _PRODUCTS):
            found["used_mean"] = self.block("used", 2 * d * T * form.used)
            found["used_inv"] = self.block("used", (2 * d + 1) * T * form.used)
        if self.keep or form.cell:
            found["trace"] = self.block("trace", d * units * form.kept_trace)
        if inner:
            found["hat"] = self.block("hat", d * units * GATES[form.mode])
        if inner == _OVER_FEATURES:
            found["inv"] = self.block("inv", 2 * d * N)
        return found

    def work(self) -> dict[str, int]:
        """Memory of the way back, in floats."""
        form = self.form
        packed = self.steps.rows * form.ldx + form.vector
        apart = KINDS[form.plug][1] in (_OVER_FEATURES, _PRODUCTS) or form.mode == "GRU"
        return {
            "units": UNIT_SUMS * form.D * form.H,
            "sums": 2 * form.D * form.width,
            "vectors": 3 * form.D * form.C,
            "dx": packed,
            **({"dp": packed} if apart else {}),
        }

    def backward(self, d: int, grads: Present, wanted: Present) -> dict[str, Source]:
        form, spec, B = self.form, self.spec, self.steps.batch
        H, C, D, width = form.H, form.C, form.D, form.width
        first = spec.first_cell + d * OF_A_CELL
        start = 1 + len(self.present) + len(GIVEN)
        at, work = 0, {}
        for name, size in self.work().items():
            work[name] = at
            at += _lines(size)

        def worked(name: str, more: int) -> Source:
            return start + GRADS.index("work"), 4 * (work[name] + more)

        def wished(place: int | None, more: int) -> Source:
            if place is None or not wanted[place]:
                return 0, 0
            return self.grad(place), 4 * more

        found = {
            "dx": worked("dx", d * width),
            "dp": worked("dp" if "dp" in work else "dx", d * width),
            "d_w_ih": wished(first, 0),
            "d_w_hh": wished(first + 1, 0),
            "dh0": wished(H0, d * B * H),
            "dc0": wished(C0, d * B * H),
            "d_units": worked("units", d * H),
            "level": worked("sums", d * width),
            "slope": worked("sums", (D + d) * width),
        }
        for k, (name, more) in enumerate(
            {"dout": d * H, "dhn": d * B * H, "dcn": d * B * H}.items()
        ):
            found[name] = (start + k, 4 * more) if grads[k] else (0, 0)
        for k, name in enumerate(("weight", "bias", "gamma_hh")):
            field = ("d_gamma", "d_beta", "d_gamma_hh")[k]
            place = wished(spec.place(name), d * C)
            found[field] = place if place[0] else worked("vectors", (k * D + d) * C)
        return found


def _split(threads: int, D: int, B: int, H: int, inner: int) -> int:
    """How the threads of a direction share its work. Rows need no waiting for each other, but
    every thread then reads all weights; over the features of a row nothing else will do."""
    if inner:
        return _SPLIT_ROWS if inner == _OVER_FEATURES else _SPLIT_UNITS
    team = -(-threads // D)
    return _SPLIT_ROWS if team > 1 and team <= B and H <= 200 else _SPLIT_UNITS


def _lines(floats: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-floats // 16) * 16
