"""The recurrence of one layer, all its directions.

``recur`` runs the compiled kernels on float32 on a CPU; elsewhere torch's fused kernels where they
can express the call, else the loop. Tracers (a compiler, an exporter, fake tensors) see the
operators of :mod:`normrnn.ops.operators` instead. The derivative of a backward pass is the loop's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normrnn.ops import operators
from normrnn.ops.backend import choice
from normrnn.ops.call import (
    COUNT,
    Result,
    Spec,
    Tensors,
    check,
    check_given,
    project,
)
from normrnn.ops.fused import precision
from normrnn.ops.layout import Steps, Traced
from normrnn.ops.loop import loop
from normrnn.ops.native import kernel
from normrnn.ops.operators import arguments, gradients_by_loop, has_native_backward
from normrnn.ops.scan import run_scan
from normrnn.ops.select import select
from normrnn.ops.statistics import Statistics, without_autocast


def recur(spec: Spec, steps: Steps, tensors: Tensors) -> Result:
    """Run the directions of one layer over all time steps.

    Under autocast W_x x, or the whole of a fused kernel, is computed in its type, all else in the
    type of the weights, which the results have.
    """
    check(spec, steps, tensors)
    kind = tensors.x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return _recur(spec, steps, tensors, None)
    dtype = None if tensors.x.dtype == torch.float64 else torch.get_autocast_dtype(kind)
    with without_autocast(kind):
        return _recur(spec, steps, tensors, dtype)


def _recur(spec: Spec, steps: Steps, tensors: Tensors, dtype: torch.dtype | None) -> Result:
    keep = torch.is_grad_enabled() and _require_grad(tensors)
    is_scanned = isinstance(steps, Traced) and steps.is_scanned
    if not steps.is_traced and not can_run_native(spec, steps, tensors):
        run = select(spec, steps, tensors)
        if run is not loop:
            if tensors.mean is not None:
                tensors = _with_given(spec, steps, tensors, keep)
            return _once_differentiable(run, spec, steps, tensors, dtype, keep)
        return loop(spec, steps, project(tensors, dtype))
    if steps.is_traced and not is_scanned and choice.selected == "triton":
        return select(spec, steps, tensors)(spec, steps, tensors, dtype)
    tensors = tensors if dtype is None else project(tensors, dtype)
    if is_scanned:
        return run_scan(spec, steps, tensors)  # type: ignore[arg-type]
    if not steps.is_traced:
        check_given(spec, steps, tensors)
    if tensors.mean is not None:
        tensors = _with_given(spec, steps, tensors, keep)
    if torch.compiler.is_compiling():
        outputs = torch.ops.normrnn.recur(*arguments(spec, steps, tensors), keep)
    elif keep:
        outputs = _apply(spec, steps, *tensors)
    else:
        outputs = _forward(spec, steps, tensors, False)
    states = 1 + spec.states
    statistics = None
    if spec.batch:
        mean, var = outputs[states].unbind()
        statistics = Statistics(mean, var, steps.counts(spec.per_step, mean.device))
    return Result(outputs[0], tuple(outputs[1:states]), statistics)


def can_run_native(spec: Spec, steps: Steps, tensors: Tensors) -> bool:
    """Whether the compiled kernels run this call, which has been checked."""
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return False  # which see torch's operations alone
    return steps.rows > 0 and not torch.jit.is_tracing() and kernel.can_run(spec, tensors)


def _require_grad(tensors: Sequence[Tensor | None]) -> bool:
    for t in tensors:  # noqa: SIM110 (a generator is slower)
        if t is not None and t.requires_grad:
            return True
    return False


def _with_given(spec: Spec, steps: Steps, tensors: Tensors, keep: bool) -> Tensors:
    """Leave out given statistics that are not needed. Copy them before a backward pass, since
    running ones change before it."""
    mean, var = tensors.mean, tensors.var
    assert mean is not None
    assert var is not None
    is_needed = not spec.batch or steps.has_single_row(spec.per_step)
    if not is_needed and not spec.tests_constant_steps:
        return tensors._replace(mean=None, var=None)
    return tensors._replace(mean=mean.clone(), var=var.clone()) if keep else tensors


def _forward(
    spec: Spec, steps: Steps, tensors: Sequence[Tensor | None], keep: bool
) -> Sequence[Tensor]:
    if not steps.is_traced and kernel.is_addressable(tensors):
        return kernel.forward(spec, steps, tensors, keep)
    return torch.ops.normrnn.recur(*arguments(spec, steps, tensors), keep)


class _Recurrence(torch.autograd.Function):
    """The recurrence by kernel or operator. To be differentiated again, or for many cotangents at
    once, its gradients are those of the loop."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, steps: Steps, *tensors: Tensor | None) -> Any:
        outputs = tuple(_forward(spec, steps, tensors, True))
        ctx.spec, ctx.steps, states = spec, steps, 1 + spec.states
        ctx.mark_non_differentiable(*outputs[states:])
        # Not the final state: a caller that carries it over may change it in place.
        ctx.save_for_backward(*tensors, outputs[0], *outputs[states:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        all_saved, spec, wanted = ctx.saved_tensors, ctx.spec, ctx.needs_input_grad[2:]
        tensors, saved, grads = all_saved[:COUNT], all_saved[COUNT:], grads[: 1 + spec.states]
        again = torch.is_grad_enabled()
        if again or torch._C._are_functorch_transforms_active():
            call = spec, ctx.steps, tensors, grads, wanted
            derived: Any = gradients_by_loop(*call, again=again)
        else:
            derived = _backward(spec, ctx.steps, tensors, saved, grads, wanted)
        if len(derived) == COUNT:
            return None, None, *derived
        derived = iter(derived)
        return None, None, *[next(derived) if want else None for want in wanted]


def _once_differentiable(
    run: Any, spec: Spec, steps: Steps, tensors: Tensors, dtype: torch.dtype | None, keep: bool
) -> Result:
    """Run a call by kernels that have no second derivative."""
    if not keep:
        return run(spec, steps, tensors, dtype)
    outputs = _Fused.apply(run, spec, steps, dtype, *tensors)
    states = 1 + spec.states
    statistics = Statistics(*outputs[states:]) if spec.batch else None
    return Result(outputs[0], tuple(outputs[1:states]), statistics)


class _Fused(torch.autograd.Function):
    """A call of kernels that autograd differentiates once. To be differentiated again, or for many
    cotangents at once, its gradients are those of the loop."""

    @staticmethod
    def forward(
        ctx: Any, run: Any, spec: Spec, steps: Steps, dtype: Any, *tensors: Tensor | None
    ) -> Any:
        with torch.enable_grad():
            inner: Any = [
                None if t is None else t.detach().requires_grad_(want)
                for t, want in zip(tensors, ctx.needs_input_grad[4:], strict=True)
            ]
            rows, state, statistics = run(spec, steps, Tensors(*inner), dtype)
        ctx.call = spec, steps
        ctx.set_materialize_grads(False)
        # The inner graph lives as long as what is saved.
        ctx.save_for_backward(*tensors, *inner, rows, *state)
        # A caller that carries the final state over may change it in place.
        outputs = rows.detach(), *(s.data for s in state)
        measured = statistics or ()
        ctx.mark_non_differentiable(*measured)
        return *outputs, *measured

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (spec, steps), wanted = ctx.call, ctx.needs_input_grad[4:]
        saved, grads = ctx.saved_tensors, grads[: 1 + ctx.call[0].states]
        tensors, inner, outputs = saved[:COUNT], saved[COUNT : 2 * COUNT], saved[2 * COUNT :]
        again = torch.is_grad_enabled()
        if again or torch._C._are_functorch_transforms_active():
            derived: Any = gradients_by_loop(spec, steps, tensors, grads, wanted, again=again)
        else:
            pairs = zip(outputs, grads, strict=True)
            heads = [(out, g) for out, g in pairs if g is not None and out.requires_grad]
            sources = [t for t, want in zip(inner, wanted, strict=True) if want]
            outputs_used, cotangents = zip(*heads, strict=True)
            with precision(spec, steps, Tensors(*tensors)):
                derived = torch.autograd.grad(
                    outputs_used, sources, cotangents, retain_graph=True, allow_unused=True
                )
        derived = iter(derived)
        return *[None] * 4, *[next(derived) if want else None for want in wanted]


def _backward(
    spec: Spec, steps: Steps, tensors: Any, saved: Any, grads: Any, wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients of all tensors, or of the wanted ones."""
    is_native = not steps.is_traced and has_native_backward(spec, saved, wanted)
    if is_native and kernel.is_addressable((*tensors, *saved, *grads)):
        return kernel.backward(spec, steps, tensors, saved, grads, wanted)
    call = arguments(spec, steps, tensors)
    return torch.ops.normrnn.recur_backward(*call, saved, grads, wanted)


# Function.apply without its test for torch.func's transforms, which `can_run_native` has made.
_apply: Any = super(torch.autograd.Function, _Recurrence).apply  # type: ignore[misc]


def _differentiable(keyset: Any, *args: Any) -> Any:
    """The autograd kernel of the operator, as in an exported graph."""
    if torch.is_grad_enabled() and _require_grad(args[0]):
        spec, steps, tensors, _ = operators.Call.of(args)
        return list(_apply(spec, steps, *tensors))
    with torch._C._AutoDispatchBelowAutograd():
        operator = torch.ops.normrnn.recur.default
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)


_OPS = torch.library.Library("normrnn", "IMPL")
_OPS.impl("recur", _differentiable, "Autograd", with_keyset=True)
