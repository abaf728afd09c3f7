"""Whitening of the inputs by the covariance of all rows."""

from typing import Any

import torch
from torch import Tensor

from normrnn.nn.batchnorm import StatisticalNorm
from normrnn.nn.normaliser import Mode, Resolved
from normrnn.ops.call import Weights
from normrnn.ops.layout import Steps
from normrnn.ops.native.kernel import is_plain
from normrnn.ops.running import store_
from normrnn.ops.statistics import wide
from normrnn.ops.whiten import (
    Covariance,
    CovariancePopulation,
    covariance,
    fold_whitening,
    whitened,
    whitener,
)


class Whitener(StatisticalNorm):
    """W_x Σ^{-1/2} (x − μ) + β over all rows x of the batch; there is no γ, since W_x can scale.

    It costs a product of the rows with themselves, I² per row, an eigendecomposition, I³, and
    W_x Σ^{-1/2}; both directions of a layer share the first two.

    Shapes: ``bias`` (β) is (C,), ``running_mean`` (I,), ``running_cov`` (I, I).
    """

    running_cov: Tensor | None
    needs_eigenvectors, runs_hooks = True, False
    _root_cache: tuple[Any, Tensor, Tensor] | None = None
    """ε and shrinkage, a running covariance, and its root."""

    def __init__(
        self,
        channels: int,
        *,
        inputs: int,
        affine: bool = True,
        bias: bool = True,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        shrinkage: float = 0.0,
        **options: Any,
    ):
        super().__init__(channels, affine=False, **options)
        self.inputs, self.momentum, self.shrinkage = inputs, momentum, shrinkage
        device, dtype = options.get("device"), options.get("dtype")
        self._add_vector("bias", channels, affine and bias, device, dtype)
        buffers = {
            "running_mean": torch.zeros(inputs, device=device, dtype=dtype),
            "running_cov": torch.eye(inputs, device=device, dtype=dtype),
            "num_batches_tracked": torch.zeros((), dtype=torch.long, device=device),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value if track_running_stats else None)

    def reset_running_stats(self) -> None:
        """Reset to mean 0 and no correlations."""
        if self.running_mean is not None and self.running_cov is not None:
            self.running_mean.zero_()
            self.running_cov.copy_(torch.eye(self.inputs))
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        shrinkage = f", shrinkage={self.shrinkage}" if self.shrinkage else ""
        return f"{self.inputs}, eps={self.eps}, momentum={self.momentum}{shrinkage}"

    def resolve(self, steps: Steps) -> Resolved:
        mode = self.mode
        is_single_row = steps.rows == 1 and mode.batch and mode.population is None
        if is_single_row and self.running_mean is not None and not self.was_never_updated:
            mode = mode._replace(batch=False)
        else:
            is_single_row = False
        return Resolved(mode, is_single_row, changes_weights=True)

    def change_weights(
        self,
        resolved: Resolved,
        rows: Tensor,
        steps: Steps,
        weights: Weights,
        shared: dict[Any, Any],
    ) -> Weights:
        """Return plain weights that whiten these rows; directions share the root."""
        if not resolved.mode.batch:
            return self.folded(weights)
        options = self.eps, self.shrinkage
        if options not in shared:
            self._check_rows(steps.rows)
            found = covariance(rows, steps)
            shared[options] = found, whitener(found.cov, *options)
        found, root = shared[options]
        self._take(resolved.mode, found)
        return fold_whitening(
            weights, self.bias, found.mean, whitened(_input_weights(weights), root)
        )

    @property
    def _too_few(self) -> int:
        """Rows that are not enough for a covariance."""
        return 1 if self.shrinkage else self.inputs

    def _check_rows(self, rows: int) -> None:
        if rows <= self._too_few:
            raise ValueError(
                f"whitening needs more rows than features, got {rows} unpadded frames of"
                f" {self.inputs} features: use a larger batch, shrinkage= above 0 (with more than"
                " one frame), or eval() mode for running statistics"
            )

    @torch.no_grad()
    def _take(self, mode: Mode, batch: Covariance) -> None:
        """Take the covariance of a batch to where the mode says."""
        if mode.population is not None:
            mode.population.add(batch)
        elif mode.update:
            assert self.running_mean is not None
            assert self.running_cov is not None
            assert self.num_batches_tracked is not None
            good = batch.mean.isfinite().all() & batch.cov.isfinite().all()
            good = good & (batch.rows > self._too_few)  # known to a graph only now
            share = self.momentum
            if share is None:
                share = 1 / (self.num_batches_tracked + 1).to(batch.mean.dtype)
            pairs = (self.running_mean, batch.mean), (self.running_cov, batch.unbiased)
            for buffer, value in pairs:
                old = buffer.to(value.dtype)
                store_(buffer, torch.where(good, old + (value - old) * share, old))
            store_(self.num_batches_tracked, self.num_batches_tracked + good.to(torch.long))

    def population(self, shared: bool = False) -> CovariancePopulation:  # noqa: ARG002
        return CovariancePopulation()

    @torch.no_grad()
    def adopt(self, population: CovariancePopulation) -> None:
        if self.running_mean is None or population.rows < 2:
            return
        assert self.running_cov is not None
        assert self.num_batches_tracked is not None
        self.running_mean.copy_(population.mean)
        self.running_cov.copy_(population.cov)
        self.num_batches_tracked.fill_(population.batches)

    def folded(self, weights: Weights) -> Weights:
        """Return plain weights of the same eval output."""
        assert self.running_mean is not None
        root, w_ih = self._root(), _input_weights(weights)
        # A copy before a backward pass: a training step changes it before that.
        mean = self.running_mean.to(root.dtype, copy=torch.is_grad_enabled())
        return fold_whitening(weights, self.bias, mean, whitened(w_ih, root))

    def _root(self) -> Tensor:
        """Return the root of the running covariance, cached: comparing is cheaper."""
        cov, options = self.running_cov, (self.eps, self.shrinkage)
        assert cov is not None
        if not is_plain((cov,)) or (torch.is_grad_enabled() and cov.requires_grad):
            return whitener(cov.to(torch.float64), *options).to(wide(cov.dtype))
        cache = self._root_cache  # read once: another thread may replace it
        if cache is not None and cache[0] == options and _are_same(cache[1], cov):
            return cache[2]
        with torch.inference_mode(False), torch.no_grad():  # the cache outlives this call
            seen = cov.clone()
            root = whitener(seen.to(torch.float64), *options).to(wide(cov.dtype))
        self._root_cache = options, seen, root
        return root

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cache."""
        return {key: value for key, value in self.__dict__.items() if key != "_root_cache"}


def _input_weights(weights: Weights) -> Tensor:
    assert weights.w_ih is not None
    return weights.w_ih


def _are_same(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.device == other.device and not one.is_meta
    return alike and torch.equal(one, other)
