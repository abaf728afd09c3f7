"""The recurrence with fixed statistics as torch's ``scan``, for exporters.

The graph has torch's own operators alone, for any time and batch size: files made from it do not
need this package, and ONNX has the same operator.
"""

import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops.call import Result, Spec, State, Tensors, project
from normrnn.ops.layout import Traced
from normrnn.ops.loop import (
    STEPS,
    RowNorm,
    StepNorm,
    initial_state,
    reset_state,
    transposed,
    zoneout_of,
)
from normrnn.ops.statistics import wide


def is_onnx_export() -> bool:
    """Whether torch.onnx.export traces by torch.export.

    Reads the flag itself: the compiler, used by the exporter's second attempt, treats
    ``torch.onnx.is_in_onnx_export()`` as false.
    """
    flags = sys.modules.get("torch.onnx._internal.exporter._flags")
    return torch.compiler.is_exporting() and getattr(flags, "_is_onnx_exporting", False)


def run_scan(spec: Spec, steps: Traced, tensors: Tensors) -> Result:
    """Run the recurrence on all T·B rows of a dense or padded batch.

    The normalisation has given statistics or needs none. Lengths of a padded batch are in any
    order.
    """
    if is_onnx_export():  # which fails on the derivatives of a scan
        tensors = Tensors(*(None if t is None else t.detach() for t in tensors))  # type: ignore
    x, T, B, D = tensors.x, steps.time, steps.batch, len(spec.reverse)
    valid = None
    if steps.sequence_lengths is not None:
        time = torch.arange(T, device=x.device).unsqueeze(1).repeat(1, B).view(-1)
        valid = (time < steps.sequence_lengths.to(x.device).repeat(T)).unsqueeze(1)
        x, valid = torch.where(valid, x, 0.0), valid.view(T, B, 1)  # padding may hold NaN
    gates = project(tensors._replace(x=x)).x
    if spec.kind in ("none", "row", "rms"):
        gates, _ = StepNorm.KINDS[spec.kind].before(spec, steps, tensors, gates)
    state = initial_state(spec, tensors, B, gates)
    outputs, finals = [], []
    for d, part in enumerate(gates.view(T, B, -1).chunk(D, 2)):
        start = tuple(part[d].clone() for part in state)  # scan refuses tensors that share memory
        output, final = _direction(spec, steps, tensors, d, part, start, valid)
        outputs.append(output.view(T * B, -1))
        finals.append(final)
    last = tuple(torch.stack(parts) for parts in zip(*finals, strict=True))
    return Result(torch.cat(outputs, 1), last, None)


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
    """Given statistics as maps of the gate inputs, of W_h h, of their sum, and of the LSTM's c."""

    gates: _Affine | None = None
    recurrent: _Affine | None = None
    sums: _Affine | None = None
    cell: _Affine | None = None


def _maps(norm: StepNorm, C: int, H: int) -> _Maps:
    tensors = norm.tensors

    def affine(gamma: Tensor | None, beta: Tensor | None, first: int, width: int) -> _Affine:
        assert tensors.mean is not None
        dtype = wide(tensors.mean.dtype)
        mean, var = (norm.entries(v, first, width).to(dtype) for v in (tensors.mean, tensors.var))
        gamma, beta = norm.entries(gamma, 0, width), norm.entries(beta, 0, width)
        scale = (var + norm.spec.eps).rsqrt()
        scale = scale if gamma is None else scale * gamma
        shift = -mean * scale
        return _Affine(scale, shift if beta is None else shift + beta)

    kind = norm.spec.kind
    if kind == "input":
        return _Maps(gates=affine(tensors.weight, tensors.bias, 0, C))
    if kind == "step":
        return _Maps(sums=affine(tensors.weight, tensors.bias, 0, C))
    if kind == "recurrent":
        has_cell = norm.spec.cell
        return _Maps(
            gates=affine(tensors.weight, tensors.bias, 0, C),
            recurrent=affine(tensors.gamma_hh, None, C, C),
            cell=affine(tensors.weight_c, tensors.bias_c, 2 * C, H) if has_cell else None,
        )
    return _Maps()


class _AffineNorm(StepNorm):
    """One step of ``_Maps``."""

    def __init__(self, maps: _Maps):
        self.maps, self.changes_product = maps, maps.recurrent is not None

    def recurrent(self, t: int, wh: Tensor) -> Tensor:  # noqa: ARG002
        return wh if self.maps.recurrent is None else self.maps.recurrent(wh)

    def sums(self, t: int, sums: Tensor, first: int = 0) -> Tensor:  # noqa: ARG002
        if self.maps.sums is None:
            return sums
        columns = slice(first, first + sums.shape[1])
        return _Affine(*(value[..., columns] for value in self.maps.sums))(sums)

    def cell(self, t: int, c: Tensor) -> Tensor:  # noqa: ARG002
        return c if self.maps.cell is None else self.maps.cell(c)


def _direction(
    spec: Spec,
    steps: Traced,
    tensors: Tensors,
    d: int,
    gates: Tensor,
    start: State,
    valid: Tensor | None,
) -> tuple[Tensor, State]:
    """Gate inputs (T, B, C) and a state of (B, H) each -> states h (T, B, H), the final state."""
    from torch._higher_order_ops.scan import scan  # imports the compiler: seconds

    T, B, C = gates.shape
    weights, reverse, D = tensors.weights(d), spec.reverse[d], len(spec.reverse)
    maps = _maps(StepNorm(spec, steps, tensors, d), C, weights.state_sizes[1])
    if maps.gates is not None:
        scale, shift = (value.unsqueeze(1) for value in maps.gates)
        gates = _Affine(scale, shift)(gates)
    xs: dict[str, Tensor] = {"gates": gates}
    if valid is not None:
        xs["valid"] = valid
    if tensors.resets is not None:
        xs["resets"] = _resets(tensors.resets.view(T, B, 1), valid, reverse)
    fixed = {}
    for name, value in maps._asdict().items():
        if value is not None and name != "gates":
            for k, part in enumerate(value):
                (xs if value.by_step else fixed)[f"{name}.{k}"] = (
                    part if value.by_step else part.squeeze(0)
                )
    kept, step = zoneout_of(tensors, d, D), STEPS[spec.mode]
    reset_to = [s.clone() for s in reset_state(tensors, d) or ()] or [0.0] * spec.states
    row_norm = RowNorm(spec, steps, tensors, d) if spec.kind in ("row", "rms") else None

    def combine(state: Any, x: Any) -> Any:  # the compiler cannot trace other annotations
        values = {**fixed, **x}
        before = state
        if "resets" in x:
            pairs = zip(reset_to, state, strict=True)
            before = tuple(torch.where(x["resets"], new, old) for new, old in pairs)
        norm = row_norm
        if norm is None:
            names = ("recurrent", "sums", "cell")
            step_maps = {
                name: _Affine(values[f"{name}.0"], values[f"{name}.1"])
                for name in names
                if f"{name}.0" in values
            }
            norm = _AffineNorm(_Maps(**step_maps))
        after = step(0, x["gates"], before, transposed(weights), norm)
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

    if not torch.compiler.is_dynamo_compiling():
        _forget_compiled(scan)
    final, output = scan(combine, start, xs, dim=0, reverse=reverse)
    return output, tuple(final)


def _forget_compiled(scan: Any) -> None:
    """Drop the graphs of earlier scans: checking their guards would fix the sizes of this one."""
    for code in filter(inspect.iscode, scan.__code__.co_consts):
        torch._dynamo.reset_code(code)  # type: ignore[attr-defined]


def _resets(resets: Tensor, valid: Tensor | None, reverse: bool) -> Tensor:
    """Return the frames (T, B, 1) at which a direction restarts from zero."""
    if not reverse:
        return resets
    resets = resets if valid is None else resets & valid
    later = torch.arange(1, resets.shape[0] + 1, device=resets.device)
    last = resets.shape[0] - 1
    return resets[later.clamp(max=last)] & (later <= last).view(-1, 1, 1)
