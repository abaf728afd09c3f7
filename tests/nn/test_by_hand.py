"""Every formula written out with torch's functions, for layers and the reference."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import normrnn
from tests import reference
from tests.helpers import CELLS, NORMS, build, close, inputs, settings_of, tensors_of


def normalisers(norm: str | None, p: dict[str, Tensor], rows: Tensor) -> Any:
    """W_x x of all steps (T, B, G·H), and what is done to W_h h, their sum, and c."""
    gamma, gamma_h, beta = (p.get(f"norm_l0.{n}") for n in ("weight", "gamma_hh", "bias"))
    gamma_c, beta_c = p.get("norm_l0.weight_c"), p.get("norm_l0.bias_c")

    def batch(a: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
        return F.batch_norm(a, None, None, weight, bias, training=True)

    def layer(a: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
        return F.layer_norm(a, a.shape[-1:], weight, bias)

    def rms(a: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
        out = F.rms_norm(a, a.shape[-1:], weight, 1e-5)
        return out if bias is None else out + bias

    def same(a: Tensor, _: int = 0) -> Tensor:
        return a

    def sums(a: Tensor, first: int = 0) -> Tensor:
        """Of features ``first``…"""
        own = slice(first, first + a.shape[1])
        return batch(a, gamma[own], beta[own])  # type: ignore[index]

    if norm == "sequence":
        return batch(rows.flatten(0, 1), gamma, beta).view_as(rows), same, same, same
    if norm == "frame":
        return torch.stack([batch(a, gamma, beta) for a in rows]), same, same, same
    if norm == "hidden":
        return rows, same, sums, same
    if norm is None:
        return rows + p["bias_ih_l0"] + p["bias_hh_l0"], same, same, same
    of = {"layer": layer, "rms": rms, "recurrent": batch}[norm]
    of_cell = same if gamma_c is None else lambda c: of(c, gamma_c, beta_c)
    return torch.stack([of(a, gamma, beta) for a in rows]), lambda u: of(u, gamma_h), same, of_cell


def written_out(layer: Any, x: Tensor) -> Tensor:
    p, H = dict(layer.named_parameters()), layer.hidden_size
    rows, of_h, of_sum, of_cell = normalisers(layer.norm, p, x @ p["weight_ih_l0"].T)
    h, c, outputs = x.new_zeros(x.shape[1], H), x.new_zeros(x.shape[1], H), []
    for a in rows:
        u = of_h(h @ p["weight_hh_l0"].T)
        if layer.mode == "GRU":
            r, z = of_sum((a + u)[:, : 2 * H]).sigmoid().chunk(2, 1)
            n = of_sum(a[:, 2 * H :] + r * (u[:, 2 * H :] + p["bias_hn_l0"]), 2 * H).tanh()
            h = (1 - z) * n + z * h
        elif layer.mode == "LIGRU":
            z, candidate = of_sum(a + u).chunk(2, 1)
            h = z.sigmoid() * h + (1 - z.sigmoid()) * candidate.relu()
        elif layer.mode == "LSTM":
            i, f, g, o = of_sum(a + u).chunk(4, 1)
            i, f = (v + p.get(f"weight_c{k}_l0", 0) * c for v, k in ((i, "i"), (f, "f")))
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = (o + p.get("weight_co_l0", 0) * c).sigmoid() * of_cell(c).tanh()
        else:
            h = of_sum(a + u).tanh() if layer.mode == "RNN_TANH" else of_sum(a + u).relu()
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("norm", [None, "sequence", "frame", "hidden", "layer", "rms", "recurrent"])
@pytest.mark.parametrize("cell", CELLS)
def test_three_steps(cell: str, norm: str | None) -> None:
    if cell == "gru" and norm is None:
        return  # torch's own function
    options = {"time_steps": None, "cell_norm": True if cell == "lstm" else None}
    if norm not in ("layer", "rms", "recurrent"):
        del options["cell_norm"]
    layer = build(cell, norm or "none", **options)
    x = inputs(3, [3] * 4).detach()
    wanted = written_out(layer, x)
    result = reference.stack(x, [3] * 4, tensors_of(layer), settings_of(layer))
    torch.testing.assert_close(result.output, wanted)
    torch.testing.assert_close(layer(x)[0], wanted)


def test_whitened_rows_are_uncorrelated() -> None:
    """relu(x) − relu(−x) shows the whitened rows; W_x = (1, −1)."""
    layer: Any = normrnn.RNN(3, 6, nonlinearity="relu", norm="whiten", eps=1e-12).double()
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.cat([torch.eye(3), -torch.eye(3)]))
        layer.weight_hh_l0.zero_()
    x = torch.randn(9, 7, 3).double() @ torch.randn(3, 3).double() + 5
    result = reference.stack(x, [9] * 7, tensors_of(layer), settings_of(layer))
    for out in (layer(x)[0], result.output):
        rows = (out[..., :3] - out[..., 3:]).flatten(0, 1)
        close(rows.mean(0), torch.zeros(3).double(), "mean", 1e-8)
        close(rows.t() @ rows / len(rows), torch.eye(3).double(), "covariance", 1e-8)


@pytest.mark.parametrize("norm", [n for n in NORMS if n not in ("none", "layer", "rms", "whiten")])
def test_running_statistics_of_the_reference(norm: str) -> None:
    """Rows 1, 2, 6 and a step without frames: mean 3, unbiased variance 7."""
    one: Any = normrnn.RNN(1, 1, **NORMS[norm]).double()
    with torch.no_grad():
        one.weight_ih_l0.fill_(1)
        one.weight_hh_l0.zero_()
    x = torch.tensor([1.0, 2.0, 6.0]).double().view(1, 3, 1)
    own, how = tensors_of(one), settings_of(one)
    after = reference.stack(x, [1, 1, 1], own, how).buffers
    assert after["norm_l0.running_mean"].flatten()[0].item() == pytest.approx(0.3)
    assert after["norm_l0.running_var"].flatten()[0].item() == pytest.approx(0.9 + 0.7)
    assert after["norm_l0.num_batches_tracked"].flatten()[0].item() == 1
