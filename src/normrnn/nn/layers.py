"""``RNN``, ``LSTM`` and ``GRU``: torch's layers with a normaliser in them."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    overload,
)

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn.nn.base import Normalised
from normrnn.nn.options import DEFAULT_NORM, Device, NormName

Arguments = ParamSpec("Arguments")
Layer = TypeVar("Layer")
State = TypeVar("State")

if TYPE_CHECKING:  # the types of a call: padded in, padded out; packed in, packed out

    class _Typed(Normalised, Generic[State]):
        @overload
        def forward(
            self,
            input: Tensor,
            hx: State | None = None,
            lengths: Tensor | Sequence[int] | None = None,
            resets: Tensor | PackedSequence | None = None,
        ) -> tuple[Tensor, State]: ...
        @overload
        def forward(
            self,
            input: PackedSequence,
            hx: State | None = None,
            lengths: None = None,
            resets: Tensor | PackedSequence | None = None,
        ) -> tuple[PackedSequence, State]: ...
        def forward(self, *args: Any, **kwargs: Any) -> Any: ...
        @overload
        def __call__(
            self,
            input: Tensor,
            hx: State | None = None,
            lengths: Tensor | Sequence[int] | None = None,
            resets: Tensor | PackedSequence | None = None,
        ) -> tuple[Tensor, State]: ...
        @overload
        def __call__(
            self,
            input: PackedSequence,
            hx: State | None = None,
            lengths: None = None,
            resets: Tensor | PackedSequence | None = None,
        ) -> tuple[PackedSequence, State]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    _OneState = _Typed[Tensor]
    _TwoStates = _Typed[tuple[Tensor, Tensor]]
else:
    _OneState = _TwoStates = Normalised


def _without_proj_size(
    init: Callable[Concatenate[Layer, Arguments], None],
) -> Callable[Concatenate[Layer, Arguments], None]:
    """Refuse ``proj_size`` as torch's RNN and GRU do, with a ValueError."""

    @wraps(init)
    def checked(self: Layer, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if "proj_size" in kwargs:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        init(self, *args, **kwargs)

    return checked


class RNN(_OneState, nn.RNN):
    """:class:`torch.nn.RNN` with batch normalisation: h_t = φ(W_h h_{t−1} + BN(W_x x_t)).

    With the default, ``norm="sequence"``, outputs depend on *later* frames of the batch while
    training. For causal models choose ``"frame"``, ``"layer"`` or ``None``.

    The arguments on top of torch's own are those of :class:`LSTM`, without ``peephole`` and
    ``forget_bias``.

    >>> import torch
    >>> layer = RNN(8, 16, nonlinearity="relu", norm="hidden", time_steps=5)
    >>> output, h = layer(torch.randn(5, 4, 8))
    >>> output.shape, h.shape
    (torch.Size([5, 4, 16]), torch.Size([1, 4, 16]))
    """

    @_without_proj_size
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        norm: NormName = DEFAULT_NORM,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        gamma: float | None = None,
        cell_norm: bool | None = None,
        time_steps: int | None = None,
        sync: bool = False,
        process_group: Any = None,
        shrinkage: float = 0.0,
        weight_drop: float = 0.0,
        dropout_kind: Literal["element", "locked"] = "element",
        zoneout: tuple[float, float] = (0.0, 0.0),
    ):
        arguments = dict(locals())
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(
                f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'."
            )
        Normalised.__init__(self, f"RNN_{nonlinearity.upper()}", arguments)
        self.nonlinearity = nonlinearity

    if TYPE_CHECKING:

        def fold(self) -> nn.RNN: ...


class LSTM(_TwoStates, nn.LSTM):
    """:class:`torch.nn.LSTM` with batch normalisation of its input-to-hidden transition.

    With the default, ``norm="sequence"``, outputs depend on *later* frames of the batch while
    training. For causal models choose ``"frame"``, ``"layer"`` or ``None``.

    All of torch's arguments, inputs and outputs, and by keyword:

    Args:
        norm: ``"sequence"`` (default) normalises W_x x with one mean and variance per feature
            over all unpadded frames of the batch; ``"frame"`` with one per feature and time
            step; ``"hidden"`` normalises W_h h + W_x x at every step (the paper's appendix);
            ``"layer"`` is LN(W_x x; γ_x) + LN(W_h h; γ_h) + β, layer normalisation of every row
            by itself; ``"recurrent"`` is BN(W_h h; γ_h) + BN(W_x x; γ_x) + β by the rows of each
            step, and BN on c before tanh (Cooijmans et al. 2016); ``"whiten"`` is
            W_x Σ^{-1/2} (x − μ) + β over all rows; ``None`` or ``"none"`` is torch's layer.
            ``"layer"`` with ``input_size=1`` keeps only the sign of the input.
        peephole: ``"output"`` (the paper's W_co) or ``"all"``; diagonal.
        forget_bias: initial bias of the forget gates, in β or in torch's two together; None: as
            the other gates.
        eps, momentum, affine, track_running_stats: as in :class:`torch.nn.BatchNorm1d`.
        gamma: initial γ; None: 1, with ``"recurrent"`` 0.1.
        cell_norm: normalise c before tanh too (``"layer"``, ``"recurrent"``); None: False, with
            ``"recurrent"`` True.
        time_steps: keep test statistics for this many time steps (``"frame"``, ``"hidden"``,
            ``"recurrent"``).
        sync: pool the batch's statistics over ranks.
        process_group: of these ranks; None: the default one. A copy has the same group, a pickle
            the default one.
        shrinkage: of the covariance towards its diagonal (``"whiten"``).
        weight_drop: share of W_h left out in training, one mask per call (DropConnect).
        dropout_kind: of ``dropout`` between layers: ``"element"`` (torch's) or ``"locked"``, one
            mask per sequence.
        zoneout: shares of h and of c that a step keeps; by masks in training, at test time by
            the share itself.

    >>> import torch
    >>> layer = LSTM(8, 16, num_layers=2, bidirectional=True)
    >>> output, (h, c) = layer(torch.randn(5, 3, 8), lengths=[5, 2, 4])
    >>> output.shape, h.shape
    (torch.Size([5, 3, 32]), torch.Size([4, 3, 16]))
    >>> layer.eval().fold()
    LSTM(8, 16, num_layers=2, bidirectional=True)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        peephole: Literal["output", "all"] | None = None,
        forget_bias: float | None = None,
        norm: NormName = DEFAULT_NORM,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        gamma: float | None = None,
        cell_norm: bool | None = None,
        time_steps: int | None = None,
        sync: bool = False,
        process_group: Any = None,
        shrinkage: float = 0.0,
        weight_drop: float = 0.0,
        dropout_kind: Literal["element", "locked"] = "element",
        zoneout: tuple[float, float] = (0.0, 0.0),
    ):
        Normalised.__init__(self, "LSTM", locals())

    if TYPE_CHECKING:

        def fold(self) -> nn.LSTM: ...


class GRU(_OneState, nn.GRU):
    """:class:`torch.nn.GRU` with batch normalisation of its input-to-hidden transition.

    With the default, ``norm="sequence"``, outputs depend on *later* frames of the batch while
    training. For causal models choose ``"frame"``, ``"layer"`` or ``None``.

    β does not replace the candidate's recurrent bias, inside r ⊙ (W_h h + b), which is
    ``bias_hn_l0``. The arguments on top of torch's own are those of :class:`LSTM`, without
    ``peephole`` and ``forget_bias``.

    >>> import torch
    >>> GRU(8, 16, norm="frame")(torch.randn(5, 3, 8))[0].shape
    torch.Size([5, 3, 16])
    """

    @_without_proj_size
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        norm: NormName = DEFAULT_NORM,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        gamma: float | None = None,
        cell_norm: bool | None = None,
        time_steps: int | None = None,
        sync: bool = False,
        process_group: Any = None,
        shrinkage: float = 0.0,
        weight_drop: float = 0.0,
        dropout_kind: Literal["element", "locked"] = "element",
        zoneout: tuple[float, float] = (0.0, 0.0),
    ):
        Normalised.__init__(self, "GRU", locals())

    if TYPE_CHECKING:

        def fold(self) -> nn.GRU: ...
