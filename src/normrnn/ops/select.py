"""The choice of what runs a call that the compiled kernels do not run."""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from normrnn.ops.backend import choice
from normrnn.ops.call import Result, Spec, Tensors
from normrnn.ops.fused import can_run, is_change_of_weights, run
from normrnn.ops.layout import Steps
from normrnn.ops.loop import loop


def select(spec: Spec, steps: Steps, tensors: Tensors) -> Callable[..., Result]:
    """Return what runs a call that the compiled kernels do not run.

    Off the CPU that is :mod:`normrnn.ops.fused` where torch has such a kernel, else the loop. On a
    CPU it is the loop in training, where folding costs more, and for packed batches, where torch's
    kernels take time that grows with T². Transforms of torch.func, forward-mode differentiation and
    TorchScript see the loop. RuntimeError if :func:`normrnn.backend` says otherwise.
    """
    if choice.selected == "native":
        raise RuntimeError(
            "backend('native') cannot run this call: the compiled kernels take float32 on a CPU, "
            "without a projection, outside forward-mode differentiation, torch.func and torch.jit"
        )
    has_transforms = torch._C._are_functorch_transforms_active() or torch.jit.is_tracing()
    if has_transforms or forward_ad._current_level >= 0 or choice.selected == "loop":
        return loop
    if choice.selected == "triton":
        return load_triton(spec, steps, tensors)
    is_able = can_run(spec, steps, tensors)
    if choice.selected == "auto" and tensors.x.is_cpu:
        is_plain = not (spec.batch or steps.ragged)
        is_able = is_able and is_plain and is_change_of_weights(spec, steps, tensors)
    elif choice.selected == "torch" and not is_able:
        kind = "batch" if spec.batch else "test"
        raise RuntimeError(
            f"backend('torch') cannot run this call: torch has no kernel for {spec.mode} with the "
            f"norm {spec.kind!r} and {kind} statistics, or with resets, zoneout or peepholes: use "
            "backend('auto')"
        )
    return run if is_able else loop


def load_triton(spec: Spec, steps: Steps, tensors: Tensors) -> Callable[..., Result]:
    """Return what runs the call by Triton; RuntimeError if it cannot."""
    try:
        from normrnn.ops import triton_layer  # needs the package triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError(
            "backend('triton') needs the package triton: pip install triton"
        ) from error
    triton_layer.check_call(spec, steps, tensors)
    return triton_layer.run
