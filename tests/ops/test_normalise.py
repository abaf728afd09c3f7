"""Normalisation of rows: against torch's batch norm, numerically, and where it is hard."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from normrnn.ops import Groups, Statistics, Steps, measure, normalise, pool, unbiased

C = 3
SIZES = [(4, 4, 4), (4, 3, 2, 2), (5,)]


def rows_of(steps: Steps, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(steps.rows, C, dtype=dtype) * 2 + 3).requires_grad_()


def affine(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    weight, bias = torch.randn(2, C, dtype=dtype)
    return weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("kind", [Groups.sequence, Groups.frame])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_batch_norm_of_each_group(sizes: tuple[int, ...], kind: Any) -> None:
    steps = Steps(sizes)
    given = rows_of(steps), *affine()
    out, statistics = normalise(*given, kind(steps))
    y, w, b = (v.detach().clone().requires_grad_() for v in given)
    parts = [y] if kind is Groups.sequence else steps.cut(y)
    expected = torch.cat([F.batch_norm(p, None, None, w, b, True) for p in parts])
    head = torch.randn_like(out)
    found = out, *torch.autograd.grad(out, given, head)
    wanted = expected, *torch.autograd.grad(expected, (y, w, b), head)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    means = torch.stack([p.mean(0) for p in parts])
    variances = torch.stack([p.var(0, correction=0) for p in parts])
    assert statistics is not None
    torch.testing.assert_close(statistics.mean, means, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(statistics.var, variances, rtol=1e-12, atol=1e-12)
    assert statistics.count.tolist() == [len(p) for p in parts]


@pytest.mark.parametrize("sizes", [(3, 3), (3, 2, 1), (4,)])
@pytest.mark.parametrize("kind", [Groups.sequence, Groups.frame])
def test_numerical_gradients(sizes: tuple[int, ...], kind: Any) -> None:
    """With a lone row at the end of (3, 2, 1), which the fixed statistics serve."""
    steps = Steps(sizes)
    fixed = torch.randn(1, C).double(), torch.rand(1, C).double() + 0.5

    def f(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normalise(x, weight, bias, kind(steps), given=fixed)[0]

    given = rows_of(steps), *affine()
    assert gradcheck(f, given)
    assert gradgradcheck(f, given)


@pytest.mark.parametrize(
    ("dtype", "mean", "std"),
    [(torch.float32, 1000, 0.01), (torch.bfloat16, 50, 3), (torch.float16, 50, 3)],
)
def test_statistics_are_float32(dtype: torch.dtype, mean: float, std: float) -> None:
    """Where E[x²] − E[x]² would be negative or far off, and of half precision."""
    steps = Steps((64, 64))
    x = (torch.randn(128, C, dtype=torch.float64) * std + mean).to(dtype)
    for kind in (Groups.sequence, Groups.frame):
        out, statistics = normalise(x, None, None, kind(steps))
        assert out.dtype == dtype
        assert statistics is not None
        torch.testing.assert_close(statistics, measure(x, kind(steps))[0])
        assert statistics.mean.dtype == statistics.var.dtype == torch.float32
        parts = [x] if kind is Groups.sequence else steps.cut(x)
        exact = torch.stack([p.double().var(0, correction=0) for p in parts])
        torch.testing.assert_close(statistics.var.double(), exact, rtol=1e-3, atol=0)
        means = torch.stack([p.double().mean(0) for p in parts])
        torch.testing.assert_close(statistics.mean.double(), means, rtol=1e-5, atol=0)
        whole = x.double().var(0, correction=0, keepdim=True)
        torch.testing.assert_close(pool(statistics).var.double(), whole, rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", [Groups.sequence, Groups.frame])
def test_constant_features_have_finite_gradients(kind: Any) -> None:
    """Variance 0."""
    steps = Steps((3, 3, 2))
    x = torch.full((steps.rows, C), 2.5, dtype=torch.float64).requires_grad_()
    weight, bias = affine()
    out, _ = normalise(x, weight, bias, kind(steps))
    torch.testing.assert_close(out, bias.detach().expand_as(out))
    for grad in torch.autograd.grad(out, (x, weight), torch.randn_like(out)):
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize(("kind", "sizes"), [(Groups.frame, (2, 1)), (Groups.sequence, (1,))])
def test_a_lone_row_needs_given_statistics(kind: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"single row.*running statistics.*track_running_stats"):
        normalise(rows_of(Steps(sizes)), None, None, kind(Steps(sizes)))


def test_pool_is_weighted_by_count() -> None:
    """Not the mean of means."""
    a, b = torch.tensor([0.0, 2.0]), torch.tensor([6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    parts = [(p.mean(), p.var(correction=0), torch.tensor(float(len(p)))) for p in (a, b)]
    mean, var, count = (torch.stack(list(v)) for v in zip(*parts, strict=True))
    pooled, joined = pool(Statistics(mean[:, None], var[:, None], count)), torch.cat([a, b])
    torch.testing.assert_close(pooled.mean.item(), joined.mean().item())
    torch.testing.assert_close(pooled.var.item(), joined.var(correction=0).item())
    torch.testing.assert_close(unbiased(pooled).item(), joined.var().item())
    assert pooled.count.tolist() == [8]
