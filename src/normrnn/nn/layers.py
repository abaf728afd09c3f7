"""``RNN``, ``LSTM`` and ``GRU``: torch's layers with a normaliser in them."""

from typing import Literal, Unpack

import torch
from torch import nn

from normrnn.nn.base import Normalised
from normrnn.nn.options import Device, NormOptions, Options


class RNN(Normalised, nn.RNN):
    """h_t = φ(W_h h_{t−1} + BN(W_x x_t)); everything else as :class:`torch.nn.RNN`.

    The arguments on top of torch's own are those of :class:`LSTM`, without ``peephole`` and
    ``forget_bias``.

    >>> import torch
    >>> layer = RNN(8, 16, nonlinearity="relu", norm="hidden", time_steps=5)
    >>> output, h = layer(torch.randn(5, 4, 8))
    >>> output.shape, h.shape
    (torch.Size([5, 4, 16]), torch.Size([1, 4, 16]))
    """

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
        **norm_options: Unpack[NormOptions],
    ):
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(
                f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'."
            )
        Normalised.__init__(
            self,
            Options.of("RNN", f"RNN_{nonlinearity.upper()}", bias, norm_options),
            (input_size, hidden_size, num_layers),
            {"batch_first": batch_first, "dropout": dropout, "bidirectional": bidirectional},
            {"device": device, "dtype": dtype},
        )
        self.nonlinearity = nonlinearity


class LSTM(Normalised, nn.LSTM):
    """:class:`torch.nn.LSTM` with batch normalisation of its input-to-hidden transition.

    All of torch's arguments, inputs and outputs, and by keyword:

    Args:
        norm: ``"sequence"`` (default) normalises W_x x with one mean and variance per feature
            over all unpadded frames of the batch; ``"frame"`` with one per feature and time
            step; ``"hidden"`` normalises W_h h + W_x x at every step (the paper's appendix);
            ``"layer"`` is LN(W_x x; γ_x) + LN(W_h h; γ_h) + β, layer normalisation of every row
            by itself; ``"recurrent"`` is BN(W_h h; γ_h) + BN(W_x x; γ_x) + β by the rows of each
            step, and BN on c before tanh (Cooijmans et al. 2016); ``"whiten"`` is
            W_x Σ^{-1/2} (x − μ) + β over all rows; ``None`` is torch's layer.
        peephole: ``"output"`` (the paper's W_co) or ``"all"``; diagonal.
        forget_bias: what the forget gates' bias begins with, β's part or torch's two together;
            None: as the rest.
        eps, momentum, affine, track_running_stats: as in :class:`torch.nn.BatchNorm1d`.
        gamma: initial γ; None: the norm's own, 1, of ``"recurrent"`` 0.1.
        cell_norm: normalise c before tanh too (``"layer"``, ``"recurrent"``); None: the norm's
            own, False, of ``"recurrent"`` True.
        time_steps: keep test statistics for this many time steps (``"frame"``, ``"hidden"``,
            ``"recurrent"``).
        sync: pool the batch's statistics over ranks.
        process_group: of these ranks; None: the default one. A copy has the same group, what
            was pickled the default one.
        shrinkage: of the covariance towards its diagonal (``"whiten"``).
        weight_drop: share of W_h left out in training, one mask per call (DropConnect).
        dropout_kind: where ``dropout`` acts, ``"element"`` (torch's) or ``"locked"``, one mask
            per sequence.
        zoneout: shares of h and of c that stay as they were in a step; in training by masks, at
            test time the share itself.

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
        **norm_options: Unpack[NormOptions],
    ):
        Normalised.__init__(
            self,
            Options.of("LSTM", "LSTM", bias, norm_options),
            (input_size, hidden_size, num_layers),
            {
                "batch_first": batch_first,
                "dropout": dropout,
                "bidirectional": bidirectional,
                "proj_size": proj_size,
            },
            {"device": device, "dtype": dtype},
            peephole,
            forget_bias,
        )


class GRU(Normalised, nn.GRU):
    """:class:`torch.nn.GRU` with batch normalisation of its input-to-hidden transition.

    The candidate's recurrent bias, inside r ⊙ (W_h h + b), is not β's to replace: it stays, as
    ``bias_hn_l0``. The arguments on top of torch's own are those of :class:`LSTM`, without
    ``peephole`` and ``forget_bias``.

    >>> import torch
    >>> GRU(8, 16, norm="frame")(torch.randn(5, 3, 8))[0].shape
    torch.Size([5, 3, 16])
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
        device: Device = None,
        dtype: torch.dtype | None = None,
        **norm_options: Unpack[NormOptions],
    ):
        Normalised.__init__(
            self,
            Options.of("GRU", "GRU", bias, norm_options),
            (input_size, hidden_size, num_layers),
            {"batch_first": batch_first, "dropout": dropout, "bidirectional": bidirectional},
            {"device": device, "dtype": dtype},
        )
