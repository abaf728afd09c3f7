"""Whitened inputs: the root, its gradient, the statistics, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

import normrnn
from normrnn.ops import Steps
from normrnn.ops.whiten import CovariancePopulation, covariance, whitener
from tests.helpers import build, close

X: Any = {"dtype": torch.float64}


def covariances() -> dict[str, Tensor]:
    """Of all kinds, those with equal and with vanishing eigenvalues included."""
    rows = torch.randn(40, 6, **X)
    return {
        "of rows": torch.cov(rows.t()),
        "equal eigenvalues": torch.eye(6, **X) * 3,
        "one feature twice": torch.cov(rows[:, [0, 0, 1, 2, 3, 4]].t()),
        "no variance": torch.zeros(6, 6, **X),
    }


@pytest.mark.parametrize("kind", covariances())
@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0])
class TestTheRoot:
    EPS = 1e-2

    def test_against_eigh(self, kind: str, shrinkage: float) -> None:
        cov = covariances()[kind]
        wanted = cov * (1 - shrinkage) + torch.diag(cov.diagonal()) * shrinkage
        values, vectors = torch.linalg.eigh(wanted + self.EPS * torch.eye(6, **X))
        root = whitener(cov, self.EPS, shrinkage)
        close(root, vectors @ torch.diag(values**-0.5) @ vectors.t(), "root")
        close(root @ (wanted + self.EPS * torch.eye(6, **X)) @ root, torch.eye(6, **X), "product")

    def test_gradients(self, kind: str, shrinkage: float) -> None:
        """Of symmetric matrices, as covariances are; finite also where eigenvalues are equal."""
        factor = torch.linalg.cholesky(covariances()[kind] + 0.1 * torch.eye(6, **X))

        def root(a: Tensor) -> Tensor:
            return whitener(a @ a.t(), self.EPS, shrinkage)

        assert torch.autograd.gradcheck(root, factor.requires_grad_())
        if kind == "of rows":
            assert torch.autograd.gradgradcheck(root, factor)


def test_recalibrated_rows_count_alike() -> None:
    layer, x = build("gru", "whiten"), torch.randn(6, 8, 3, **X)
    normrnn.recalibrate(layer, [x[:, :3], x[:, 3:4], (x[:, 4:],)])
    rows = x.flatten(0, 1)
    close(layer.norm_l0.running_mean, rows.mean(0), "mean")
    close(layer.norm_l0.running_cov, torch.cov(rows.t()), "covariance")
    population = CovariancePopulation()
    population.add(covariance(rows * float("nan"), Steps.dense(6, 8)))
    assert not population.batches


def test_few_rows() -> None:
    layer = build("lstm", "whiten", shrinkage=0.0)
    with pytest.raises(ValueError, match="got 3 unpadded frames of 3 features"):
        layer(torch.randn(3, 1, 3, **X))
    layer(torch.randn(4, 1, 3, **X))
    layer.eval()(torch.randn(1, 1, 3, **X))
    shrunk = build("lstm", "whiten", shrinkage=0.1)
    shrunk.norm_l0.num_batches_tracked.zero_()
    with pytest.raises(ValueError, match="got 1 unpadded frames"):
        shrunk(torch.randn(1, 1, 3, **X))
    shrunk(torch.randn(2, 1, 3, **X))


def test_float32_under_autocast() -> None:
    layer = build("lstm", "whiten", dtype=torch.float32)
    x = torch.randn(30, 4, 3) * 0.01 + 20  # the variance is far below the mean
    wanted = torch.cov(x.flatten(0, 1).t())
    layer.norm_l0.momentum = 1.0
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    torch.testing.assert_close(layer.norm_l0.running_cov, wanted, rtol=1e-2, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own
def test_forward_mode() -> None:
    """Directional derivatives of a training pass, by differences, and both Jacobians."""
    layer, x = normrnn.LSTM(3, 4, norm="whiten").double(), torch.randn(5, 6, 3).double()
    direction, step = torch.randn_like(x), 1e-6
    with normrnn.batch_statistics(layer):
        found = torch.func.jvp(lambda y: layer(y)[0], (x,), (direction,))[1]
        ahead, behind = (layer(x + sign * step * direction)[0] for sign in (1, -1))
        torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)
        forward, reverse = (
            way(lambda y: layer(y)[0])(x) for way in (torch.func.jacfwd, torch.func.jacrev)
        )
    torch.testing.assert_close(forward, reverse)
