"""``RNNCell``, ``LSTMCell`` and ``GRUCell``: one step of a layer, normalised row by row."""

from typing import Any

import torch
from torch import Tensor, nn

from normrnn.nn import stack, tracing
from normrnn.nn.normaliser import GateNorm
from normrnn.nn.options import Device, NormName, Options
from normrnn.ops.call import CELLS, Weights
from normrnn.ops.layout import Steps, Traced


class NormalisedCell(nn.RNNCellBase):
    """The base class of the cells: torch's cell with a normaliser, ``norm``, instead of biases."""

    norm: GateNorm | None
    bias_hn: Tensor | None
    directions, weight_drop, zoneout = 1, 0.0, ()

    def __init__(
        self, options: Options, sizes: tuple[int, int], factory: dict[str, Any], layer: str
    ):
        row = options.row
        if row.keeps_statistics:
            raise ValueError(
                f"norm={options.norm!r} takes statistics over a sequence, and a cell sees one "
                f"step: use normrnn.{layer}, or norm='layer', 'rms' or None"
            )
        bias = options.bias and not row.normalises  # else β is the bias
        gates = CELLS[options.mode].gates
        nn.RNNCellBase.__init__(self, *sizes, bias, gates, **factory)
        self.mode, self.bias = options.mode, options.bias
        self.norm = options.normaliser((gates * sizes[1], sizes[1], sizes[0]), factory)
        inside = options.mode == "GRU" and row.normalises and options.bias
        vector = nn.Parameter(torch.empty(sizes[1], **factory)) if inside else None
        self.register_parameter("bias_hn", vector)
        if vector is not None:
            self._draw(vector)

    def _draw(self, parameter: Tensor) -> None:
        bound = self.hidden_size**-0.5 if self.hidden_size > 0 else 0
        nn.init.uniform_(parameter, -bound, bound)

    def reset_parameters(self) -> None:
        """Draw weights as torch does; reset γ to its initial value and β to 0."""
        for _, parameter in self.named_parameters(recurse=False):
            self._draw(parameter)
        for normaliser in self.children():
            if isinstance(normaliser, GateNorm):
                normaliser.reset_parameters()

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Run one step of (B, I) or (I,) from the state ``hx``; returns what torch's cell does."""
        if isinstance(input, torch.fx.Proxy):
            return tracing.leaf(self, input, hx)
        if self.norm is None:
            return super().forward(input, hx)
        name, is_pair = type(self).__name__, self.mode == "LSTM"
        state = None if hx is None else tuple(hx) if is_pair else (hx,)
        tensors = {"input": input, **{f"hx[{k}]": s for k, s in enumerate(state or ())}}
        for what, value in tensors.items():
            if value.dim() not in (1, 2):
                raise ValueError(
                    f"{name}: Expected {what} to be 1D or 2D, got {value.dim()}D instead"
                )
        batched = input.dim() == 2
        rows = input if batched else input.unsqueeze(0)
        if state is not None:
            state = tuple(s if batched else s.unsqueeze(0) for s in state)
        final = tuple(s if batched else s[0] for s in self._step(self.norm, rows, state))
        return final if is_pair else final[0]

    def _step(self, norm: GateNorm, rows: Tensor, state: Any) -> Any:
        weights = Weights(self.weight_ih, self.weight_hh, self.bias_hn)
        if torch.jit.is_tracing():
            tracing.refuse_torchscript(self)
        if state is not None:
            state = tuple(s.unsqueeze(0) for s in state)
        self._check(rows, state)
        B = rows.shape[0]
        is_exporting = torch.compiler.is_exporting()
        steps = Traced(1, B, B, is_scanned=True) if is_exporting else Steps.dense(1, B)
        parts = stack.Parts([weights], [norm], [norm.resolve(steps)])
        _, final = stack.run(self, stack.Batch(rows, steps, state), parts)
        return tuple(s[0] for s in final)

    def _check(self, rows: Tensor, state: Any) -> None:
        wanted = {"input": (rows, (rows.shape[0], self.input_size))}
        size = 1, rows.shape[0], self.hidden_size
        wanted |= {f"hx[{k}]": (s, size) for k, s in enumerate(state or ())}
        for what, (value, shape) in wanted.items():
            if value.shape != shape:
                raise RuntimeError(
                    f"{type(self).__name__}: {what} should have the sizes {shape[-2:]}, "
                    f"got {tuple(value.shape[-2:])}"
                )
            kind = value.device.type
            autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
            if value.dtype != self.weight_hh.dtype and not autocast:
                raise RuntimeError(
                    f"{type(self).__name__}: {what} should be {self.weight_hh.dtype} as the "
                    f"weights are, got {value.dtype}"
                )

    def extra_repr(self) -> str:
        return super().extra_repr() + (", norm=None" if self.norm is None else "")

    def __prepare_scriptable__(self) -> Any:
        tracing.refuse_torchscript(self)


class RNNCell(NormalisedCell, nn.RNNCell):
    """:class:`torch.nn.RNNCell`, layer-normalised as :class:`normrnn.RNN` with ``norm="layer"``.

    ``norm`` is ``"layer"``, ``"rms"`` or None; the others take statistics over a sequence.

    >>> import torch
    >>> RNNCell(3, 4)(torch.randn(2, 3)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        norm: NormName = "layer",
        eps: float = 1e-5,
        affine: bool = True,
        gamma: float | None = None,
    ):
        if nonlinearity not in ("tanh", "relu"):
            raise RuntimeError(f"Unknown nonlinearity: {nonlinearity}")
        options = Options(
            f"RNN_{nonlinearity.upper()}", bool(bias), norm, eps, affine=affine, gamma=gamma
        )
        factory = {"device": device, "dtype": dtype}
        NormalisedCell.__init__(self, options, (input_size, hidden_size), factory, "RNN")
        self.nonlinearity = nonlinearity


class LSTMCell(NormalisedCell, nn.LSTMCell):
    """:class:`torch.nn.LSTMCell`, layer-normalised as :class:`normrnn.LSTM` with ``norm="layer"``.

    ``norm`` is ``"layer"``, ``"rms"`` or None; the others take statistics over a sequence.
    ``cell_norm`` normalises c before tanh too.

    >>> import torch
    >>> h, c = LSTMCell(3, 4)(torch.randn(2, 3))
    >>> h.shape, c.shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        norm: NormName = "layer",
        eps: float = 1e-5,
        affine: bool = True,
        gamma: float | None = None,
        cell_norm: bool | None = None,
    ):
        options = Options(
            "LSTM", bool(bias), norm, eps, affine=affine, gamma=gamma, cell_norm=cell_norm
        )
        factory = {"device": device, "dtype": dtype}
        NormalisedCell.__init__(self, options, (input_size, hidden_size), factory, "LSTM")


class GRUCell(NormalisedCell, nn.GRUCell):
    """:class:`torch.nn.GRUCell`, layer-normalised as :class:`normrnn.GRU` with ``norm="layer"``.

    ``norm`` is ``"layer"``, ``"rms"`` or None; the others take statistics over a sequence. The
    candidate's recurrent bias is ``bias_hn``.

    >>> import torch
    >>> GRUCell(3, 4)(torch.randn(3)).shape
    torch.Size([4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        norm: NormName = "layer",
        eps: float = 1e-5,
        affine: bool = True,
        gamma: float | None = None,
    ):
        options = Options("GRU", bool(bias), norm, eps, affine=affine, gamma=gamma)
        factory = {"device": device, "dtype": dtype}
        NormalisedCell.__init__(self, options, (input_size, hidden_size), factory, "GRU")
