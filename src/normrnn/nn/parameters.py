"""A layer as parameters: how it is made, what it is called, and folded into torch's own."""

from typing import Any

import torch
from torch import Tensor, nn

from normrnn import norms
from normrnn.nn.batch import Normaliser
from normrnn.nn.normaliser import GateNorm
from normrnn.nn.options import Norm, Options
from normrnn.ops.call import Cell, Peephole
from normrnn.ops.fold import Weights

PEEPHOLES = {None: "", "output": "o", "all": "ifo"}


class Parameters(nn.RNNBase):
    """Torch's layer with a normaliser per layer and direction instead of biases, and peepholes.

    A subclass of torch's own, so that a model that asks ``isinstance(m, nn.LSTM)``, reads
    ``m.hidden_size`` or calls ``m.flatten_parameters()`` keeps working.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    one_bias = False

    def __init__(
        self,
        options: Options,
        sizes: tuple[int, int, int],
        torch_options: dict[str, Any],
        factory: dict[str, Any],
        peephole: str | None = None,
    ):
        row, proj_size = options.row, torch_options.get("proj_size", 0)
        if row.normalises and proj_size > 0:
            raise ValueError(
                f"proj_size={proj_size} works only with norm=None, got norm={options.norm!r}"
            )
        if peephole not in PEEPHOLES:
            raise ValueError(f"unknown peephole={peephole!r}: choose None, 'output' or 'all'")
        if peephole is not None and proj_size > 0:
            raise ValueError(f"peephole={peephole!r} does not work with proj_size: leave one out")
        # β is the bias of a normalised layer, so torch makes none.
        torch_bias = options.bias and not row.normalises
        mode = options.mode
        nn.RNNBase.__init__(self, mode, *sizes, bias=torch_bias, **torch_options, **factory)
        self.norm: Norm = options.norm
        self.peephole, self.bias, self.time_steps = peephole, options.bias, options.time_steps
        for suffix in self._suffixes:
            channels = self.weight_hh_l0.shape[0]
            normaliser = options.normaliser(channels, self.hidden_size, factory)
            if normaliser is not None:
                self.add_module(f"norm_{suffix}", normaliser)
            names = [f"weight_c{gate}" for gate in PEEPHOLES[peephole]]
            if mode == "GRU" and normaliser is not None and options.bias:
                names.append("bias_hn")
            for name in names:
                vector = nn.Parameter(torch.empty(self.hidden_size, **factory))
                self.register_parameter(f"{name}_{suffix}", vector)
                self._draw(vector)

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.one_bias:
            self._mask_gradients()

    def flatten_parameters(self) -> None:
        """As in torch; with a normaliser there is nothing to flatten."""
        if getattr(self, "norm", None) is None:
            super().flatten_parameters()

    def extra_repr(self) -> str:
        peephole = "" if self.peephole is None else f", peephole={self.peephole!r}"
        return f"{super().extra_repr()}, norm={self.norm!r}{peephole}"

    def normalisers(self) -> list[GateNorm]:
        """One per layer and direction; empty with ``norm=None``."""
        return [m for m in self.children() if isinstance(m, GateNorm)]

    def weights(self) -> list[Weights]:
        """Per layer and direction in torch's order."""
        return [self._weights(suffix) for suffix in self._suffixes]

    def _weights(self, suffix: str) -> Weights:
        def find(name: str) -> Any:
            return getattr(self, f"{name}_{suffix}", None)

        names = "weight_ih", "weight_hh", "bias_ih", "bias_hh", "bias_hn"
        w_ih, w_hh, b_ih, b_hh, bias_hn = map(find, names)
        if b_hh is not None and self.mode == "GRU":  # that inside r ⊙ (…) is the recurrence's
            bias_hn = b_hh[-self.hidden_size :]
            b_hh = torch.cat([b_hh[: -self.hidden_size], torch.zeros_like(bias_hn)])
        peephole = Peephole(*(find(f"weight_c{gate}") for gate in "ifo"))
        bias = None if b_ih is None else b_ih + b_hh
        return Weights(w_ih, Cell(w_hh, bias_hn, peephole), bias)

    def check_foldable(self, name: str) -> None:
        """ValueError with the reason if no plain torch layer has the same eval output."""
        row, reason = norms.of(self.norm), None
        if self.peephole is not None:
            reason = f"peephole={self.peephole!r}: torch's layers have no peepholes"
        elif row.unfoldable:
            reason = f"norm={self.norm!r} {row.unfoldable}"
        elif row.keeps_statistics and self.time_steps is not None:
            where = "inside the recurrence" if row.acts == "step" else "its input"
            reason = (
                f"norm={self.norm!r} normalises {where} with statistics that differ over "
                f"{self.time_steps} time steps"
            )
        elif row.keeps_statistics and not dict(self.named_buffers()):
            reason = "it has no running statistics (track_running_stats=False)"
        if reason is not None:
            raise ValueError(f"{name} cannot be folded into a plain torch layer: {reason}")

    @torch.no_grad()
    def fold(self) -> nn.RNNBase:
        """A plain ``torch.nn`` layer of the same eval output; this one is unchanged."""
        self.check_foldable(type(self).__name__)
        plain = next(base for base in type(self).__mro__ if base.__module__ == nn.RNN.__module__)
        names = "input_size", "hidden_size", "num_layers", "batch_first", "bidirectional"
        options = {name: getattr(self, name) for name in names}
        options |= {"nonlinearity": self.nonlinearity} if isinstance(self, nn.RNN) else {}
        options |= {"proj_size": self.proj_size} if self.proj_size else {}
        like, normalisers = self.weight_hh_l0, self.normalisers()
        new = plain(
            **options,
            bias=self.bias or bool(normalisers),
            dropout=self.dropout,
            device=like.device,
            dtype=like.dtype,
        )
        if normalisers:
            pairs = list(zip(self.weights(), normalisers, strict=True))
            values = [n.folded(weights).flat() for weights, n in pairs]
            trained = [_trained(weights, n) for weights, n in pairs]
        else:
            values = [[getattr(self, name) for name in names] for names in new._all_weights]
            trained = [[value.requires_grad for value in some] for some in values]
        for names, *found in zip(new._all_weights, values, trained, strict=True):
            for name, value, train in zip(names, *found, strict=True):
                getattr(new, name).copy_(value).requires_grad_(train)
        return new.train(self.training)

    @torch.no_grad()
    def take_weights(self, plain: nn.RNNBase) -> None:
        """The weights of a plain torch layer, and normalisers that leave its function alone."""
        for suffix, normaliser in zip(self._suffixes, self.normalisers(), strict=True):
            assert isinstance(normaliser, Normaliser)
            for name in ("weight_ih", "weight_hh"):
                value = getattr(plain, f"{name}_{suffix}")
                getattr(self, f"{name}_{suffix}").copy_(value).requires_grad_(value.requires_grad)
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
            normaliser.start_neutral(b_ih + b_hh)
            assert normaliser.weight is not None
            assert normaliser.bias is not None
            normaliser.weight.requires_grad_(getattr(self, f"weight_ih_{suffix}").requires_grad)
            normaliser.bias.requires_grad_(trained)


def _trained(weights: Weights, normaliser: GateNorm) -> list[bool]:
    """Whether W_x, W_h and the biases of a folded layer would be trained on."""
    first = normaliser.bias is None or normaliser.bias.requires_grad
    bias_hn = weights.cell.bias_hn
    second = first if bias_hn is None else bias_hn.requires_grad
    return [weights.w_ih.requires_grad, weights.cell.w_hh.requires_grad, first, second]
