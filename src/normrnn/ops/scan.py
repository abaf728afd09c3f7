"""The recurrence with fixed statistics as torch's ``scan``, for exporters.

The graph has torch's own operators alone, for any time and batch size: files made from it do not
need this package, and ONNX has the same operator.
"""

import sys
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from normrnn.ops.call import (
    Call,
    Cell,
    InputNorm,
    Inputs,
    Plain,
    Plug,
    RecurrentNorm,
    Result,
    RowNorm,
    State,
    StepNorm,
)
from normrnn.ops.loop import STEPS, Inside, InsideRowNorm
from normrnn.ops.normalise import Fixed
from normrnn.ops.statistics import wide
from normrnn.ops.steps import Traced


def is_onnx_export() -> bool:
    """Whether torch.onnx.export traces, by torch.export.

    The flag itself: of torch.onnx.is_in_onnx_export the compiler, by which torch's exporter makes
    its second attempt, believes that it is always false.
    """
    flags = sys.modules.get("torch.onnx._internal.exporter._flags")
    return torch.compiler.is_exporting() and getattr(flags, "_is_onnx_exporting", False)


def run_scan(call: Call, inputs: Inputs, plug: Plug) -> Result:
    """As :func:`normrnn.ops.recurrence.recur`, for all T·B rows of a dense or padded batch.

    ``plug`` has fixed statistics or needs none, ``call.steps`` is ``Traced``; its
    ``sequence_lengths`` (B,) are those of a padded batch, in any order.
    """
    if is_onnx_export():  # which fails on the derivatives of a scan
        inputs, plug = _detached(inputs, plug)
    x, cells, state, w_ih = inputs
    steps = call.steps
    assert isinstance(steps, Traced)
    T, B, D = steps.time, steps.batch, len(cells)
    valid = None
    if steps.sequence_lengths is not None:
        time = torch.arange(T, device=x.device).unsqueeze(1).repeat(1, B).view(-1)
        valid = (time < steps.sequence_lengths.to(x.device).repeat(T)).unsqueeze(1)
        x, valid = torch.where(valid, x, 0.0), valid.view(T, B, 1)  # padding may hold NaN
    gates = F.linear(x, torch.cat(list(w_ih))) if w_ih else x
    if isinstance(plug, RowNorm):
        gates, _ = InsideRowNorm.before(plug, call, gates)
    elif isinstance(plug, Plain) and plug.bias is not None:
        gates = gates + plug.bias
    if state is None:
        sizes = cells[0].sizes[: 2 if call.mode == "LSTM" else 1]
        state = tuple(gates.new_zeros(D, B, size) for size in sizes)
    outputs, finals = [], []
    for d, own in enumerate(gates.view(T, B, -1).chunk(D, 2)):
        start = tuple(part[d].clone() for part in state)  # scan refuses tensors that share memory
        output, final = _direction(call, plug, d, own, cells[d], start, valid)
        outputs.append(output.view(T * B, -1))
        finals.append(final)
    last = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    return Result(torch.cat(outputs, 1), last, None)


def _detached(inputs: Inputs, plug: Plug) -> tuple[Inputs, Plug]:
    def detach(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    own = {field.name: tree_map(detach, getattr(plug, field.name)) for field in fields(plug)}
    return tree_map(detach, inputs), type(plug)(**own)


class _Affine(NamedTuple):
    """scale · x + shift, each (1, C), or (T, C) where statistics differ over time."""

    scale: Tensor
    shift: Tensor

    @property
    def by_step(self) -> bool:
        return not (isinstance(self.scale.shape[0], int) and self.scale.shape[0] == 1)

    def __call__(self, rows: Tensor) -> Tensor:
        return (rows.to(self.scale.dtype) * self.scale + self.shift).to(rows.dtype)


class _Maps(NamedTuple):
    """What fixed statistics do to the gate inputs, W_h h, their sum, and the LSTM's c."""

    gates: _Affine | None = None
    recurrent: _Affine | None = None
    sums: _Affine | None = None
    cell: _Affine | None = None


def _maps(plug: Plug, d: int, D: int, C: int, H: int) -> _Maps:
    """Those of direction d of D."""

    def own(value: Tensor | None, first: int, width: int) -> Tensor | None:
        if value is None:
            return None
        start = d * (value.shape[-1] // D) + first
        return value[..., start : start + width]

    def affine(gamma: Tensor | None, beta: Tensor | None, first: int, width: int) -> _Affine:
        assert not isinstance(plug, Plain | RowNorm)
        fixed: Fixed | None = plug.fixed
        assert fixed is not None
        mean, var = (own(value, first, width).to(wide(value.dtype)) for value in fixed)  # type: ignore
        gamma, beta = own(gamma, 0, width), own(beta, 0, width)
        scale = (var + plug.eps).rsqrt()
        scale = scale if gamma is None else scale * gamma
        shift = -mean * scale
        return _Affine(scale, shift if beta is None else shift + beta)

    if isinstance(plug, InputNorm):
        return _Maps(gates=affine(plug.weight, plug.bias, 0, C))
    if isinstance(plug, StepNorm):
        return _Maps(sums=affine(plug.weight, plug.bias, 0, C))
    if isinstance(plug, RecurrentNorm):
        return _Maps(
            gates=affine(plug.weight, plug.bias, 0, C),
            recurrent=affine(plug.gamma_hh, None, C, C),
            cell=affine(plug.weight_c, plug.bias_c, 2 * C, H) if plug.cell else None,
        )
    return _Maps()


class _InsideAffine(Inside):
    """One step of ``_Maps``."""

    def __init__(self, maps: _Maps):
        self.maps = maps

    def recurrent(self, t: int, wh: Tensor) -> Tensor:  # noqa: ARG002
        return wh if self.maps.recurrent is None else self.maps.recurrent(wh)

    def sums(self, t: int, sums: Tensor, first: int = 0) -> Tensor:  # noqa: ARG002
        if self.maps.sums is None:
            return sums
        own = slice(first, first + sums.shape[1])
        return _Affine(*(value[..., own] for value in self.maps.sums))(sums)

    def cell(self, t: int, c: Tensor) -> Tensor:  # noqa: ARG002
        return c if self.maps.cell is None else self.maps.cell(c)


def _direction(
    call: Call, plug: Plug, d: int, gates: Tensor, cell: Cell, start: State, valid: Tensor | None
) -> tuple[Tensor, State]:
    """Gate inputs (T, B, C) and a state of (B, H) each -> states h (T, B, H), the final state."""
    from torch._higher_order_ops.scan import scan  # imports the compiler: seconds

    T, B, C = gates.shape
    H, reverse, D = cell.sizes[1], call.reverse[d], len(call.reverse)
    maps = _maps(plug, d, D, C, H)
    if maps.gates is not None:
        scale, shift = (value.unsqueeze(1) for value in maps.gates)
        gates = _Affine(scale, shift)(gates)
    xs: dict[str, Tensor] = {"gates": gates}
    if valid is not None:
        xs["valid"] = valid
    if call.resets is not None:
        xs["resets"] = _resets(call.resets.view(T, B, 1), valid, reverse)
    fixed = {}
    for name, value in maps._asdict().items():
        if value is not None and name != "gates":
            for k, part in enumerate(value):
                (xs if value.by_step else fixed)[f"{name}.{k}"] = (
                    part if value.by_step else part.squeeze(0)
                )
    kept = call.zoneout.of(slice(d * H, (d + 1) * H))
    step = STEPS[call.mode]
    rows = InsideRowNorm(plug, call, d) if isinstance(plug, RowNorm) else None

    def combine(state: Any, x: Any) -> Any:  # the compiler cannot trace other annotations
        values = {**fixed, **x}
        before = state
        if "resets" in x:
            before = tuple(torch.where(x["resets"], 0.0, s) for s in state)
        inside = rows
        if inside is None:
            names = ("recurrent", "sums", "cell")
            own = {
                name: _Affine(values[f"{name}.0"], values[f"{name}.1"])
                for name in names
                if f"{name}.0" in values
            }
            inside = _InsideAffine(_Maps(**own))
        after = step(0, x["gates"], before, cell, inside)
        pairs = zip(before, after, kept, strict=False)
        after = tuple(
            new if share is None else torch.lerp(new, old, share.to(new.dtype))
            for old, new, share in pairs
        )
        output = after[0]
        if "valid" in x:
            output = torch.where(x["valid"], output, 0.0)
            pairs = zip(after, state, strict=True)
            after = tuple(torch.where(x["valid"], new, old) for new, old in pairs)
        # B appears in the body: Inductor takes the sizes of what it allocates from there.
        return after, output.clone().view(B, -1)

    final, output = scan(combine, start, xs, dim=0, reverse=reverse)
    return output, tuple(final)


def _resets(resets: Tensor, valid: Tensor | None, reverse: bool) -> Tensor:
    """Before which frames (T, B, 1) a direction starts again; backwards, after which."""
    if not reverse:
        return resets
    resets = resets if valid is None else resets & valid
    later = torch.arange(1, resets.shape[0] + 1, device=resets.device)
    last = resets.shape[0] - 1
    return resets[later.clamp(max=last)] & (later <= last).view(-1, 1, 1)
