"""The recurrence as operators of torch, for tracers: ``normrnn::recur`` and its backward pass.

They run the compiled kernels where these serve, else the loop, in any type and on any device;
with kernels for fake tensors, so that compilers and exporters see one node with symbolic sizes.
:mod:`normrnn.ops.recurrence` differentiates them.

A tracer cannot have N rows, a number that only the lengths know. It passes all T·B of a padded
batch, longest sequence first, and the operator selects the frames (:class:`Frames`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normrnn.ops.call import CELLS, COUNT, Spec, Tensors, check, check_given
from normrnn.ops.fused import can_run, run
from normrnn.ops.layout import Steps, Traced
from normrnn.ops.loop import loop
from normrnn.ops.native import kernel
from normrnn.ops.select import select
from normrnn.ops.statistics import wide

Flat = Sequence[Tensor | None]
_ARGUMENTS = "Tensor?[] tensors, Tensor? sizes, SymInt time, SymInt batch, str mode, "
_ARGUMENTS += "bool[] reverse, str kind, float eps, bool per_step, bool batch_statistics, bool cell"
_OPS = torch.library.Library("normrnn", "DEF")
_OPS.define(f"recur({_ARGUMENTS}, bool keep) -> Tensor[]")
_OPS.define(
    f"recur_backward({_ARGUMENTS}, Tensor[] saved, Tensor?[] grads, bool[] wanted) -> Tensor[]"
)
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def arguments(spec: Spec, steps: Steps, tensors: Flat) -> tuple[Any, ...]:
    """Return a call as the operators take it."""
    sizes = None
    if isinstance(steps, Traced):
        sizes = steps.batch_sizes
    elif steps.ragged:
        sizes = torch.tensor(steps.sizes, device="cpu")
    return list(tensors), sizes, steps.time, steps.batch, *spec


class Call(NamedTuple):
    """The arguments of an operator as a description of the call, checked."""

    spec: Spec
    steps: Traced
    tensors: Tensors
    rest: tuple[Any, ...]

    @staticmethod
    def of(args: Sequence[Any]) -> "Call":
        flat, sizes, time, batch, mode, reverse, *norm = args
        if len(flat) != COUNT:
            raise ValueError(f"a call has {COUNT} tensors, got {len(flat)}")
        x = flat[0]
        if x is None or x.dim() != 2:
            raise ValueError(f"the input should be rows (N, I), got {x if x is None else x.shape}")
        spec, tensors = Spec(mode, tuple(reverse), *norm[:5]), Tensors(*flat)
        steps = Traced(time, batch, x.shape[0], sizes)
        check(spec, steps, tensors)
        return Call(spec, steps, tensors, tuple(norm[5:]))


class Frames(NamedTuple):
    """The rows that are frames, of those that an operator was given."""

    steps: Steps
    places: Tensor | None = None
    """(N,); None: all rows are frames."""
    rows: int = 0
    batch: int = 0
    """Sequences, with those that have no frame."""

    @staticmethod
    def of(steps: Steps) -> "Frames":
        if not isinstance(steps, Traced):
            return Frames(steps)
        sizes, time, batch, rows = steps.batch_sizes, steps.time, steps.batch, steps.rows
        packed = Steps.packed(_check_sizes(sizes, time, batch, rows))
        if sizes is None or packed.rows == rows:
            return Frames(packed)
        sizes = sizes.cpu()
        starts = torch.arange(time).repeat_interleave(sizes) * batch
        within = torch.arange(len(starts)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        return Frames(packed, starts + within, rows, batch)

    def select(self, tensors: Tensors) -> Tensors:
        """Return the tensors of the frames alone."""
        if self.places is None:
            return tensors
        rows = ("x", "resets", "zoneout_h", "zoneout_c")
        some: Any = {name: self.select_rows(getattr(tensors, name)) for name in rows}
        some |= {name: self.select_state(getattr(tensors, name)) for name in ("h0", "c0")}
        return tensors._replace(**some)

    def select_rows(self, rows: Tensor | None) -> Tensor | None:
        if rows is None or self.places is None or len(rows) == 1:
            return rows
        return rows.index_select(0, self.places.to(rows.device))

    def select_state(self, state: Tensor | None) -> Tensor | None:
        """Return (D, B, ·) of the sequences that have frames."""
        if state is None or self.places is None:
            return state
        return state[:, : self.steps.batch].contiguous()

    def restore_rows(self, rows: Tensor) -> Tensor:
        """Put rows back among the padding, which is 0."""
        if self.places is None:
            return rows
        padded = rows.new_zeros(self.rows, rows.shape[1])
        return padded.index_copy_(0, self.places.to(rows.device), rows)

    def restore_state(self, state: Tensor, others: Tensor | None) -> Tensor:
        """(D, B′, ·) -> (D, B, ·): sequences without frames have the state of ``others``, or 0."""
        missing = self.batch - state.shape[1]
        if self.places is None or not missing:
            return state
        if others is None:
            others = state.new_zeros(state.shape[0], self.batch, state.shape[2])
        return torch.cat([state, others[:, -missing:]], 1)


def _check_sizes(sizes: Tensor | None, time: int, batch: int, rows: int) -> list[int]:
    """Check the sizes of the time steps, which may end with zeros; return those of real steps.

    ``rows`` are the frames alone, or all of a padded batch.
    """
    if min(time, batch) < 0:
        raise ValueError(f"time and batch should not be negative, got {time} and {batch}")
    if sizes is None:
        if rows != time * batch:
            raise ValueError(f"{time} steps of {batch} sequences are not {rows} rows")
        return [batch] * time if batch else []
    if sizes.shape != (time,) or sizes.dtype != torch.int64:
        raise ValueError(
            f"sizes should be torch.int64 of shape {(time,)}, got {sizes.dtype} of shape "
            f"{tuple(sizes.shape)}"
        )
    values = sizes.tolist()
    alive = values[: len(values) - values.count(0)]
    if 0 in alive:
        raise ValueError(f"sizes of time steps should be 0 at the end alone, got {values}")
    Steps.packed(alive)  # which checks the rest
    first = alive[0] if alive else 0
    is_packed = rows == sum(alive) and first == batch
    is_padded = rows == time * batch and first <= batch
    is_empty = rows == sum(alive) == 0
    if not (is_packed or is_padded or is_empty):
        raise ValueError(f"steps of sizes {values} and {batch} sequences do not fit {rows} rows")
    return alive


def gradients_by_loop(
    spec: Spec, steps: Steps, tensors: Flat, grads: Flat, wanted: Sequence[bool], again: bool
) -> list[Tensor]:
    """Compute the wanted gradients in torch's operations, to be differentiated ``again`` or not."""
    with torch.enable_grad():
        # Views, so that an input that depends on another one counts for itself alone.
        views: Any = [None if t is None else t.view_as(t) for t in tensors]
        for t, want in zip(views, wanted, strict=True):
            if want and not t.requires_grad:
                t.requires_grad_()
        call_tensors, frames = Tensors(*views), Frames.of(steps)
        starts = (call_tensors.h0, call_tensors.c0)[: spec.states]
        outputs: tuple[Tensor | None, ...]
        if frames.steps.rows:
            call = spec, frames.steps, frames.select(call_tensors)
            # Off the CPU torch's fused kernels, which have one derivative.
            is_fused = not (again or call_tensors.x.is_cpu) and can_run(*call)
            rows, state, _ = (run if is_fused else loop)(*call)
            pairs = zip(state, starts, strict=True)
            outputs = frames.restore_rows(rows), *(frames.restore_state(*pair) for pair in pairs)
        else:  # padding alone: the state stays as it was
            outputs = None, *(s if s is not None and s.requires_grad else None for s in starts)
        pairs = zip(outputs, grads, strict=False)
        heads = [(out, grad) for out, grad in pairs if out is not None and grad is not None]
        sources: Any = [t for t, want in zip(views, wanted, strict=True) if want]
        if not heads:
            return [torch.zeros_like(t) for t in sources]
        outputs_used, cotangents = zip(*heads, strict=True)
        return list(
            torch.autograd.grad(
                outputs_used, sources, cotangents, create_graph=again, materialize_grads=True
            )
        )


def has_native_backward(spec: Spec, saved: Sequence[Tensor], wanted: Sequence[bool]) -> bool:
    """Whether C computes these gradients: it ran the forward pass, and given statistics, which it
    treats as constants, need none."""
    is_kept = len(saved) == 2 + spec.batch and saved[-1].numel() > 0
    return is_kept and not any(wanted[Tensors.FIRST - 2 : Tensors.FIRST])


@torch.library.impl(_OPS, "recur", "CompositeExplicitAutograd")
def _recur(*args: Any) -> list[Tensor]:
    (spec, traced, tensors, (keep,)) = Call.of(args)
    frames = Frames.of(traced)
    steps, some = frames.steps, frames.select(tensors)
    if not steps.rows:
        return _empty_batch_outputs(spec, traced, tensors, keep)
    check_given(spec, steps, tensors)
    if kernel.can_run(spec, some):
        size = kernel.kept_floats(spec, some, traced.time, traced.rows) if keep else 0
        outputs = kernel.forward(spec, steps, some, keep, size)
    else:
        rows, state, statistics = select(spec, steps, some)(spec, steps, some)
        outputs = [rows, *state, *([] if statistics is None else [torch.stack(statistics[:2])])]
        outputs += [rows.new_empty(0)] if keep else []  # a graph has as many outputs without C
    outputs[0] = frames.restore_rows(outputs[0])
    for k in range(spec.states):
        outputs[1 + k] = frames.restore_state(outputs[1 + k], tensors[1 + k])
    missing = traced.time - steps.time
    if missing and spec.batch and spec.per_step:
        outputs[1 + spec.states] = F.pad(outputs[1 + spec.states], (0, 0, 0, missing))
    return outputs


def _empty_batch_outputs(spec: Spec, steps: Traced, tensors: Tensors, keep: bool) -> list[Tensor]:
    """Return zeros for padding alone; the state stays as it was."""
    outputs = [t.zero_() for t in _empty_outputs(spec, steps, tensors, keep)]
    for output, start in zip(outputs[1:], (tensors.h0, tensors.c0)[: spec.states], strict=False):
        if start is not None:
            output.copy_(start)
    return outputs


@torch.library.impl(_OPS, "recur_backward", "CompositeExplicitAutograd")
def _recur_backward(*args: Any) -> list[Tensor]:
    (spec, traced, tensors, (saved, grads, wanted)) = Call.of(args)
    frames = Frames.of(traced)
    steps = frames.steps
    if steps.rows:
        check_given(spec, steps, tensors)
    _check_backward(spec, traced, tensors, saved, grads, wanted)
    is_native = has_native_backward(spec, saved, wanted) and kernel.can_run(spec, tensors)
    if not is_native or not steps.rows:
        with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False):
            gradients = gradients_by_loop(spec, traced, tensors, grads, wanted, again=False)
        return [grad.clone(memory_format=torch.contiguous_format) for grad in gradients]
    saved_frames: Any = [frames.select_rows(saved[0]), *saved[1:]]
    if traced.time > steps.time and spec.batch and spec.per_step:
        saved_frames[1] = saved[1][:, : steps.time].contiguous()
    heads = [frames.select_rows(grads[0]), *map(frames.select_state, grads[1:])]
    derived = kernel.backward(spec, steps, frames.select(tensors), saved_frames, heads, wanted)
    if derived[0] is not None:
        derived[0] = frames.restore_rows(derived[0])
    for k in (1, 2):  # h0, c0
        state = derived[k]
        if state is not None:
            derived[k] = frames.restore_state(state, grads[k])
    return [t for t in derived if t is not None]


@torch.library.impl(_OPS, "recur_backward", "Batched")
def _recur_backward_batched(*args: Any) -> list[Tensor]:
    """Many cotangents at once, as for a Jacobian: torch's own operations take them."""
    spec, steps, tensors, (_, grads, wanted) = Call.of(args)
    return gradients_by_loop(spec, steps, tensors, grads, wanted, again=False)


def _check_backward(
    spec: Spec, steps: Traced, tensors: Tensors, saved: Any, grads: Flat, wanted: Sequence[bool]
) -> None:
    """Check the arguments that the backward pass takes on top of the forward pass."""
    types = _output_types(spec, steps, tensors, keep=True)
    outputs = 1 + spec.states
    _check_tensors("gradients", grads, types[:outputs], tensors.x)
    expected = [types[0], *types[outputs:]]
    if len(saved) not in (len(expected) - 1, len(expected)):
        count = len(expected)
        raise ValueError(f"expected {count - 1} or {count} saved outputs, got {len(saved)}")
    if len(saved) == len(expected) and not (saved[-1].numel() and expected[-1][0] != (0,)):
        saved = saved[:-1]  # C did not run the forward pass, or does not run here
    _check_tensors("saved outputs", saved, expected[: len(saved)], tensors.x)
    if len(wanted) != COUNT:
        raise ValueError(f"expected {COUNT} flags of wanted gradients, got {len(wanted)}")
    if any(want and t is None for t, want in zip(tensors, wanted, strict=True)):
        raise ValueError("a gradient is wanted of a tensor that was not given")
    if any(wanted[3:6]):
        raise ValueError("resets and zoneout have no gradient")


def _check_tensors(
    what: str, tensors: Sequence[Tensor | None], types: Sequence[tuple[Any, ...]], like: Tensor
) -> None:
    """Check a list of optional tensors against the same number of (shape, dtype)."""
    if len(tensors) != len(types):
        raise ValueError(f"expected {len(types)} {what}, got {len(tensors)}")
    for tensor, (shape, dtype) in zip(tensors, types, strict=True):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != like.device:
            raise ValueError(
                f"one of the {what} should be {dtype} of shape {shape} on {like.device}, got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
            )


@torch.library.register_fake("normrnn::recur", lib=_OPS)
def _(*args: Any) -> list[Tensor]:
    (spec, steps, tensors, (keep,)) = Call.of(args)
    return _empty_outputs(spec, steps, tensors, keep)


@torch.library.register_fake("normrnn::recur_backward", lib=_OPS)
def _(*args: Any) -> list[Tensor]:
    (spec, steps, tensors, (saved, grads, wanted)) = Call.of(args)
    _check_backward(spec, steps, tensors, saved, grads, wanted)
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, want in zip(tensors, wanted, strict=True)
        if t is not None and want
    ]


def _empty_outputs(spec: Spec, steps: Steps, tensors: Tensors, keep: bool) -> list[Tensor]:
    types = _output_types(spec, steps, tensors, keep)
    return [tensors.x.new_empty(shape, dtype=dtype) for shape, dtype in types]


def _output_types(
    spec: Spec, steps: Steps, tensors: Tensors, keep: bool
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and types of the outputs of ``recur``."""
    x, (C, shown), D, N = tensors.x, tensors.w_hh.shape, len(spec.reverse), tensors.x.shape[0]
    H = C // CELLS[spec.mode].gates
    sizes = (shown, H)[: spec.states]
    types: list[Any] = [((N, D * shown), x.dtype)]
    types += [((D, steps.batch, size), x.dtype) for size in sizes]
    if spec.batch:
        types.append((spec.statistics_shape(steps.time, H), wide(x.dtype)))
    if keep:
        is_native = kernel.can_run(spec, tensors)
        size = kernel.kept_floats(spec, tensors, steps.time, N) if is_native else 0
        types.append(((size,), x.dtype))
    return types
