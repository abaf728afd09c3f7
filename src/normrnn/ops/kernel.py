"""The compiled recurrence: a layer's directions, projection and normalisation included, in C.

It serves float32 on a CPU and is compiled when it is first wanted (:mod:`normrnn.ops.native`).
Everything else, and being differentiated twice, is for :mod:`normrnn.ops.loop`, which computes
the same. ``NORMRNN_NATIVE=0`` switches it off.

Whoever traces (a compiler, an exporter, fake tensors, a transform of torch.func) sees the
operators of :mod:`normrnn.ops.operators` instead, of any type and on any device.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from normrnn.ops import operators
from normrnn.ops.call import Call, InputNorm, Inputs, Plug, Result
from normrnn.ops.check import check_given
from normrnn.ops.flat import Flat, Spec, flattened
from normrnn.ops.native.library import describe, library
from normrnn.ops.operators import (
    Made,
    derived_by_loop,
    is_compiled,
    is_compiled_backward,
    operands,
    rows_of,
    spec_of,
)
from normrnn.ops.statistics import Statistics, synchronised
from normrnn.ops.steps import Steps, Traced

__all__ = ["describe", "prefers", "run", "serves", "update"]

_TENSORS = {Tensor, torch.nn.Parameter}


def serves(call: Call, inputs: Inputs, plug: Plug) -> bool:
    """Whether the kernel, or its operator, takes this call."""
    return _serves(call, plug, *flattened(call, inputs, plug))


def _serves(call: Call, plug: Plug, spec: Spec, tensors: Flat) -> bool:
    if forward_ad._current_level >= 0 or torch.jit.is_tracing():
        return False  # which see torch's operations alone
    if isinstance(plug, InputNorm) and plug.batch and synchronised(plug.sync):
        return False  # the ranks meet between the statistics and the loop
    if isinstance(call.steps, Traced):
        return True
    if not call.steps.rows or not is_compiled(spec, tensors):
        return False
    return all([t is None or _is_common(t) for t in tensors])  # noqa: C419 (a list is faster)


def prefers(time: int, hidden: int) -> bool:
    """Whether it is the faster way to train on a dense batch without a norm.

    A rule, not a measurement, so that the same program always computes the same bits. torch's is
    as fast for tiny calls.
    """
    worth = time * hidden >= 500
    return worth and library() is not None and not torch.jit.is_tracing()


def _is_common(tensor: Tensor) -> bool:
    """Whether C, or the operator, can take it: a plain or a fake tensor, no other subclass."""
    return type(tensor) in _TENSORS or isinstance(tensor, torch._subclasses.FakeTensor)


def is_plain(tensors: Flat) -> bool:
    """Whether addresses can be handed to C: nobody traces or transforms, and memory is real."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        return False
    for t in tensors:
        if t is not None and not (type(t) in _TENSORS and torch._C._has_storage(t)):
            return False
    return True


def run(call: Call, inputs: Inputs, plug: Plug) -> Result:
    """As :func:`normrnn.ops.recurrence.recur`; ask ``serves`` first."""
    return _run(call.steps, *flattened(call, inputs, plug))


def attempt(call: Call, inputs: Inputs, plug: Plug) -> Result | None:
    """The same; None if it does not serve."""
    spec, tensors = flattened(call, inputs, plug)
    return _run(call.steps, spec, tensors) if _serves(call, plug, spec, tensors) else None


def _run(steps: Steps, spec: Spec, tensors: list[Tensor | None]) -> Result:
    keep = torch.is_grad_enabled() and (
        torch._C._are_functorch_transforms_active()
        or any(t is not None and t.requires_grad for t in tensors)
    )
    _use_given(steps, spec, tensors, keep)
    if torch.compiler.is_compiling():
        made = torch.ops.normrnn.recur(*operands(spec, steps, tensors), keep)
    elif torch._C._are_functorch_transforms_active():
        made = _Recurrence.apply(spec, steps, *tensors)
    elif not keep:
        made = _forward(spec, steps, keep, tensors)
    else:
        made = _apply(spec, steps, *tensors)
    rows, state, statistics, _ = Made.of(spec, made)  # type: ignore[arg-type]
    if statistics is None:
        return Result(rows, state, None)
    mean, var = statistics.unbind()
    return Result(rows, state, Statistics(mean, var, _counts(steps, spec.by_step, rows.device)))


def _use_given(steps: Steps, spec: Spec, tensors: list[Tensor | None], keep: bool) -> None:
    """Given statistics only where they are needed; a copy if there may be a way back, since
    running ones change before it."""
    place = spec.place("fixed")
    if place is None:
        return
    needed = not spec.measures or steps.may_be_lone(spec.by_step)
    if not needed and not spec.judges_steps:
        tensors[place] = tensors[place + 1] = None
        return
    if not isinstance(steps, Traced):
        check_given(steps, spec, tensors)
    for k in (place, place + 1):
        value = tensors[k]
        if value is not None and keep:
            tensors[k] = value.clone()


def _forward(spec: Spec, steps: Steps, keep: bool, tensors: Flat) -> Sequence[Tensor]:
    if not isinstance(steps, Traced) and is_plain(tensors):
        return operators.forward(spec, steps, tensors, keep)
    return torch.ops.normrnn.recur(*operands(spec, steps, tensors), keep)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(spec: Spec, steps: Steps, *tensors: Tensor | None) -> Any:
        return tuple(_forward(spec, steps, True, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.spec, ctx.steps, *tensors = inputs
        ctx.count = len(tensors)
        ctx.mark_non_differentiable(*output[1 + ctx.spec.parts :])
        # Not the state: who carries it on may change it in place.
        ctx.save_for_backward(*tensors, output[0], *output[1 + ctx.spec.parts :])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved, n, spec = ctx.saved_tensors, ctx.count, ctx.spec
        heads, wanted = grads[: 1 + spec.parts], ctx.needs_input_grad[2:]
        static = spec, ctx.steps, n, len(heads), wanted
        rows, *rest = saved[n:]
        given = *saved[:n], *heads, *[rows] * len(heads), *rest
        if torch._C._are_functorch_transforms_active():
            found = iter(_Backward.apply(*static, *given))  # type: ignore[call-overload]
        elif torch.is_grad_enabled():
            found = iter(_apply_backward(*static, *given))
        else:
            found = iter(_Backward.forward(*static, *given))
        return None, None, *[next(found) if want else None for want in wanted]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(_Recurrence, info, in_dims, args)


class _Backward(torch.autograd.Function):
    """The way back; its own is by the loop."""

    @staticmethod
    def forward(
        spec: Spec, steps: Steps, n: int, outputs: int, wanted: Sequence[bool], *given: Any
    ) -> Any:
        tensors, grads, made = given[:n], given[n : n + outputs], given[n + outputs :]
        traced = isinstance(steps, Traced)
        if not traced and is_compiled_backward(spec, made, wanted) and is_plain(given):
            return tuple(operators.backward(spec, steps, tensors, made, grads, wanted))
        about = operands(spec, steps, tensors)
        return tuple(torch.ops.normrnn.recur_backward(*about, made, grads, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        *ctx.static, given = *inputs[:5], inputs[5:]
        _, _, n, outputs, _ = ctx.static
        ctx.rest = len(given) - n - outputs
        ctx.save_for_backward(*given[: n + outputs])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *heads: Tensor | None) -> Any:
        spec, steps, n, _, wanted = ctx.static
        needs, again = ctx.needs_input_grad[5:], torch.is_grad_enabled()
        with torch.enable_grad():
            seen = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
            found = derived_by_loop(spec, steps, seen[:n], seen[n:], wanted, again=True)
            pairs = [(f, h) for f, h in zip(found, heads, strict=True) if h is not None]
            which = [k for k, need in enumerate(needs) if need and k < len(seen)]
            derived: list[Tensor | None] = [None] * len(needs)
            if pairs and which:
                made, given = zip(*pairs, strict=True)
                sources: Any = [seen[k] for k in which]
                grads = torch.autograd.grad(
                    made, sources, given, create_graph=again, allow_unused=True
                )
                for k, grad in zip(which, grads, strict=True):
                    derived[k] = grad
        return *[None] * 5, *derived

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(_Backward, info, in_dims, args)


# What Function.apply does where nothing is transformed, without looking up a signature.
_apply: Any = super(torch.autograd.Function, _Recurrence).apply  # type: ignore[misc]
_apply_backward: Any = super(torch.autograd.Function, _Backward).apply  # type: ignore[misc]


def _differentiable(operator: Any, function: Any) -> Any:
    """What an operator does to autograd wherever it is met, as in a graph that was exported."""

    def kernel(keyset: Any, *args: Any) -> Any:
        tensors, sizes, time, batch, *about = args
        spec, rest = spec_of(*about[:4]), about[4:]
        every = [*tensors, *(rest[1] if len(rest) > 1 else ())]
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in every):
            steps = Traced(time, batch, rows_of(tensors), sizes)
            if function is _Recurrence:
                return list(_apply(spec, steps, *tensors))
            made, grads, wanted = rest
            given = *tensors, *grads, *made
            return list(_apply_backward(spec, steps, len(tensors), len(grads), wanted, *given))
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return kernel


_OPS = torch.library.Library("normrnn", "IMPL")
for name, function in (("recur", _Recurrence), ("recur_backward", _Backward)):
    operator = getattr(torch.ops.normrnn, name).default
    _OPS.impl(name, _differentiable(operator, function), "Autograd", with_keyset=True)


def _one_by_one(function: Any, info: Any, in_dims: Any, args: Any) -> Any:
    """Of a batch of calls, as vmap makes them, every one by itself."""
    made = []
    for k in range(info.batch_size):
        pairs = zip(args, in_dims, strict=True)
        one = [a.select(d, k) if isinstance(a, Tensor) and d is not None else a for a, d in pairs]
        made.append(function.apply(*one))
    stacked = tuple(torch.stack(parts) for parts in zip(*made, strict=True))
    return stacked, (0,) * len(stacked)


def update(
    mean: Tensor, var: Tensor, batch: Statistics, share: float, inputs: int = 0
) -> bool | None:
    """One update of buffers (C,) from K groups: whether there was one; None if C cannot. Of the
    first ``inputs`` channels groups whose rows are all equal are left out.

    All of them plain (``is_plain``).
    """
    loaded, means, variances, count = library(), *batch
    K, C = means.shape
    if loaded is None or not K * C or mean.shape != (C,) or var.shape != (C,):
        return None
    if not 0 <= inputs <= C:
        return None
    for t in (mean, var, means, variances, count):
        if t.dtype != torch.float32 or not t.is_cpu or t.layout != torch.strided or t.is_neg():
            return None
    ld, one = means.stride()
    if one != 1 or variances.shape != (K, C) or variances.stride() != (ld, 1):
        return None
    if count.shape != (K,) or not count.is_contiguous():
        return None
    if not (mean.is_contiguous() and var.is_contiguous()):
        return None
    counted = torch.empty_like(count)
    given = [t.data_ptr() for t in (count, counted, means, variances)]
    running = mean.data_ptr(), var.data_ptr()
    return bool(loaded.update(K, C, ld, inputs, *given, share, *running))


def _counts(steps: Steps, by_step: bool, device: torch.device) -> Tensor:
    """The number of rows of each group, as a new tensor."""
    if not isinstance(steps, Traced):
        # Under a mode, as of fake tensors, it is the mode's: not for others to find.
        alone = _get_current_dispatch_mode() is None
        return (_known_counts if alone else _known_counts.__wrapped__)(steps, by_step).clone()
    if steps.batch_sizes is not None:
        sizes = steps.batch_sizes.to(device, torch.float32)
        return sizes if by_step else sizes.sum(0, keepdim=True)
    shape, rows = ((steps.time,), steps.batch) if by_step else ((1,), steps.rows)
    return torch.full(shape, rows, dtype=torch.float32, device=device)


@lru_cache(maxsize=256)
def _known_counts(steps: Steps, by_step: bool) -> Tensor:
    """The same, kept for later calls: not to be handed out."""
    rows = steps.sizes if by_step else [steps.rows]
    return torch.tensor(rows, dtype=torch.float32, device="cpu")
