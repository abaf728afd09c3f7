"""What ``RNN``, ``LSTM`` and ``GRU`` share: construction, the door, the choice of a path.

They subclass torch's own, so that a model that asks ``isinstance(m, nn.LSTM)``, reads
``m.hidden_size`` or calls ``m.flatten_parameters()`` keeps working, and so that ``norm=None`` is
torch's layer. The choice between torch's fused kernels and the recurrence of
:mod:`normrnn.ops` is made here, per call, by :meth:`Normalised._path`.
"""

import sys
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.nn import door, stack
from normrnn.nn.normaliser import Normaliser
from normrnn.ops.cells import Peephole
from normrnn.ops.direction import State, Weights, flat
from normrnn.ops.fold import Flat
from normrnn.ops.steps import Steps

Norm = Literal["sequence", "frame", "hidden"] | None
NORMS: tuple[Norm, ...] = ("sequence", "frame", "hidden", None)
Device = torch.device | str | int | None
PEEPHOLES = {None: "", "output": "o", "all": "ifo"}


class NormOptions(TypedDict, total=False):
    """The keyword arguments that come on top of torch's; see :class:`LSTM`."""

    norm: Norm
    eps: float
    momentum: float | None
    affine: bool
    track_running_stats: bool
    gamma: float
    time_steps: int | None
    sync: bool


class Normalised(nn.RNNBase):
    """What the three layers share: construction, the door, and the choice of a path."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor

    def __init__(
        self,
        mode: str,
        sizes: tuple[int, int, int],
        torch_options: dict[str, Any],
        factory: dict[str, Any],
        peephole: Literal["output", "all"] | None = None,
        /,
        *,
        bias: bool,
        norm: Norm = "sequence",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        gamma: float = 1.0,
        time_steps: int | None = None,
        sync: bool = False,
    ):
        _check_norm(norm, time_steps, sync, torch_options.get("proj_size", 0))
        if peephole not in PEEPHOLES:
            raise ValueError(f"unknown peephole={peephole!r}: choose None, 'output' or 'all'")
        if peephole is not None and torch_options.get("proj_size", 0) > 0:
            raise ValueError(f"peephole={peephole!r} does not work with proj_size: leave one out")
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        if momentum is not None and not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be None or between 0 and 1, got {momentum}")
        if not isinstance(bias, bool):
            raise TypeError(f"bias should be of type bool, got: {type(bias).__name__}")
        # β is the bias of a normalised layer, so torch makes none.
        torch_bias = bias and norm is None
        nn.RNNBase.__init__(self, mode, *sizes, bias=torch_bias, **torch_options, **factory)
        self.norm, self.peephole, self.bias, self.time_steps = norm, peephole, bias, time_steps
        for suffix in self._suffixes:
            if norm is not None:
                normaliser = Normaliser(
                    self.weight_hh_l0.shape[0],
                    per_step=norm != "sequence",
                    eps=eps,
                    momentum=momentum,
                    affine=affine,
                    bias=bias,
                    track_running_stats=track_running_stats,
                    gamma=gamma,
                    time_steps=time_steps,
                    sync=sync,
                    **factory,
                )
                self.add_module(f"norm_{suffix}", normaliser)
            names = [f"weight_c{gate}" for gate in PEEPHOLES[peephole]]
            if mode == "GRU" and norm is not None and bias:
                names.append("bias_hn")
            for name in names:
                vector = nn.Parameter(torch.empty(self.hidden_size, **factory))
                self.register_parameter(f"{name}_{suffix}", vector)
                self._draw(vector)

    @property
    def _suffixes(self) -> list[str]:
        ends = ("", "_reverse") if self.bidirectional else ("",)
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

    def flatten_parameters(self) -> None:
        """As in torch; with a normaliser there is nothing to flatten."""
        if getattr(self, "norm", None) is None:
            super().flatten_parameters()

    def extra_repr(self) -> str:
        peephole = "" if self.peephole is None else f", peephole={self.peephole!r}"
        return f"{super().extra_repr()}, norm={self.norm!r}{peephole}"

    def normaliser(self, k: int) -> Normaliser | None:
        """Of the k-th layer and direction in torch's order; None with ``norm=None``."""
        return getattr(self, f"norm_{self._suffixes[k]}", None)

    def normalisers(self) -> list[Normaliser]:
        """One per layer and direction; empty with ``norm=None``."""
        return [m for m in self.children() if isinstance(m, Normaliser)]

    def is_reverse(self, k: int) -> bool:
        return self.bidirectional and k % 2 == 1

    def weights(self, k: int) -> Weights:
        """Of the k-th layer and direction in torch's order."""

        def find(name: str) -> Any:
            return getattr(self, f"{name}_{self._suffixes[k]}", None)

        names = "weight_ih", "weight_hh", "bias_ih", "bias_hh", "bias_hn"
        peephole = Peephole(*(find(f"weight_c{gate}") for gate in "ifo"))
        w_ih, w_hh, b_ih, b_hh, bias_hn = map(find, names)
        return Weights(w_ih, w_hh, b_ih, b_hh, bias_hn, peephole)

    def folded_weights(self) -> list[Flat]:
        """Plain weights of the same eval output, per layer and direction."""
        flats = []
        for k, normaliser in enumerate(self.normalisers()):
            weights = self.weights(k)
            flats.append(flat(self.mode, weights, *normaliser.folded(weights.w_ih)))
        return flats

    def check_foldable(self, name: str) -> None:
        """ValueError with the reason if no plain torch layer has the same eval output."""
        reason = None
        if self.peephole is not None:
            reason = f"peephole={self.peephole!r}: torch's layers have no peepholes"
        elif self.norm == "hidden":
            reason = "norm='hidden' normalises inside the recurrence"
        elif self.norm is not None and self.time_steps is not None:
            reason = f"its statistics differ over {self.time_steps} time steps"
        elif self.norm is not None and self.normalisers()[0].running_mean is None:
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
        like = self.weight_hh_l0
        new = plain(
            **options,
            bias=self.bias or self.norm is not None,
            dropout=self.dropout,
            device=like.device,
            dtype=like.dtype,
        )
        if self.norm is None:
            plain_weights = [[getattr(self, name) for name in names] for names in new._all_weights]
            trained = [[value.requires_grad for value in values] for values in plain_weights]
        else:
            plain_weights = self.folded_weights()
            trained = [self._trained(k) for k in range(len(plain_weights))]
        for names, *found in zip(new._all_weights, plain_weights, trained, strict=True):
            for name, value, train in zip(names, *found, strict=True):
                getattr(new, name).copy_(value).requires_grad_(train)
        return new.train(self.training)

    def _trained(self, k: int) -> list[bool]:
        """Whether W_x, W_h and the biases of a folded layer would be trained on."""
        weights, bias = self.weights(k), self.normalisers()[k].bias
        first = bias is None or bias.requires_grad
        second = first if weights.bias_hn is None else weights.bias_hn.requires_grad
        return [weights.w_ih.requires_grad, weights.w_hh.requires_grad, first, second]

    @torch.no_grad()
    def take_weights(self, plain: nn.RNNBase) -> None:
        """The weights of a plain torch layer, and normalisers that leave its function alone."""
        for k, (suffix, normaliser) in enumerate(
            zip(self._suffixes, self.normalisers(), strict=True)
        ):
            for name in ("weight_ih", "weight_hh"):
                value = getattr(plain, f"{name}_{suffix}")
                getattr(self, f"{name}_{suffix}").copy_(value).requires_grad_(value.requires_grad)
            if plain.bias:
                b_ih, b_hh = (getattr(plain, f"{name}_{suffix}") for name in ("bias_ih", "bias_hh"))
                trained = b_ih.requires_grad or b_hh.requires_grad
            else:
                b_ih = b_hh = self.weight_hh_l0.new_zeros(self.weight_hh_l0.shape[0])
                trained = True
            bias_hn = self.weights(k).bias_hn
            if bias_hn is not None:
                bias_hn.copy_(b_hh[-self.hidden_size :]).requires_grad_(trained)
                b_hh = torch.cat([b_hh[: -self.hidden_size], torch.zeros_like(bias_hn)])
            normaliser.start_neutral(b_ih + b_hh)
            assert normaliser.weight is not None
            assert normaliser.bias is not None
            normaliser.weight.requires_grad_(self.weights(k).w_ih.requires_grad)
            normaliser.bias.requires_grad_(trained)

    def forward(
        self, input: Any, hx: Any = None, lengths: Tensor | Sequence[int] | None = None
    ) -> Any:
        """Runs the layer.

        Args:
            input: (T, B, I), or (B, T, I) with ``batch_first``; (T, I) unbatched; or packed.
            hx: initial state as torch takes it, (layers × directions, B, H) each; zeros if None.
            lengths: of each sequence, for a padded ``input``; padding is never looked at.

        Returns:
            What torch's layer returns for such an input. Padded output has 0 in the padding.
        """
        if "torch._dynamo" in sys.modules:  # else nobody compiles
            from normrnn.nn.uncompiled import run

            return run(self, input, hx, lengths)
        return self.run(input, hx, lengths)

    def run(self, input: Any, hx: Any, lengths: Tensor | Sequence[int] | None) -> Any:
        """``forward``, out of sight of torch.compile: a loop over time is never traced."""
        if lengths is not None:
            packed = door.pack(input, lengths, self.batch_first)
            time = input.shape[1 if self.batch_first else 0]
            if packed.data.shape[0] == input.shape[0] * input.shape[1]:
                return self.run(input, hx, None)
            output, final = self.run(packed, hx, None)
            return door.unpack(output, self.batch_first, time), final
        path = self._path(input)
        if path == "torch":
            return super().forward(input, hx)  # type: ignore[call-arg]
        if isinstance(input, PackedSequence):
            return self._packed(input, hx, path)
        return self._tensor(input, hx, path)

    def _path(self, input: Tensor | PackedSequence) -> str:
        """The fastest right way: torch's layer, its kernel with folded weights, or our own.

        On a CPU torch leaves its fused kernel for packed input, and then takes time that grows
        with T²; and our recurrence beats folding in training. Elsewhere the fused kernel wins.
        """
        packed = isinstance(input, PackedSequence)
        on_cpu = (input.data if packed else input).device.type == "cpu"
        # torch's CPU LSTM has no bfloat16 kernel on most machines and fails under autocast.
        autocast = on_cpu and torch.is_autocast_enabled("cpu")
        if self.norm is None:
            slow = on_cpu and (packed or autocast) and self.proj_size == 0
            return "own" if slow or self.peephole is not None else "torch"
        if self.norm == "hidden" or self.peephole is not None or (on_cpu and packed) or autocast:
            return "own"
        normalisers = self.normalisers()
        if any(n.is_collecting for n in normalisers):
            return "own"
        by_batch = [n.uses_batch for n in normalisers]  # frozen ones may stand among others
        if not any(by_batch):
            return "own" if self.time_steps is not None else "folded"
        foldable = self.norm == "sequence" and not normalisers[0].sync and all(by_batch)
        return "folded" if foldable and not on_cpu else "own"

    def _packed(self, input: PackedSequence, hx: Any, path: str) -> Any:
        data, batch_sizes, sorted_indices, unsorted_indices = input
        state = self._initial(data, int(batch_sizes[0]), hx)
        self.check_forward_args(data, self._as_torch(state), batch_sizes)
        if hx is not None and sorted_indices is not None:
            state = tuple(s.index_select(1, sorted_indices) for s in state)
        steps = Steps.packed(batch_sizes)
        output, final = stack.run(self, data, steps, state, batch_sizes, path, hx is None)
        if unsorted_indices is not None:
            final = tuple(s.index_select(1, unsorted_indices) for s in final)
        packed = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
        return packed, self._as_torch(final)

    def _tensor(self, input: Tensor, hx: Any, path: str) -> Any:
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead"
            )
        batched, axis = input.dim() == 3, 0 if self.batch_first else 1
        x = input if batched else input.unsqueeze(axis)
        state = self._initial(x, x.shape[axis], hx, batched)
        self.check_forward_args(x, self._as_torch(state), None)
        x = x.transpose(0, 1) if self.batch_first else x
        T, B, _ = x.shape
        if T == 0:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        if B == 0:
            if any(n.uses_batch for n in self.normalisers()):
                raise ValueError("batch statistics need at least one sequence, got a batch of 0")
            width = self.hidden_size * (2 if self.bidirectional else 1)
            output, final = x.new_zeros(T, 0, width), state
        else:
            rows = x.reshape(T * B, -1)
            output, final = stack.run(self, rows, Steps.dense(T, B), state, None, path, hx is None)
            output = output.view(T, B, -1)
        if self.batch_first:
            output = output.transpose(0, 1)
        if not batched:
            output, final = output.squeeze(axis), tuple(s.squeeze(1) for s in final)
        return output, self._as_torch(final)

    def _initial(self, data: Tensor, batch: int, hx: Any, batched: bool = True) -> State:
        """The initial state, (layers × directions, B, H) each."""
        names = ("h_0", "c_0") if self.mode == "LSTM" else ("h_0",)
        if hx is None:
            layers = self.num_layers * (2 if self.bidirectional else 1)
            zeros = data.new_zeros(layers, batch, self.hidden_size, dtype=self.weight_hh_l0.dtype)
            return (zeros,) * len(names)
        state = tuple(hx) if self.mode == "LSTM" else (hx,)
        if len(state) != len(names) or not all(isinstance(s, Tensor) for s in state):
            raise ValueError(f"hx must be the pair (h_0, c_0) of tensors, got {len(state)} parts")
        dims = 3 if batched else 2
        for name, s in zip(names, state, strict=True):
            if s.dim() != dims:
                kind = "batched 3-D" if batched else "unbatched 2-D"
                raise RuntimeError(
                    f"For {kind} input, hx should also be {dims}-D but got {name} of {s.dim()}-D"
                )
        return state if batched else tuple(s.unsqueeze(1) for s in state)

    def _as_torch(self, state: State) -> Any:
        return state if self.mode == "LSTM" else state[0]


def _check_norm(norm: Any, time_steps: Any, sync: bool, proj_size: int) -> None:
    if norm not in NORMS:
        choices = ", ".join(repr(choice) for choice in NORMS)
        raise ValueError(f"unknown norm={norm!r}: choose one of {choices}")
    if norm is not None and proj_size > 0:
        raise ValueError(f"proj_size={proj_size} works only with norm=None, got norm={norm!r}")
    if norm == "hidden" and time_steps is None:
        raise ValueError(
            "norm='hidden' keeps statistics for every time step: give time_steps=, "
            "the length of the sequences"
        )
    if norm == "hidden" and sync:
        raise ValueError("sync=True does not work with norm='hidden': use 'sequence' or 'frame'")
    if norm == "sequence" and time_steps is not None:
        raise ValueError(
            f"time_steps={time_steps} has no meaning with norm='sequence', whose statistics are "
            "shared over time: use norm='frame' or 'hidden', or leave it out"
        )
    count = isinstance(time_steps, int) and not isinstance(time_steps, bool) and time_steps > 0
    if time_steps is not None and not count:
        raise ValueError(f"time_steps must be a positive integer, got {time_steps!r}")
