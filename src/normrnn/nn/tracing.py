"""What torch's tracers (fx, jit, compile, onnx) see of the layers, and what they refuse."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normrnn.imports import after_import

_COMPILER = "torch._dynamo.variables.builder"


def leaf(layer: nn.Module, proxy: torch.fx.Proxy, *args: Any, **kwargs: Any) -> torch.fx.Proxy:
    """Return the layer as one node of torch.fx's graph, as torch's own layers are."""
    tracer: Any = proxy.tracer
    name = tracer.path_of_module(layer)
    if not name:
        raise TypeError(
            f"torch.fx does not look into a recurrent layer, neither {type(layer).__name__} nor "
            "torch's own: trace the model that has it, where it becomes one node"
        )
    return tracer.create_proxy("call_module", name, (proxy, *args), kwargs)


def run_eagerly() -> Callable[[], Any] | None:
    """Run compiled models eagerly, in all threads; return a function that ends that.

    None if the compiler, whose import takes seconds, is not imported: then nothing is compiled.
    torch cannot set a stance inside a compiled region, so both functions run outside.
    """
    if "_dynamo" not in vars(torch):
        return None
    outside: Any = torch.compiler.disable
    return outside(partial(outside(_force_eager)().__exit__, None, None, None))


def _force_eager() -> Any:
    return torch.compiler.set_stance("force_eager")


def check_plain(layer: Any) -> None:
    """Raise RuntimeError where torch.jit.trace would have to see more than torch's layer."""
    if layer.norm is not None or layer.peephole is not None or any(layer.zoneout):
        refuse_torchscript(layer)
    if layer.training and (layer.weight_drop or (layer.dropout and layer.dropout_kind == "locked")):
        refuse_torchscript(layer)


def refuse_torchscript(layer: nn.Module) -> None:
    """Raise RuntimeError with alternatives."""
    raise RuntimeError(
        f"torch.jit supports torch's own layers only, not {type(layer).__name__}: use torch.export,"
        " or normrnn.fold(model.eval()), which returns torch's layers where there are any of the"
        " same output"
    )


def can_fold(layer: Any) -> bool:
    """Whether the layer can be folded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about statistics that were never updated
        try:
            layer.check_foldable("")
        except ValueError:
            return False
    return True


def refuse_onnx(layer: Any, what: str) -> None:
    """Raise RuntimeError with an alternative."""
    advice = "give it padded batches and lengths=" if "Packed" in what else "export model.eval()"
    if what.startswith("norm=") or (layer.training and can_fold(layer)):
        advice = "export normrnn.fold(model.eval())"
    raise RuntimeError(
        f"torch.onnx.export cannot express {type(layer).__name__} with {what}: {advice}"
    )


def with_own_gradient(tensor: Any) -> Any:
    """Return the tensor, with a gradient in memory of its own.

    Two parameters that are added have one gradient. Compiled code would give both the same tensor,
    so that a second backward pass adds to it twice.
    """
    return _OwnGradient.apply(tensor) if torch.compiler.is_compiling() else tensor


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        return grads[0].clone()


def allow(layers: type[nn.Module]) -> None:
    """Let torch.compile trace these layers.

    It refuses everything derived from torch's recurrent layers, whose loops it would unroll; ours
    are one operator. The compiler is configured when it is imported, which takes seconds that most
    programs never need.
    """
    after_import(_COMPILER, lambda builder: _allow(builder, layers))


def _allow(builder: Any, layers: type[nn.Module]) -> None:
    """Patch the compiler. A version of torch without these names is left alone: its compiler
    then runs our layers eagerly, between two graphs, as it runs its own."""
    kind, config = (getattr(builder, name, None) for name in ("VariableBuilder", "config"))
    wrap: Any = getattr(kind, "wrap_module", None)
    if wrap is None or not hasattr(config, "allow_rnn") or not hasattr(config, "patch"):
        return

    def wrap_module(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(value, layers):
            return wrap(self, value, *args, **kwargs)
        with builder.config.patch(allow_rnn=True):
            return wrap(self, value, *args, **kwargs)

    builder.VariableBuilder.wrap_module = wrap_module
