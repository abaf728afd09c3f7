"""Whitened inputs: the covariance of all rows, and that of test time."""

from typing import Any

import torch
from torch import Tensor

from normrnn.nn.statistical import StatisticalNorm
from normrnn.ops import kernel
from normrnn.ops.fold import Weights
from normrnn.ops.running import store_
from normrnn.ops.statistics import wide
from normrnn.ops.steps import Steps
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
    compiled_at_test_time = needs_eigenvectors = True
    _known: tuple[Any, Tensor, Tensor] | None = None
    """ε and shrinkage, a running covariance, and its root."""
    _product: tuple[Tensor, Tensor, Tensor] | None = None
    """Weights, the root, and the product of both."""

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
        self._vector("bias", channels, affine and bias, device, dtype)
        buffers = {
            "running_mean": torch.zeros(inputs, device=device, dtype=dtype),
            "running_cov": torch.eye(inputs, device=device, dtype=dtype),
            "num_batches_tracked": torch.zeros((), dtype=torch.long, device=device),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value if track_running_stats else None)

    def reset_running_stats(self) -> None:
        """To mean 0 and no correlations."""
        if self.running_mean is not None and self.running_cov is not None:
            self.running_mean.zero_()
            self.running_cov.copy_(torch.eye(self.inputs))
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.zero_()

    def extra_repr(self) -> str:
        shrinkage = f", shrinkage={self.shrinkage}" if self.shrinkage else ""
        return f"{self.inputs}, eps={self.eps}, momentum={self.momentum}{shrinkage}"

    def mapped(
        self, rows: Tensor, steps: Steps, weights: Weights, known: dict[Any, Any]
    ) -> Weights:
        """Plain weights that whiten these rows; ``known`` is what the other direction found."""
        if not self.mode.batch or self._is_lone(steps.rows):
            return self.folded(weights)
        how = self.eps, self.shrinkage
        if how not in known:
            self._check(steps.rows)
            found = covariance(rows, steps)
            known[how] = found, whitener(found.cov, *how)
        found, root = known[how]
        self._observe(found)
        return fold_whitening(weights, self.bias, found.mean, whitened(weights.w_ih, root))

    def is_alone(self, steps: Steps) -> bool:
        return self._is_lone(steps.rows)

    def _is_lone(self, rows: int) -> bool:
        """Whether one row is left to statistics of test time, if there are any."""
        mode = self.mode
        lone = rows == 1 and mode.batch and mode.population is None
        return lone and self.running_mean is not None and not self.never_updated

    @property
    def _too_few(self) -> int:
        """Rows that are not enough for a covariance."""
        return 1 if self.shrinkage else self.inputs

    def _check(self, rows: int) -> None:
        if rows <= self._too_few:
            raise ValueError(
                f"whitening needs more rows than features, got {rows} unpadded frames of"
                f" {self.inputs} features: use a larger batch, shrinkage= above 0 (with more than"
                " one frame), or eval() mode for running statistics"
            )

    @torch.no_grad()
    def _observe(self, batch: Covariance) -> None:
        mode = self.mode
        if mode.population is not None:
            mode.population.add(batch)
        elif mode.update:
            assert self.running_mean is not None
            assert self.running_cov is not None
            assert self.num_batches_tracked is not None
            good = batch.mean.isfinite().all() & batch.cov.isfinite().all()
            good = good & (batch.rows > self._too_few)  # which a graph learns only now
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

    @property
    def is_fixed_map(self) -> bool:
        return not self.mode.batch

    def folded(self, weights: Weights) -> Weights:
        """Plain weights of the same eval output."""
        assert self.running_mean is not None
        root, w_ih = self._root(), weights.w_ih
        # A copy where there may be a way back: a pass in training changes it before that.
        mean = self.running_mean.to(root.dtype, copy=torch.is_grad_enabled())
        learns = torch.is_grad_enabled() and (w_ih.requires_grad or root.requires_grad)
        if learns or not kernel.is_plain((w_ih,)):
            return fold_whitening(weights, self.bias, mean, whitened(w_ih, root))
        return fold_whitening(weights, self.bias, mean, self._whitened(w_ih, root))

    def _root(self) -> Tensor:
        """Of the running covariance; the last one is kept, since looking is cheaper."""
        cov, how = self.running_cov, (self.eps, self.shrinkage)
        assert cov is not None
        if not kernel.is_plain((cov,)) or (torch.is_grad_enabled() and cov.requires_grad):
            return whitener(cov.to(torch.float64), *how).to(wide(cov.dtype))
        if self._known is not None and self._known[0] == how and _are_same(self._known[1], cov):
            return self._known[2]
        with torch.inference_mode(False), torch.no_grad():  # what is kept serves others too
            seen = cov.clone()
            root = whitener(seen.to(torch.float64), *how).to(wide(cov.dtype))
        self._known = how, seen, root
        return root

    @torch.no_grad()
    def _whitened(self, w_ih: Tensor, root: Tensor) -> Tensor:
        """The same of the product with the weights, which takes I times as long as a look."""
        known = self._product
        if known is not None and known[1] is root and _are_same(known[0], w_ih):
            return known[2]
        with torch.inference_mode(False):
            seen = w_ih.clone()
            self._product = made = seen, root, whitened(seen, root)
        return made[2]

    def __getstate__(self) -> dict[str, Any]:
        """Without what is only kept for speed."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_known", "_product")}


def _are_same(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.device == other.device and not one.is_meta
    return alike and torch.equal(one, other)
