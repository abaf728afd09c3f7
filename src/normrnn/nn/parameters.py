"""The parameters of a layer: how they are made and named, and folded into those of torch."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normrnn import norms
from normrnn.nn import tracing
from normrnn.nn.batchnorm import Normaliser
from normrnn.nn.normaliser import GateNorm
from normrnn.nn.options import DEFAULT_NORM, OPTION_NAMES, NormName, Options
from normrnn.ops.call import CELLS, Weights
from normrnn.ops.fold import torch_weights

PEEPHOLES = {None: "", "output": "o", "all": "ifo"}

TORCH_MODULE = nn.RNN.__module__
"""Bound here, since programs replace ``torch.nn.LSTM`` and the others by ours."""

_INITS: dict[Any, Any] = {kind: kind.__init__ for kind in (nn.RNN, nn.LSTM, nn.GRU)}
"""Torch's own, which :func:`normrnn.replacing` replaces inside its block."""

TORCH_OPTIONS = "input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional"
"""Options that a layer takes over from the one that it replaces."""


class Parameters(nn.RNNBase):
    """Torch's layer with a normaliser per layer and direction instead of biases, and peepholes.

    A subclass of torch's own, so that ``isinstance(m, nn.LSTM)``, ``m.hidden_size`` and
    ``m.flatten_parameters()`` work.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    norm_given = True
    """Whether ``norm`` was given: the default, which depends on later frames, warns in training."""
    weight_drop: float = 0.0
    dropout_kind: str = "element"
    zoneout: tuple[float, ...] = (0.0, 0.0)
    forget_bias: float | None = None
    learn_initial_state: bool = False
    _norm_names: Sequence[str] = ()
    _weight_names: Sequence[tuple[str | None, ...]] = ()

    def __init__(self, mode: str, arguments: Mapping[str, Any]):
        """Make the parameters.

        Args:
            arguments: those of the layer's own ``__init__``, by name.
        """
        options = Options(mode, **{name: arguments[name] for name in OPTION_NAMES})
        torch_options = {k: arguments[k] for k in ("batch_first", "dropout", "bidirectional")}
        proj_size, peephole = arguments.get("proj_size", 0), arguments.get("peephole")
        forget_bias, row = arguments.get("forget_bias"), options.row
        factory = {"device": arguments["device"], "dtype": arguments["dtype"]}
        sizes = [arguments[name] for name in ("input_size", "hidden_size", "num_layers")]
        if peephole not in PEEPHOLES:
            raise ValueError(f"unknown peephole={peephole!r}: choose None, 'output' or 'all'")
        if peephole is not None and proj_size > 0:
            raise ValueError(f"peephole={peephole!r} does not work with proj_size: leave one out")
        inside = options.weight_drop or any(options.zoneout) or options.dropout_kind == "locked"
        if inside and proj_size > 0:
            raise ValueError(
                "weight_drop, zoneout and dropout_kind='locked' do not work with proj_size: leave"
                " one out"
            )
        if forget_bias is not None and not (
            options.bias and (options.affine or not row.normalises)
        ):
            lacks = "affine=False" if options.bias else "bias=False"
            raise ValueError(f"forget_bias={forget_bias} needs a bias to set, got {lacks}")
        # β is the bias of a normalised layer, so torch makes none.
        torch_bias = options.bias and not row.normalises
        like = "GRU" if mode == "LIGRU" else mode
        nn.RNNBase.__init__(
            self, like, *sizes, bias=torch_bias, proj_size=proj_size, **torch_options, **factory
        )
        if mode != like:  # two gates of three
            self.mode, rows = mode, 2 * self.hidden_size
            for name, parameter in list(self.named_parameters()):
                setattr(self, name, nn.Parameter(parameter.detach()[:rows].clone()))
        self.norm_given = options.norm is not DEFAULT_NORM
        self.norm: NormName = options.norm if self.norm_given else "sequence"
        self.peephole, self.bias, self.time_steps = peephole, options.bias, options.time_steps
        self.weight_drop, self.dropout_kind = options.weight_drop, options.dropout_kind
        self.zoneout = tuple(options.zoneout)
        self.learn_initial_state = options.learn_initial_state
        for suffix in self._suffixes:
            channels, inputs = getattr(self, f"weight_ih_{suffix}").shape
            normaliser = options.normaliser((channels, self.hidden_size, inputs), factory)
            if normaliser is not None:
                self.add_module(f"norm_{suffix}", normaliser)
            names = [f"weight_c{gate}" for gate in PEEPHOLES[peephole]]
            if mode == "GRU" and normaliser is not None and options.bias:
                names.append("bias_hn")
            for name in names:
                vector = nn.Parameter(torch.empty(self.hidden_size, **factory))
                self.register_parameter(f"{name}_{suffix}", vector)
                self._draw(vector)
            if options.learn_initial_state:
                state_sizes = {"h_0": self.proj_size or self.hidden_size}
                state_sizes |= {"c_0": self.hidden_size} if mode == "LSTM" else {}
                for name, size in state_sizes.items():
                    start = nn.Parameter(torch.zeros(size, **factory))
                    self.register_parameter(f"{name}_{suffix}", start)
        self.forget_bias = forget_bias
        self._weight_names = [self._names_of(suffix) for suffix in self._suffixes]
        self._norm_names = [f"norm_{suffix}" for suffix in self._suffixes] if row.normalises else []
        self.open_forget_gates()

    def _names_of(self, suffix: str) -> tuple[str | None, ...]:
        """Return the names of the weights of a direction in the order of :class:`Weights`, with
        torch's two biases at the end; None for those that it has not."""
        has_torch_bias = self.bias and self.norm is None
        has = {"weight_ih": True, "weight_hh": True, "bias_hn": self.mode == "GRU" and self.bias}
        has["bias_hn"] = has["bias_hn"] and not has_torch_bias
        has |= {f"weight_c{gate}": gate in PEEPHOLES[self.peephole] for gate in "ifo"}
        has |= {"weight_hr": self.proj_size > 0, "bias_ih": has_torch_bias}
        has["bias_hh"] = has_torch_bias
        return tuple(f"{name}_{suffix}" if there else None for name, there in has.items())

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _suffixes(self) -> list[str]:
        ends = ("", "_reverse")[: self.directions]
        return [f"l{layer}{end}" for layer in range(self.num_layers) for end in ends]

    def reset_parameters(self) -> None:
        """Draw weights as torch does; reset γ to its initial value, β to 0, and statistics."""
        normalisers = self.normalisers()
        of_norms = {id(parameter) for n in normalisers for parameter in n.parameters()}
        for parameter in self.parameters():  # those of a parametrization too, as torch does
            if id(parameter) not in of_norms:
                self._draw(parameter)
        for state in self._initial_parameters():
            for parameter in state:
                nn.init.zeros_(parameter)
        for normaliser in normalisers:
            normaliser.reset_parameters()
        self.open_forget_gates()

    def _initial_parameters(self) -> list[list[Tensor]]:
        """Return the learned h_0 of all layers and directions and, with an LSTM, c_0; empty if
        they are not learned."""
        if not self.learn_initial_state:
            return []
        names = ("h_0", "c_0")[: CELLS[self.mode].states]
        return [[getattr(self, f"{name}_{suffix}") for suffix in self._suffixes] for name in names]

    @torch.no_grad()
    def open_forget_gates(self) -> None:
        """Set the bias of the forget gates, the second of four, to ``forget_bias``."""
        if self.forget_bias is None:
            return
        gate = slice(self.hidden_size, 2 * self.hidden_size)
        for suffix in self._suffixes:
            normaliser = getattr(self, f"norm_{suffix}", None)
            if normaliser is not None:
                normaliser.bias[gate] = self.forget_bias
            else:
                getattr(self, f"bias_ih_{suffix}")[gate] = self.forget_bias
                getattr(self, f"bias_hh_{suffix}")[gate] = 0

    def _draw(self, parameter: Tensor) -> None:
        bound = self.hidden_size**-0.5
        nn.init.uniform_(parameter, -bound, bound)

    @property
    def _all_weights(self) -> list[list[str]]:
        """Names of torch's parameters; AttributeError if there is a norm.

        Libraries read them to compute the layer's function themselves, without the norm.
        """
        if vars(self).get("norm") is not None:
            raise AttributeError("the weights of a normalised layer are not its function")
        return vars(self)["_all_weights"]

    @_all_weights.setter
    def _all_weights(self, names: list[list[str]]) -> None:
        vars(self)["_all_weights"] = names

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """As in torch, per layer and direction; without the parameters of normalisers."""
        return [[getattr(self, name) for name in names] for names in vars(self)["_all_weights"]]

    def __setstate__(self, state: dict[str, Any]) -> None:
        norm = state.get("norm")
        super().__setstate__({**state, "norm": None})  # torch's reads _all_weights
        self.norm = norm

    def flatten_parameters(self) -> None:
        """As in torch; with a normaliser, and without torch's cell, there is nothing to flatten."""
        if getattr(self, "norm", None) is None and self.mode != "LIGRU":
            super().flatten_parameters()

    def extra_repr(self) -> str:
        usual = {"peephole": None, "forget_bias": None, "weight_drop": 0.0}
        usual |= {"dropout_kind": "element", "zoneout": (0.0, 0.0), "learn_initial_state": False}
        values = {name: getattr(self, name) for name in usual}
        shown = [f", {name}={values[name]!r}" for name in usual if values[name] != usual[name]]
        return f"{super().extra_repr()}, norm={self.norm!r}{''.join(shown)}"

    def normalisers(self) -> list[GateNorm]:
        """Return one per layer and direction; none with ``norm=None``."""
        modules = self._modules
        return [modules[name] for name in self._norm_names]  # type: ignore[misc]

    def weights(self) -> list[Weights]:
        """Return the weights per layer and direction in torch's order."""
        parameters, result = self._parameters, []
        for names in self._weight_names:
            # A parametrisation or a hook computes some weights, which are attributes then.
            *weights, b_ih, b_hh = [
                None if n is None else parameters[n] if n in parameters else getattr(self, n)
                for n in names
            ]
            bias = None
            if b_ih is not None and b_hh is not None:
                if self.mode == "GRU":  # the candidate's part is inside r ⊙ (…)
                    weights[2] = b_hh[-self.hidden_size :]
                    b_hh = torch.cat([b_hh[: -self.hidden_size], torch.zeros_like(weights[2])])
                bias = b_ih + tracing.with_own_gradient(b_hh)
            result.append(Weights(*weights, bias))  # type: ignore[arg-type]
        return result

    def check_foldable(self, name: str, keep: bool = False) -> None:
        """Raise ValueError if no plain layer has the same eval output.

        With ``keep`` the plain layer is one of ours. Warn if statistics were never updated.
        """
        row, reason, normalisers = norms.get(self.norm), None, self.normalisers()
        if type(self).forward is not self._kind("normrnn.nn.layers").forward:
            reason = (
                f"{type(self).__name__} overrides forward, which would be lost; move that code "
                "to a module around the layer"
            )
        elif self.needs_our_layer and not keep:
            reason = f"{self.needs_our_layer}; normrnn.fold(model) keeps our layer, with norm=None"
        elif self.peephole is not None and not keep:
            reason = f"peephole={self.peephole!r}: torch's layers have no peepholes"
        elif any(self.zoneout) and not keep:
            reason = f"zoneout={self.zoneout}: torch's layers have no zoneout"
        elif row.unfoldable:
            reason = f"norm={self.norm!r} {row.unfoldable}"
        elif any(getattr(n, "cell_norm", False) for n in self.normalisers()):
            reason = f"norm={self.norm!r} normalises the cell too (cell_norm=False leaves it out)"
        elif row.keeps_statistics and self.time_steps is not None:
            where = "inside the recurrence" if row.acts == "step" else "its input"
            reason = (
                f"norm={self.norm!r} normalises {where} with statistics that differ over "
                f"{self.time_steps} time steps; normrnn.recalibrate(..., shared=True) merges them"
            )
        elif any(getattr(n, "running_mean", self) is None for n in normalisers):
            reason = "it has no running statistics (track_running_stats=False)"
        if reason is not None:
            raise ValueError(f"{name} cannot be folded into a plain layer: {reason}")
        if any(n.was_never_updated for n in normalisers):
            warnings.warn(
                f"{name} is folded with statistics that were never updated, mean 0 and variance 1: "
                "train it, or call normrnn.recalibrate, first",
                stacklevel=3,
            )

    @property
    def needs_our_layer(self) -> str:
        """Why a folded layer is one of ours, with ``norm=None``; empty if torch has such a one."""
        if self.mode == "LIGRU":
            return "torch has no LiGRU"
        return "torch's layers do not learn initial states" if self.learn_initial_state else ""

    def fold(self) -> nn.RNNBase:
        """Return a plain layer of the same eval output; this one is unchanged.

        A ``torch.nn`` layer, or one of ours with ``norm=None`` where torch has none, as with
        ``learn_initial_state``.
        """
        keep = bool(self.needs_our_layer)
        self.check_foldable(type(self).__name__, keep)
        return self.folded(keep)

    @torch.no_grad()
    def folded(self, keep: bool) -> nn.RNNBase:
        """Fold without checks; ``keep``: into ours with ``norm=None``, which takes ``lengths``."""
        normalisers = self.normalisers()
        more: dict[str, Any] = {"norm": None} if keep else {}
        more |= {"peephole": self.peephole} if self.peephole is not None else {}
        kind = self._kind("normrnn.nn.layers" if keep else TORCH_MODULE)
        new = remade(self, kind, bias=self.bias or bool(normalisers), **more)
        kept = "weight_c", "h_0", "c_0"
        peepholes = [name for name, _ in new.named_parameters() if name.startswith(kept)]
        weight_names = [] if normalisers else new._all_weights
        with torch.enable_grad():  # parametrised weights are computed when read
            vectors = [getattr(self, name) for name in peepholes]
            plain = [[getattr(self, name) for name in names] for names in weight_names]
            pairs = list(zip(self.weights(), normalisers, strict=True)) if normalisers else []
        if normalisers:
            values = [torch_weights(n.folded(weights)) for weights, n in pairs]
            values = [[value for value in some if value is not None] for some in values]
            trained = [_trained(weights, n) for weights, n in pairs]
        else:
            values, trained = plain, [[value.requires_grad for value in some] for some in plain]
        for names, *columns in zip(new._all_weights, values, trained, strict=True):
            for name, value, train in zip(names, *columns, strict=True):
                getattr(new, name).copy_(value).requires_grad_(train)
        for name, vector in zip(peepholes, vectors, strict=True):
            getattr(new, name).copy_(vector).requires_grad_(vector.requires_grad)
        return new

    def _kind(self, home: str) -> type[nn.RNNBase]:
        """Return the layer class of that module that this one derives from."""
        return next(base for base in type(self).__mro__ if base.__module__ == home)

    @torch.no_grad()
    def take_weights(self, plain: nn.RNNBase) -> None:
        """Copy the weights of a plain layer, and which are trained; β is the sum of its biases."""
        for suffix, names in zip(self._suffixes, plain._all_weights, strict=True):
            for name in names:
                if name in self._parameters:
                    value = getattr(plain, name)
                    getattr(self, name).copy_(value).requires_grad_(value.requires_grad)
            normaliser = getattr(self, f"norm_{suffix}", None)
            if normaliser is None:
                continue
            if plain.bias:
                b_ih, b_hh = (getattr(plain, f"{name}_{suffix}") for name in ("bias_ih", "bias_hh"))
                trained = b_ih.requires_grad or b_hh.requires_grad
            else:
                b_ih = b_hh = self.weight_hh_l0.new_zeros(self.weight_hh_l0.shape[0])
                trained = True
            bias_hn = getattr(self, f"bias_hn_{suffix}", None)
            if bias_hn is not None:
                bias_hn.copy_(b_hh[-self.hidden_size :]).requires_grad_(trained)
                b_hh = torch.cat([b_hh[: -self.hidden_size], torch.zeros_like(bias_hn)])
            if normaliser.bias is not None:
                normaliser.bias.copy_(b_ih + b_hh).requires_grad_(trained)

    @torch.no_grad()
    def start_neutral(self) -> None:
        """Make the normalisers neutral, so that the function is that of the weights."""
        for suffix, normaliser in zip(self._suffixes, self.normalisers(), strict=True):
            assert isinstance(normaliser, Normaliser)
            assert normaliser.weight is not None
            normaliser.start_neutral()
            normaliser.weight.requires_grad_(getattr(self, f"weight_ih_{suffix}").requires_grad)


def remade(layer: nn.RNNBase, kind: Any, bias: bool, **options: Any) -> Any:
    """Return a new layer of that kind with the sizes, device, type and mode of ``layer``, and
    among ours with its regularisers and learned states."""
    if isinstance(layer, Parameters) and Parameters in kind.__mro__:
        regularisers = "weight_drop", "dropout_kind", "zoneout", "learn_initial_state"
        options = {name: getattr(layer, name) for name in regularisers} | options
    options |= {name: getattr(layer, name) for name in TORCH_OPTIONS}
    options |= {"nonlinearity": layer.nonlinearity} if layer.mode.startswith("RNN") else {}
    options |= {"proj_size": layer.proj_size} if layer.proj_size else {}
    like: Any = layer.weight_hh_l0
    new = kind.__new__(kind)
    _INITS.get(kind, kind.__init__)(new, **options, bias=bias, device=like.device, dtype=like.dtype)
    return new.train(layer.training)


def _trained(weights: Weights, normaliser: GateNorm) -> list[bool]:
    """Return whether W_x, W_h, the biases and W_hr of a folded layer would be trained."""
    assert weights.w_ih is not None
    first = normaliser.bias is None or normaliser.bias.requires_grad
    second = first if weights.bias_hn is None else weights.bias_hn.requires_grad
    last = [] if weights.w_hr is None else [weights.w_hr.requires_grad]
    return [weights.w_ih.requires_grad, weights.w_hh.requires_grad, first, second, *last]
