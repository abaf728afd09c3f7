"""The naive loop, to be read beside the paper: the truth that the tests compare with.

Nothing here is fast. Every frame of every sequence is visited in turn, padding is left out by
*selecting* the sequences that still run at a time step, and gradients are plain autograd.

Shapes: T time, B batch, n rows of one time slice (sequences with a frame t), N all rows,
I input, H hidden, G gates (RNN 1, GRU 3, LSTM 4), D directions, L layers.
Parameters go by the names of the layers' state dict: ``weight_ih_l0``, ``norm_l0_reverse.bias``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Cell = Literal["tanh", "relu", "lstm", "gru", "ligru"]
State = tuple[Tensor, Tensor]
Parameters = Mapping[str, Tensor]

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
RECURRENT = ("", "_hh", "_c")
"""What follows the names of parameters and buffers of W_x x, W_h h and c with "recurrent"."""


@dataclass(frozen=True)
class Settings:
    """What is computed; the numbers it is computed with are the parameters."""

    cell: Cell
    norm: str | None
    num_layers: int = 1
    bidirectional: bool = False
    batch_statistics: bool = True  # False: running statistics, as at test time
    eps: float = 1e-5
    momentum: float | None = 0.1
    cell_norm: bool = False
    shrinkage: float = 0.0
    zoneout: tuple[float, float] = (0.0, 0.0)  # the shares of h and c that stay at test time


class Step(NamedTuple):
    """What one time step computes for its n rows."""

    h: Tensor
    c: Tensor
    sums: Tensor
    """(n, G·H): W_x x + W_h h, before the appendix's BN."""
    wh: Tensor
    """(n, G·H): W_h h, before any normalisation."""


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
    resets: Tensor | None = None,
    reset_to: State | None = None,
) -> Result:
    """Section 3: a stack of layers, each of one or two directions.

    ``x`` (T, B, I), ``lengths`` B numbers ≤ T, ``state`` h and c, each (L·D, B, H); c is used by
    the LSTM alone. ``resets`` (T, B): the frames that begin a sequence of their own, in the state
    ``reset_to`` (zeros if None), of B sequences or 1.

    >>> p = {"weight_ih_l0": torch.eye(2), "weight_hh_l0": torch.zeros(2, 2)}
    >>> stack(torch.ones(3, 1, 2), [2], p, Settings("relu", None)).output[:, 0].tolist()
    [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    """
    suffixes = ("", "_reverse") if settings.bidirectional else ("",)
    rows, shown = parameters["weight_hh_l0"].shape  # (G·H, H), or (G·H, P) of a projecting LSTM
    H = rows // {"lstm": 4, "gru": 3, "ligru": 2}.get(settings.cell, 1)
    if state is None:
        shape = settings.num_layers * len(suffixes), x.shape[1]
        state = (x.new_zeros(*shape, shown), x.new_zeros(*shape, H))
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    buffers: dict[str, Tensor] = {}
    for level in range(settings.num_layers):
        outputs: list[Tensor] = []
        for suffix in suffixes:
            own, updated = _of_direction(parameters, f"_l{level}{suffix}")
            start = (state[0][len(last_h)], state[1][len(last_h)])
            restart = None
            if reset_to is not None:
                h, c = (s[len(last_h)].expand(x.shape[1], -1) for s in reset_to)
                restart = h, c
            output, (h, c) = direction(
                x, lengths, own, settings, suffix != "", start, updated, resets, restart
            )
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
    resets: Tensor | None = None,
    reset_to: State | None = None,
) -> tuple[Tensor, State]:
    """Section 3: one direction of one layer over (T, B, I); ``updated`` collects new buffers.

    The backward direction walks from T−1 down to 0; a sequence joins it at its own last frame, so
    that its final state is the one at frame 0, and its statistics belong to the frame's own t.
    What crosses the border before a frame with a reset is nothing, whichever way it goes.
    """
    T, B, _ = x.shape
    running = [[b for b in range(B) if t < lengths[b]] for t in range(T)]  # the n rows of slice t
    if settings.norm == "whiten":
        x = whiten(x, running, p, settings, updated)
    frames = zip(x.unbind(0), running, strict=True)  # the way back of x[t] would fill all of x
    slices = [frame[rows] @ p["weight_ih"].T for frame, rows in frames]  # W_x x_t: (n, G·H)
    plain = slices
    if settings.norm == "sequence":
        slices = normalise_sequence(slices, p, settings, updated)
    elif settings.norm == "frame":
        slices = normalise_frames(slices, p, settings, updated)
    elif settings.norm in ("layer", "rms"):
        slices = [normalise_row(rows, p, "", settings) for rows in slices]
    elif settings.norm == "recurrent":
        own = _of_input(p)
        slices = [_normalise_slice(s, t, own, settings, True) for t, s in enumerate(slices)]
    elif settings.norm == "whiten" and "norm.bias" in p:
        slices = [rows + p["norm.bias"] for rows in slices]
    elif settings.norm is None and "bias_ih" in p:
        slices = [rows + p["bias_ih"] for rows in slices]

    h, c = state
    outputs = [x.new_zeros(B, h.shape[1]) for _ in range(T)]
    steps: dict[int, Step] = {}
    for t in reversed(range(T)) if reverse else range(T):
        border = t + 1 if reverse else t
        if resets is not None and border < T:
            cut = [b for b in running[border] if resets[border, b]]
            h, c = h.clone(), c.clone()
            h[cut], c[cut] = (0.0, 0.0) if reset_to is None else (s[cut] for s in reset_to)
        if not running[t]:
            continue
        rows = torch.tensor(running[t])
        steps[t] = step(slices[t], (h[rows], c[rows]), p, settings, t)
        parts = zip((h, c), steps[t][:2], settings.zoneout, strict=True)
        h, c = (s.index_copy(0, rows, k * s[rows] + (1 - k) * new) for s, new, k in parts)
        outputs[t] = outputs[t].index_copy(0, rows, h[rows])
    if settings.norm == "hidden":
        _update({t: s.sums for t, s in sorted(steps.items())}, p, settings, updated)
    elif settings.norm == "recurrent":
        _update_recurrent(plain, steps, p, settings, updated)
    return torch.stack(outputs), (h, c)


def step(wx: Tensor, state: State, p: Parameters, settings: Settings, t: int) -> Step:
    """One time step: ``wx`` (n, G·H) is W_x x_t, normalised already unless norm is "hidden"."""
    h, c = state
    plain = wh = h @ p["weight_hh"].T
    if "bias_hh" in p:
        wh = wh + p["bias_hh"]
    if settings.norm in ("layer", "rms"):
        wh = normalise_row(wh, p, "_hh", settings)
    elif settings.norm == "recurrent":
        wh = _normalise_slice(wh, t, _of(p, "_hh"), settings)

    def bn(rows: Tensor, first: int = 0) -> Tensor:
        """The appendix's BN of features ``first``…; the identity for the other norms."""
        if settings.norm != "hidden":
            return rows
        own = _normaliser(p)
        for name in own.keys() - {"norm.num_batches_tracked"}:
            own[name] = own[name][..., first : first + rows.shape[1]]
        return _normalise_slice(rows, t, own, settings)

    if settings.cell == "lstm":
        h, c = _lstm(bn(wx + wh), c, p, settings, t)
        return Step(h, c, wx + wh, plain)
    if settings.cell == "gru":
        H = h.shape[1]
        sums = wx[:, : 2 * H] + wh[:, : 2 * H]
        r, z = bn(sums).sigmoid().chunk(2, dim=1)
        candidate = wh[:, 2 * H :]
        if "bias_hn" in p:
            candidate = candidate + p["bias_hn"]
        sums_n = wx[:, 2 * H :] + r * candidate
        h = (1 - z) * bn(sums_n, 2 * H).tanh() + z * h
        return Step(h, c, torch.cat([sums, sums_n], 1), plain)
    if settings.cell == "ligru":  # h_t = z_t h_{t-1} + (1 - z_t) ReLU(…)
        z, candidate = bn(wx + wh).chunk(2, dim=1)
        z = z.sigmoid()
        return Step(z * h + (1 - z) * candidate.relu(), c, wx + wh, plain)
    phi = torch.tanh if settings.cell == "tanh" else torch.relu
    return Step(phi(bn(wx + wh)), c, wx + wh, plain)  # h_t = φ(W_h h_{t-1} + BN(W_x x_t))


def _lstm(gates: Tensor, c: Tensor, p: Parameters, settings: Settings, t: int) -> State:
    """Section 3.1: i and f see c_{t−1}, o sees c_t through diagonal peepholes where there are."""
    i, f, g, o = gates.chunk(4, dim=1)
    if "weight_ci" in p:
        i = i + p["weight_ci"] * c
    if "weight_cf" in p:
        f = f + p["weight_cf"] * c
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    if "weight_co" in p:
        o = o + p["weight_co"] * c
    shown = c
    if settings.cell_norm and settings.norm == "recurrent":
        shown = _normalise_slice(c, t, _of(p, "_c"), settings)
    elif settings.cell_norm:
        shown = normalise_row(c, p, "_c", settings)
    h = o.sigmoid() * shown.tanh()
    if "weight_hr" in p:
        h = h @ p["weight_hr"].T
    return h, c


def normalise_row(rows: Tensor, p: Parameters, which: str, settings: Settings) -> Tensor:
    """Each row of (n, features) by its own mean and (biased) variance (Ba et al. 2016), with "rms"
    by its mean square alone (Zhang & Sennrich 2019)."""
    mean = rows.mean(1, keepdim=True)
    if settings.norm == "rms":
        mean = torch.zeros_like(mean)
    var = ((rows - mean) ** 2).mean(1, keepdim=True)
    return standardise(rows, mean, var, _of(p, which), settings.eps)


def _of(p: Parameters, which: str) -> dict[str, Tensor]:
    """The normaliser's parameters and buffers of one transition or the cell, as of the first."""
    names = {n: f"norm.{n}{which}" for n in ("weight", "bias", "running_mean", "running_var")}
    if which == "_hh":
        names["weight"] = "norm.gamma_hh"
    own = {f"norm.{n}": p[full] for n, full in names.items() if full in p}
    counts = "norm.num_batches_tracked"
    return own | ({counts: p[counts]} if counts in p else {})


def _of_input(p: Parameters) -> dict[str, Tensor]:
    """The same for W_x x: a slot of "recurrent" may have been updated for W_h h and c alone, and
    then has its initial mean 0 and variance 1."""
    own = _of(p, "")
    if _has_slots(own):
        changed = (own["norm.running_mean"] != 0) | (own["norm.running_var"] != 1)
        own["norm.num_batches_tracked"] = own["norm.num_batches_tracked"] * changed.any(1)
    return own


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
    _update(dict(enumerate(slices)), p, settings, updated, True)
    own = _normaliser(p)
    return [_normalise_slice(s, t, own, settings, True) for t, s in enumerate(slices)]


def is_constant(rows: Tensor) -> bool:
    """Whether several rows (n, features) of W_x x are all equal, up to rounding: they have no
    variance to be normalised with."""
    mean, var = mean_and_variance(rows)
    return len(rows) > 1 and bool(var.sum() <= 1e-12 * (mean**2).sum())


def whiten(
    x: Tensor,
    running: list[list[int]],
    p: Parameters,
    settings: Settings,
    updated: dict[str, Tensor],
) -> Tensor:
    """Σ^{-1/2} (x − μ) for the frames of (T, B, I) that are there, over all of them."""
    rows = torch.cat([x[t, some] for t, some in enumerate(running)])
    if settings.batch_statistics:
        mean = rows.sum(0) / len(rows)
        cov = sum(torch.outer(row - mean, row - mean) for row in rows) / len(rows)
        assert isinstance(cov, Tensor)
        if "norm.running_mean" in p and rows.isfinite().all():
            tracked = int(p["norm.num_batches_tracked"])
            unbiased = cov.detach() * len(rows) / (len(rows) - 1)
            for name, new in (("running_mean", mean.detach()), ("running_cov", unbiased)):
                updated[name] = running_average(p[f"norm.{name}"], new, tracked, settings.momentum)
            updated["num_batches_tracked"] = p["norm.num_batches_tracked"] + 1
    else:
        mean, cov = p["norm.running_mean"], p["norm.running_cov"]
    s, eye = settings.shrinkage, torch.eye(len(cov), dtype=cov.dtype)
    inverse = torch.linalg.inv(square_root((1 - s) * cov + s * eye * cov + settings.eps * eye))
    out = x.clone()
    for t, some in enumerate(running):
        for b in some:
            out[t, b] = inverse @ (x[t, b] - mean)
    return out


def square_root(a: Tensor) -> Tensor:
    """S with S S = a, symmetric; autograd sees one step of Newton's from S itself, which solves
    S dS + dS S = da."""
    with torch.no_grad():
        values, vectors = torch.linalg.eigh(a)
        s = vectors @ torch.diag(values.sqrt()) @ vectors.T
        eye = torch.eye(len(a), dtype=a.dtype)
        left = torch.kron(s, eye) + torch.kron(eye, s)
    return s + torch.linalg.solve(left, (a - s @ s).flatten()).view_as(a)


def _normalise_slice(
    rows: Tensor, t: int, p: Parameters, settings: Settings, of_input: bool = False
) -> Tensor:
    """Time slice t by its own statistics; by the running ones if asked to, if it is one row, or if
    it is W_x x and constant."""
    constant = of_input and "norm.running_mean" in p and is_constant(rows)
    if settings.batch_statistics and len(rows) > 1 and not constant:
        mean, var = mean_and_variance(rows)
    elif _has_slots(p):
        slot = last_updated(t, p["norm.num_batches_tracked"].tolist())
        mean, var = p["norm.running_mean"][slot], p["norm.running_var"][slot]
    else:
        mean, var = p["norm.running_mean"], p["norm.running_var"]
    return standardise(rows, mean, var, p, settings.eps)


def last_updated(t: int, tracked: Sequence[int]) -> int:
    """The last slot ≤ min(t, K−1) that has ever been updated, else the first one that has, else 0.

    >>> [last_updated(t, [0, 3, 0, 2]) for t in range(5)]
    [1, 1, 1, 3, 3]
    """
    slots = [k for k in range(len(tracked)) if tracked[k] > 0]
    before = [k for k in slots if k <= t]
    return before[-1] if before else slots[0] if slots else 0


def running_average(old: Tensor, new: Tensor, tracked: int, momentum: float | None) -> Tensor:
    """Section 2, test time; ``momentum`` is the weight of the new value, None the mean of all."""
    weight = 1 / (tracked + 1) if momentum is None else momentum
    return (1 - weight) * old + weight * new


def _update(
    slices: dict[int, Tensor],
    p: Parameters,
    settings: Settings,
    updated: dict[str, Tensor],
    of_input: bool = False,
) -> None:
    """Statistics of each time step where there are slots for them, else of all together; steps of
    W_x x that are constant are left out."""
    if of_input:
        slices = {t: rows for t, rows in slices.items() if not is_constant(rows)}
        if all(len(rows) < 2 for rows in slices.values()):
            return
    if settings.batch_statistics and _has_slots(p):
        _update_slots(slices, p, settings, updated)
    elif settings.batch_statistics:
        _update_shared(torch.cat(list(slices.values())), p, settings, updated)


def _update_recurrent(
    wx: list[Tensor],
    steps: dict[int, Step],
    p: Parameters,
    settings: Settings,
    updated: dict[str, Tensor],
) -> None:
    """Those of W_x x, W_h h and c, or, if any of them is not finite, none."""
    seen = [{t: wx[t] for t in sorted(steps)}, {t: steps[t].wh for t in sorted(steps)}]
    if settings.cell_norm:
        seen.append({t: steps[t].c for t in sorted(steps)})
    if not all(rows.isfinite().all() for slices in seen for rows in slices.values()):
        return
    for which, slices in zip(RECURRENT, seen, strict=False):
        mine: dict[str, Tensor] = {}
        _update(slices, _of(p, which), settings, mine, of_input=which == "")
        for name, value in mine.items():
            updated[name if name == "num_batches_tracked" else name + which] = value


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
    names = [*BUFFERS, "running_cov", *(n + which for n in BUFFERS[:2] for which in RECURRENT[1:])]
    return own, {name: own[f"norm.{name}"] for name in names if f"norm.{name}" in own}
