"""Whitening of rows, Σ^{-1/2} (x − μ), as a change of the input weights."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normrnn.ops.call import Weights
from normrnn.ops.layout import Steps, Traced
from normrnn.ops.statistics import wide, without_autocast


class Covariance(NamedTuple):
    """Mean (I,) and biased covariance (I, I) of ``rows`` rows, at least two."""

    mean: Tensor
    cov: Tensor
    rows: int | Tensor

    @property
    def unbiased(self) -> Tensor:
        """The covariance that running buffers hold."""
        return self.cov * (self.rows / (self.rows - 1))


def covariance(rows: Tensor, steps: Steps) -> Covariance:
    """Compute it over rows (N, I), in two passes and in float32 or wider, under autocast too."""
    with without_autocast(rows.device.type):
        rows, count = rows.to(wide(rows.dtype)), rows.shape[0]
        if isinstance(steps, Traced) and steps.is_padded:
            frames = steps.frames[:, None]
            rows, count = torch.where(frames, rows, 0.0), frames.sum()
            mean = rows.sum(0) / count
            centred = torch.where(frames, rows - mean, 0.0)
        else:
            mean = rows.mean(0)
            centred = rows - mean
        return Covariance(mean, centred.t() @ centred / count, count)


def whitener(cov: Tensor, eps: float, shrinkage: float = 0.0) -> Tensor:
    """Return ((1 − s) Σ + s diag(Σ) + ε)^{-1/2}, symmetric (I, I); NaN if Σ is not finite."""
    with without_autocast(cov.device.type):
        variances = cov.diagonal()
        if shrinkage:
            cov = cov * (1 - shrinkage) + torch.diag(variances * shrinkage)
        cov = cov + torch.diag(torch.full_like(variances, eps))
        kind = _InverseRoot if torch.compiler.is_compiling() else _InverseRootWithJvp
        return kind.apply(cov, eps)[0]  # type: ignore[index]


class _InverseRoot(torch.autograd.Function):
    """A^{-1/2} of a symmetric matrix with eigenvalues of at least ``least``.

    With A = Q diag(λ) Qᵀ a change dA of A is one of Q (K ∘ Qᵀ dA Q) Qᵀ of its root, where
    K_ij = (λ_i^{-1/2} − λ_j^{-1/2}) / (λ_i − λ_j) = −1 / (√λ_i √λ_j (√λ_i + √λ_j)): nothing is
    divided by a difference, so equal eigenvalues are safe.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, least: float) -> Any:
        finite = matrix.isfinite().all()
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        safe = torch.where(finite, matrix, identity)
        values, vectors = torch.linalg.eigh(safe)
        values = torch.where(finite, values.clamp(min=least), torch.nan)
        return (vectors * values.rsqrt()) @ vectors.t(), values, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, values, vectors = output
        ctx.mark_non_differentiable(values, vectors)
        ctx.save_for_backward(inputs[0], values, vectors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad = grads[0]
        if grad is None:
            return None, None
        matrix, values, vectors = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            values, vectors = torch.linalg.eigh(matrix)
        return _root_change((grad + grad.t()) / 2, values, vectors), None


class _InverseRootWithJvp(_InverseRoot):
    """With a forward-mode derivative too, which Dynamo does not trace."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _InverseRoot.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*output[1:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        values, vectors = ctx.saved_tensors
        change = tangents[0]
        return None if change is None else _root_change(change, values, vectors), None, None


def _root_change(change: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """Return Q (K ∘ Qᵀ dA Q) Qᵀ, the change of the root for a change of its matrix; also the
    backward pass, since the map is its own transpose."""
    with without_autocast(change.device.type):
        root = values.sqrt()
        factor = -1 / (torch.outer(root, root) * (root + root[:, None]))
        return vectors @ (factor * (vectors.t() @ change @ vectors)) @ vectors.t()


def whitened(w_ih: Tensor, root: Tensor) -> Tensor:
    """Return W_x Σ^{-1/2}, in the type of the root."""
    with without_autocast(root.device.type):
        return w_ih.to(root.dtype) @ root


def fold_whitening(weights: Weights, beta: Tensor | None, mean: Tensor, w_ih: Tensor) -> Weights:
    """Return plain weights that apply ``w_ih`` = W_x Σ^{-1/2} to x − mean, and add β."""
    with without_autocast(w_ih.device.type):
        shift = -(w_ih @ mean)
        bias = shift if beta is None else beta + shift
    dtype = weights.w_hh.dtype
    return weights._replace(w_ih=w_ih.to(dtype), bias=bias.to(dtype))


class CovariancePopulation:
    """The covariance of any number of batches, pooled in float64: rows count equally however they
    were split."""

    def __init__(self) -> None:
        self.batches = self.rows = 0
        self.mean = self._products = torch.zeros(0)

    def add(self, batch: Covariance) -> None:
        mean, cov = (v.detach().to("cpu", torch.float64) for v in (batch.mean, batch.cov))
        if not bool(mean.isfinite().all() & cov.isfinite().all()):
            return
        if not self.batches:
            self.mean, self._products = torch.zeros_like(mean), torch.zeros_like(cov)
        rows = int(batch.rows)
        both = self.rows + rows
        delta = mean - self.mean
        between = torch.outer(delta, delta) * (self.rows * rows / both)
        self._products = self._products + cov * rows + between
        self.mean = self.mean + delta * (rows / both)
        self.rows, self.batches = both, self.batches + 1

    @property
    def cov(self) -> Tensor:
        """Unbiased, (I, I)."""
        return self._products / max(self.rows - 1, 1)
