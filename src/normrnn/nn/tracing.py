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


def check_plain(layer: Any, tool: str) -> None:
    """Raise RuntimeError where TorchScript cannot express the layer."""
    for name, there in (("norm", layer.norm), ("peephole", layer.peephole)):
        if there is not None:
            refuse(layer, tool, f"{name}={there!r}")
    if any(layer.zoneout):
        refuse(layer, tool, f"zoneout={layer.zoneout}")
    if layer.training and (layer.weight_drop or (layer.dropout and layer.dropout_kind == "locked")):
        raise RuntimeError(
            f"{tool} supports torch's own dropout only: {type(layer).__name__} has "
            f"weight_drop={layer.weight_drop}, dropout_kind={layer.dropout_kind!r}, which would "
            "be lost; call model.eval() first, or use torch.compile"
        )


def refuse(layer: Any, tool: str, what: str) -> None:
    """Raise RuntimeError with an alternative."""
    folds = what.startswith("norm=") and can_fold(layer)
    first = (
        "call normrnn.fold(model.eval()) first, which returns plain layers of the same output, or "
    )
    raise RuntimeError(
        f"{tool} supports torch's own layers only, not {type(layer).__name__} with {what}: "
        f"{first if folds else ''}use torch.export"
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


def plain(layer: Any) -> nn.RNNBase:
    """Return torch's layer with the same parameters, for torch.jit.script."""
    check_plain(layer, "torch.jit.script")
    same = layer.fold()
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(same, name, parameter)
    return same


def prepare_for_script_modules(layers: type[nn.Module]) -> None:
    """Give a ``torch.jit.ScriptModule`` torch's layer where it is assigned one of these.

    ``torch.jit.script`` asks for it by ``__prepare_scriptable__``, a ScriptModule does not.
    """

    def prepare(parent: nn.Module, _: str, child: Any) -> nn.Module | None:
        if isinstance(child, layers) and isinstance(parent, torch.jit.ScriptModule):
            layer: Any = child
            return layer.__prepare_scriptable__()
        return None

    hook: Any = prepare
    nn.modules.module.register_module_module_registration_hook(hook)


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
