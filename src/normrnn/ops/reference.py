"""The naive loop, to be read beside the paper: the truth that the tests compare with.

Nothing here is fast. Every frame of every sequence is visited in turn, padding is left out by
*selecting* the sequences that still run at a time step, and gradients are plain autograd.

Shapes: T time, B batch, n rows of one time slice (sequences with a frame t), N all rows,
I input, H hidden, G gates (RNN 1, GRU 3, LSTM 4), D directions, L layers.
Parameters go by the names of the layers' state dict: ``weight_ih_l0``, ``norm_l0_reverse.bias``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

Cell = Literal["tanh", "relu", "lstm", "gru"]
Norm = Literal["sequence", "frame", "hidden"]
State = tuple[Tensor, Tensor]
Parameters = Mapping[str, Tensor]
Watch = Callable[[str, str, int, Tensor], None]
"""Called with layer and direction ("l0_reverse"), what it is, t, and its rows (n, features):
"sums" before the appendix's BN, "pre", what the non-linearities see, and "h", the states."""

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Settings:
    """What is computed; the numbers it is computed with are the parameters."""

    cell: Cell
    norm: Norm | None
    num_layers: int = 1
    bidirectional: bool = False
    batch_statistics: bool = True  # False: running statistics, as at test time
    eps: float = 1e-5
    momentum: float | None = 0.1


@dataclass(frozen=True)
class Result:
    """``output`` (T, B, D·H), 0 in the padding; ``h`` and ``c`` (L·D, B, H); ``buffers`` as one
    training step leaves them, by their names in the state dict."""

    output: Tensor
    h: Tensor
    c: Tensor
    buffers: dict[str, Tensor]


def stack(
    x: Tensor,
    lengths: Sequence[int],
    parameters: Parameters,
    settings: Settings,
    state: State | None = None,
    watch: Watch | None = None,
) -> Result:
    """Section 3: a stack of layers, each of one or two directions.

    ``x`` (T, B, I), ``lengths`` B numbers ≤ T, ``state`` h and c, each (L·D, B, H); c is used by
    the LSTM alone.

    >>> p = {"weight_ih_l0": torch.eye(2), "weight_hh_l0": torch.zeros(2, 2)}
    >>> stack(torch.ones(3, 1, 2), [2], p, Settings("relu", None)).output[:, 0].tolist()
    [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    """
    suffixes = ("", "_reverse") if settings.bidirectional else ("",)
    H = parameters["weight_hh_l0"].shape[1]
    if state is None:
        zeros = x.new_zeros(settings.num_layers * len(suffixes), x.shape[1], H)
        state = (zeros, zeros)
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    buffers: dict[str, Tensor] = {}
    for level in range(settings.num_layers):
        outputs: list[Tensor] = []
        for suffix in suffixes:
            own, updated = _of_direction(parameters, f"_l{level}{suffix}")
            start = (state[0][len(last_h)], state[1][len(last_h)])
            see = None if watch is None else partial(watch, f"l{level}{suffix}")
            output, (h, c) = direction(x, lengths, own, settings, suffix != "", start, updated, see)
            outputs.append(output)
            last_h.append(h)
            last_c.append(c)
            buffers |= {f"norm_l{level}{suffix}.{name}": b for name, b in updated.items()}
        x = torch.cat(outputs, dim=-1)  # h_t = [→h_t : ←h_t]
    return Result(x, torch.stack(last_h), torch.stack(last_c), buffers)


def direction(
    x: Tensor,
    lengths: Sequence[int],
    p: Parameters,
    settings: Settings,
    reverse: bool,
    state: State,
    updated: dict[str, Tensor],
    see: Callable[[str, int, Tensor], None] | None = None,
) -> tuple[Tensor, State]:
    """Section 3: one direction of one layer over (T, B, I); ``updated`` collects new buffers.

    The backward direction walks from T−1 down to 0; a sequence joins it at its own last frame, so
    that its final state is the one at frame 0, and its statistics belong to the frame's own t.
    """
    T, B, _ = x.shape
    running = [[b for b in range(B) if t < lengths[b]] for t in range(T)]  # the n rows of slice t
    if settings.batch_statistics and settings.norm is not None:
        _check_rows([len(rows) for rows in running], settings.norm)
    slices = [x[t, rows] @ p["weight_ih"].T for t, rows in enumerate(running)]  # W_x x_t: (n, G·H)
    if settings.norm == "sequence":
        slices = normalise_sequence(slices, p, settings, updated)
    elif settings.norm == "frame":
        slices = normalise_frames(slices, p, settings, updated)
    elif settings.norm is None and "bias_ih" in p:
        slices = [rows + p["bias_ih"] for rows in slices]

    h, c = state
    outputs = [x.new_zeros(B, h.shape[1]) for _ in range(T)]
    summed: dict[int, list[Tensor]] = {}  # what the appendix normalises, by time step
    for t in reversed(range(T)) if reverse else range(T):
        if not running[t]:
            continue
        rows = torch.tensor(running[t])
        new_h, new_c = step(slices[t], (h[rows], c[rows]), p, settings, t, summed, see)
        if see is not None:
            see("h", t, new_h)
        h, c = h.index_copy(0, rows, new_h), c.index_copy(0, rows, new_c)
        outputs[t] = outputs[t].index_copy(0, rows, new_h)
    if settings.norm == "hidden":
        _update_slots({t: torch.cat(s, dim=-1) for t, s in summed.items()}, p, settings, updated)
    return torch.stack(outputs), (h, c)


def step(
    wx: Tensor,
    state: State,
    p: Parameters,
    settings: Settings,
    t: int,
    summed: dict,
    see: Callable[[str, int, Tensor], None] | None = None,
) -> State:
    """One time step: ``wx`` (n, G·H) is W_x x_t, normalised already unless norm is "hidden"."""
    h, c = state
    wh = h @ p["weight_hh"].T
    if "bias_hh" in p:
        wh = wh + p["bias_hh"]

    def bn(rows: Tensor, first: int) -> Tensor:
        """The appendix's BN of features ``first``…; the identity for the other norms."""
        normalised = rows
        if settings.norm == "hidden":
            summed.setdefault(t, []).append(rows)
            own = _normaliser(p)
            for name in own.keys() - {"norm.num_batches_tracked"}:
                own[name] = own[name][..., first : first + rows.shape[1]]
            normalised = _normalise_slice(rows, t, own, settings)
        if see is not None:
            see("sums", t, rows)
        return normalised

    def seen(*pre: Tensor) -> tuple[Tensor, ...]:
        """What the non-linearities see."""
        if see is not None:
            see("pre", t, torch.cat(pre, dim=1))
        return pre

    if settings.cell == "lstm":
        return _lstm(bn(wx + wh, 0), c, p, seen)
    if settings.cell == "gru":
        H = h.shape[1]
        (gates,) = seen(bn(wx[:, : 2 * H] + wh[:, : 2 * H], 0))
        r, z = gates.sigmoid().chunk(2, dim=1)
        candidate = wh[:, 2 * H :]
        if "bias_hn" in p:
            candidate = candidate + p["bias_hn"]
        (candidate,) = seen(bn(wx[:, 2 * H :] + r * candidate, 2 * H))
        n = candidate.tanh()
        return (1 - z) * n + z * h, c
    phi = torch.tanh if settings.cell == "tanh" else torch.relu
    return phi(*seen(bn(wx + wh, 0))), c  # section 4: h_t = φ(W_h h_{t-1} + BN(W_x x_t))


def _lstm(sums: Tensor, c: Tensor, p: Parameters, seen: Callable[..., tuple[Tensor, ...]]) -> State:
    """Section 3.1; i and f see c_{t−1}, o sees c_t through diagonal peepholes where there are."""
    i, f, g, o = sums.chunk(4, dim=1)
    if "weight_ci" in p:
        i = i + p["weight_ci"] * c
    if "weight_cf" in p:
        f = f + p["weight_cf"] * c
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    if "weight_co" in p:
        o = o + p["weight_co"] * c
    seen(i, f, g, o)
    return o.sigmoid() * c.tanh(), c


def standardise(rows: Tensor, mean: Tensor, var: Tensor, p: Parameters, eps: float) -> Tensor:
    """Section 2: BN(x_k) = γ_k (x_k − mean_k) / √(σ²_k + ε) + β_k, on (n, features)."""
    out = (rows - mean) / torch.sqrt(var + eps)
    if "norm.weight" in p:
        out = out * p["norm.weight"]
    if "norm.bias" in p:
        out = out + p["norm.bias"]
    return out


def mean_and_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Section 2: sample mean and (biased) sample variance of each feature of (n, features)."""
    mean = rows.sum(0) / len(rows)
    return mean, ((rows - mean) ** 2).sum(0) / len(rows)


def normalise_sequence(
    slices: list[Tensor], p: Parameters, settings: Settings, updated: dict[str, Tensor]
) -> list[Tensor]:
    """Section 4.1, sequence-wise: one mean and variance over the N unpadded frames."""
    rows = torch.cat(slices)
    if settings.batch_statistics:
        mean, var = mean_and_variance(rows)
        _update_shared(rows, p, settings, updated)
    else:
        mean, var = p["norm.running_mean"], p["norm.running_var"]
    return [standardise(s, mean, var, p, settings.eps) for s in slices]


def normalise_frames(
    slices: list[Tensor], p: Parameters, settings: Settings, updated: dict[str, Tensor]
) -> list[Tensor]:
    """Section 4.1, frame-wise: a mean and variance for each time step."""
    if settings.batch_statistics:
        if _has_slots(p):
            _update_slots(dict(enumerate(slices)), p, settings, updated)
        else:
            _update_shared(torch.cat(slices), p, settings, updated)
    own = _normaliser(p)
    return [_normalise_slice(s, t, own, settings) for t, s in enumerate(slices)]


def _normalise_slice(rows: Tensor, t: int, p: Parameters, settings: Settings) -> Tensor:
    """Time slice t by its own statistics; by the running ones if asked to, or if it is one row."""
    if settings.batch_statistics and len(rows) > 1:
        mean, var = mean_and_variance(rows)
    elif _has_slots(p):
        slot = last_updated(t, p["norm.num_batches_tracked"].tolist())
        mean, var = p["norm.running_mean"][slot], p["norm.running_var"][slot]
    else:
        mean, var = p["norm.running_mean"], p["norm.running_var"]
    return standardise(rows, mean, var, p, settings.eps)


def last_updated(t: int, tracked: Sequence[int]) -> int:
    """The last slot ≤ min(t, K−1) that has ever been updated (the first one, if none has).

    >>> [last_updated(t, [3, 0, 2]) for t in range(5)]
    [0, 0, 2, 2, 2]
    """
    slots = [k for k in range(min(t, len(tracked) - 1) + 1) if tracked[k] > 0]
    return slots[-1] if slots else 0


def running_average(old: Tensor, new: Tensor, tracked: int, momentum: float | None) -> Tensor:
    """Section 2, test time; ``momentum`` is the weight of the new value, None the mean of all."""
    weight = 1 / (tracked + 1) if momentum is None else momentum
    return (1 - weight) * old + weight * new


def _update_shared(
    rows: Tensor, p: Parameters, settings: Settings, updated: dict[str, Tensor]
) -> None:
    """One update from mean and unbiased variance over all N rows, unless one is not finite."""
    if "norm.running_mean" not in p or not rows.isfinite().all():
        return
    mean, var = mean_and_variance(rows.detach())
    unbiased = var * len(rows) / (len(rows) - 1)
    tracked = int(p["norm.num_batches_tracked"])
    for name, new in (("running_mean", mean), ("running_var", unbiased)):
        updated[name] = running_average(p[f"norm.{name}"], new, tracked, settings.momentum)
    updated["num_batches_tracked"] = p["norm.num_batches_tracked"] + 1


def _update_slots(
    slices: dict[int, Tensor], p: Parameters, settings: Settings, updated: dict[str, Tensor]
) -> None:
    """The appendix: statistics of each time step t < K; a slice of one row updates nothing."""
    if not settings.batch_statistics or "norm.running_mean" not in p:
        return
    if not all(rows.isfinite().all() for rows in slices.values()):
        return
    updated |= {name: p[f"norm.{name}"].clone() for name in BUFFERS}
    for t, rows in slices.items():
        if t < len(updated["running_mean"]) and len(rows) > 1:
            mine: dict[str, Tensor] = {}
            slot = {f"norm.{name}": updated[name][t] for name in BUFFERS}
            _update_shared(rows, slot, settings, mine)
            for name, new in mine.items():
                updated[name][t] = new


def _check_rows(counts: list[int], norm: Norm) -> None:
    """A variance needs two rows: of the whole batch, or of one time slice at least."""
    if (sum(counts) if norm == "sequence" else max(counts)) < 2:
        raise ValueError(f"batch statistics of one row (norm={norm!r}, rows per step {counts})")


def _has_slots(p: Parameters) -> bool:
    return "norm.running_mean" in p and p["norm.num_batches_tracked"].ndim == 1


def _normaliser(p: Parameters) -> dict[str, Tensor]:
    return {name: q for name, q in p.items() if name.startswith("norm.")}


def _of_direction(parameters: Parameters, suffix: str) -> tuple[dict[str, Tensor], dict]:
    """The parameters whose names carry ``suffix``, without it, and its buffers before a step."""
    own: dict[str, Tensor] = {}
    for name, q in parameters.items():
        head, dot, tail = name.partition(".")
        if head.removesuffix(suffix) + suffix == head:
            own[head.removesuffix(suffix) + dot + tail] = q
    return own, {name: own[f"norm.{name}"] for name in BUFFERS if f"norm.{name}" in own}
