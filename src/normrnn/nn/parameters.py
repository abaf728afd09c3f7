"""A layer as parameters: how it is made, what it is called, and folded into torch's own."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normrnn import norms
from normrnn.nn import tracing
from normrnn.nn.batch import Normaliser
from normrnn.nn.loading import FOLD, Hinting
from normrnn.nn.normaliser import GateNorm
from normrnn.nn.options import DEFAULT_NORM, Norm, Options
from normrnn.ops.call import Cell, Peephole
from normrnn.ops.fold import Weights

PEEPHOLES = {None: "", "output": "o", "all": "ifo"}

TORCH_MODULE = nn.RNN.__module__
"""Bound here, since programs replace ``torch.nn.LSTM`` and its like by ours."""

_INITS: dict[Any, Any] = {kind: kind.__init__ for kind in (nn.RNN, nn.LSTM, nn.GRU)}
"""Torch's own, which :func:`normrnn.replacing` replaces for a while."""

TORCHS = "input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional"
"""What a layer that takes another's place has from that."""


class Parameters(Hinting, nn.RNNBase):
    """Torch's layer with a normaliser per layer and direction instead of biases, and peepholes.

    A subclass of torch's own, so that a model that asks ``isinstance(m, nn.LSTM)``, reads
    ``m.hidden_size`` or calls ``m.flatten_parameters()`` keeps working.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    one_bias = False
    norm_given = True
    """Whether the user named the norm: the default looks ahead, and warns in training."""
    weight_drop: float = 0.0
    dropout_kind: str = "element"
    zoneout: tuple[float, ...] = (0.0, 0.0)
    forget_bias: float | None = None

    def __init__(
        self,
        options: Options,
        sizes: tuple[int, int, int],
        torch_options: dict[str, Any],
        factory: dict[str, Any],
        peephole: str | None = None,
        forget_bias: float | None = None,
    ):
        row, proj_size = options.row, torch_options.get("proj_size", 0)
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
        mode = options.mode
        nn.RNNBase.__init__(self, mode, *sizes, bias=torch_bias, **torch_options, **factory)
        self.norm_given = options.norm is not DEFAULT_NORM
        self.norm: Norm = options.norm if self.norm_given else "sequence"
        self.peephole, self.bias, self.time_steps = peephole, options.bias, options.time_steps
        self.weight_drop, self.dropout_kind = options.weight_drop, options.dropout_kind
        self.zoneout = tuple(options.zoneout)
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
        self.forget_bias = forget_bias
        self.open_forget_gates()

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _suffixes(self) -> list[str]:
        ends = ("", "_reverse")[: self.directions]
        return [f"l{layer}{end}" for layer in range(self.num_layers) for end in ends]

    def reset_parameters(self) -> None:
        """Weights as torch draws them; γ to its initial value, β to 0, statistics forgotten."""
        normalisers = self.normalisers()
        theirs = {id(parameter) for n in normalisers for parameter in n.parameters()}
        for parameter in self.parameters():  # those of a parametrization too, as torch does
            if id(parameter) not in theirs:
                self._draw(parameter)
        for normaliser in normalisers:
            normaliser.reset_parameters()
        self.open_forget_gates()

    @torch.no_grad()
    def open_forget_gates(self) -> None:
        """The bias of the forget gates, the second of four, where one was asked for."""
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

    def train_one_bias(self) -> None:
        """Of torch's two biases, which get the same gradient, only one learns from now on.

        Untouched they would learn at twice the rate of β. So ``bias_hh``, as far as there is one,
        stays at zero; of the GRU's the candidate's part, which is inside r ⊙ (W_h h + b), is
        trained.
        """
        self.one_bias = True
        inside = 2 * self.hidden_size if self.mode == "GRU" else None
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if "bias_hh" in name:
                    parameter[:inside] = 0
                    parameter.requires_grad_(inside is not None)
        self._mask_gradients()

    def _mask_gradients(self) -> None:
        """A hook belongs to the tensor: copies and pickles of the layer need another one."""
        if self.mode == "GRU":
            n = 2 * self.hidden_size
            for name, parameter in self.named_parameters(recurse=False):
                if "bias_hh" in name:
                    parameter.register_hook(lambda d: torch.cat([d.new_zeros(n), d[n:]]))

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
        if self.one_bias:
            self._mask_gradients()

    def _hint(self, state_dict: Mapping[str, Any], prefix: str) -> str:
        normalised = any(key.startswith(f"{prefix}norm_l0.") for key in state_dict)
        return FOLD if normalised and not self.normalisers() else ""

    def flatten_parameters(self) -> None:
        """As in torch; with a normaliser there is nothing to flatten."""
        if getattr(self, "norm", None) is None:
            super().flatten_parameters()

    def extra_repr(self) -> str:
        usual = {
            "peephole": None,
            "forget_bias": None,
            "weight_drop": 0.0,
            "dropout_kind": "element",
        }
        usual["zoneout"] = (0.0, 0.0)
        now = {name: getattr(self, name) for name in usual}
        said = [f", {name}={now[name]!r}" for name in usual if now[name] != usual[name]]
        return f"{super().extra_repr()}, norm={self.norm!r}{''.join(said)}"

    def normalisers(self) -> list[GateNorm]:
        """One per layer and direction; empty with ``norm=None``."""
        return [m for m in self._modules.values() if isinstance(m, GateNorm)]

    def weights(self) -> list[Weights]:
        """Per layer and direction in torch's order."""
        return [self._weights(suffix) for suffix in self._suffixes]

    def _weights(self, suffix: str) -> Weights:
        own = self._parameters

        def find(name: str) -> Any:
            full = f"{name}_{suffix}"
            return own[full] if full in own else self._elsewhere(full)

        names = "weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh", "bias_hn"
        w_ih, w_hh, w_hr, b_ih, b_hh, bias_hn = map(find, names)
        if b_hh is not None and self.mode == "GRU":  # that inside r ⊙ (…) is the recurrence's
            bias_hn = b_hh[-self.hidden_size :]
            b_hh = torch.cat([b_hh[: -self.hidden_size], torch.zeros_like(bias_hn)])
        peephole = Peephole(*(find(f"weight_c{gate}") for gate in "ifo"))
        bias = None if b_ih is None else b_ih + tracing.apart(b_hh)
        return Weights(w_ih, Cell(w_hh, bias_hn, peephole, w_hr), bias)

    def _elsewhere(self, name: str) -> Any:
        """A parameter that somebody computes: of a parametrization, of a hook; None if nobody."""
        if name in self.__dict__ or hasattr(type(self), name):
            return getattr(self, name)
        return None

    def cells(self) -> list[Cell]:
        return [weights.cell for weights in self.weights()]

    def check_foldable(self, name: str, keep: bool = False) -> None:
        """ValueError with the reason if no plain layer has the same eval output.

        ``keep``: one of ours without a norm will do. A warning if statistics were never updated.
        """
        row, reason, normalisers = norms.of(self.norm), None, self.normalisers()
        if type(self).forward is not self._kind("normrnn.nn.layers").forward:
            reason = (
                f"{type(self).__name__} has a forward of its own, which would be lost; what it "
                "does belongs into a module around the layer"
            )
        elif self.peephole is not None and not keep:
            reason = f"peephole={self.peephole!r}: torch's layers have no peepholes"
        elif any(self.zoneout) and not keep:
            reason = f"zoneout={self.zoneout}: torch's layers keep nothing of a state as it was"
        elif row.unfoldable:
            reason = f"norm={self.norm!r} {row.unfoldable}"
        elif any(getattr(n, "cell_norm", False) for n in self.normalisers()):
            reason = f"norm={self.norm!r} normalises the cell too (cell_norm=False leaves it out)"
        elif row.keeps_statistics and self.time_steps is not None:
            where = "inside the recurrence" if row.acts == "step" else "its input"
            reason = (
                f"norm={self.norm!r} normalises {where} with statistics that differ over "
                f"{self.time_steps} time steps; normrnn.recalibrate(..., shared=True) makes one of "
                "them"
            )
        elif any(getattr(n, "running_mean", self) is None for n in normalisers):
            reason = "it has no running statistics (track_running_stats=False)"
        if reason is not None:
            raise ValueError(f"{name} cannot be folded into a plain layer: {reason}")
        if any(n.never_updated for n in normalisers):
            warnings.warn(
                f"{name} is folded with statistics that were never updated, mean 0 and variance 1: "
                "train it, or call normrnn.recalibrate, first",
                stacklevel=3,
            )

    def fold(self) -> nn.RNNBase:
        """A plain ``torch.nn`` layer of the same eval output; this one is unchanged."""
        self.check_foldable(type(self).__name__)
        return self.folded(keep=False)

    @torch.no_grad()
    def folded(self, keep: bool) -> nn.RNNBase:
        """The same unchecked; ``keep``: one of ours with ``norm=None``, which takes ``lengths``."""
        normalisers = self.normalisers()
        more: dict[str, Any] = {"norm": None} if keep else {}
        more |= {"peephole": self.peephole} if self.peephole is not None else {}
        kind = self._kind("normrnn.nn.layers" if keep else TORCH_MODULE)
        new = remade(self, kind, bias=self.bias or bool(normalisers), **more)
        peepholes = [name for name, _ in new.named_parameters() if name.startswith("weight_c")]
        own = [] if normalisers else new._all_weights
        with torch.enable_grad():  # parametrized weights are made as they are read
            vectors = [getattr(self, name) for name in peepholes]
            plain = [[getattr(self, name) for name in names] for names in own]
            pairs = list(zip(self.weights(), normalisers, strict=True)) if normalisers else []
        if normalisers:
            values = [n.folded(weights).flat() for weights, n in pairs]
            trained = [_trained(weights, n) for weights, n in pairs]
        else:
            values, trained = plain, [[value.requires_grad for value in some] for some in plain]
        for names, *found in zip(new._all_weights, values, trained, strict=True):
            for name, value, train in zip(names, *found, strict=True):
                getattr(new, name).copy_(value).requires_grad_(train)
        for name, vector in zip(peepholes, vectors, strict=True):
            getattr(new, name).copy_(vector).requires_grad_(vector.requires_grad)
        return new

    def _kind(self, home: str) -> type[nn.RNNBase]:
        """Which of the three layers of that module this one is."""
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
        """Make normalisers that leave the function of the weights alone, and train with them."""
        for suffix, normaliser in zip(self._suffixes, self.normalisers(), strict=True):
            assert isinstance(normaliser, Normaliser)
            assert normaliser.weight is not None
            normaliser.start_neutral()
            normaliser.weight.requires_grad_(getattr(self, f"weight_ih_{suffix}").requires_grad)


def remade(layer: nn.RNNBase, kind: Any, bias: bool, **options: Any) -> Any:
    """A new layer of that kind, of the same sizes and in the same place and mode; among ours,
    regularised alike."""
    if isinstance(layer, Parameters) and Parameters in kind.__mro__:
        own = "weight_drop", "dropout_kind", "zoneout"
        options = {name: getattr(layer, name) for name in own} | options
    options |= {name: getattr(layer, name) for name in TORCHS}
    options |= {"nonlinearity": layer.nonlinearity} if layer.mode.startswith("RNN") else {}
    options |= {"proj_size": layer.proj_size} if layer.proj_size else {}
    like: Any = layer.weight_hh_l0
    new = kind.__new__(kind)
    _INITS.get(kind, kind.__init__)(new, **options, bias=bias, device=like.device, dtype=like.dtype)
    return new.train(layer.training)


def _trained(weights: Weights, normaliser: GateNorm) -> list[bool]:
    """Whether W_x, W_h and the biases of a folded layer would be trained on."""
    first = normaliser.bias is None or normaliser.bias.requires_grad
    w_hh, bias_hn, _, w_hr = weights.cell
    second = first if bias_hn is None else bias_hn.requires_grad
    last = [] if w_hr is None else [w_hr.requires_grad]
    return [weights.w_ih.requires_grad, w_hh.requires_grad, first, second, *last]
