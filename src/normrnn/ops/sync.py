"""Statistics pooled over the ranks of a process group."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Pool:
    """The ranks that pool statistics: those of a process group, or of the default one.

    A copy has the same group; a pickle the default one, since a group belongs to its process.
    """

    def __init__(self, process_group: Any = None):
        if process_group is not None and process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this process is not in the process_group that was given: give each process a"
                " group that it belongs to, or None"
            )
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> "Pool":
        return self

    def __reduce__(self) -> Any:
        return Pool, ()

    @property
    def has_others(self) -> bool:
        """Whether there is more than one rank."""
        if not (dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self.process_group) > 1

    def sum(self, values: Tensor, groups: int) -> Tensor:
        """Sum (K, …) of each rank into (groups, …); differentiable."""
        return _AllReduce.apply(_padded(values, groups), self)  # type: ignore[return-value]

    def max(self, value: int, device: torch.device) -> int:
        return int(_reduce(torch.tensor(value, device=device), dist.ReduceOp.MAX, self))


DEFAULT_POOL = Pool()


class _AllReduce(torch.autograd.Function):
    """The sum over ranks. Each rank's loss depends on every rank's rows, so gradients are summed
    over ranks too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pool: Pool) -> Tensor:
        ctx.pool = pool
        return _reduce(tensor.clone(), dist.ReduceOp.SUM, pool)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grads[0], ctx.pool), None  # type: ignore[return-value]


def _reduce(tensor: Tensor, op: Any, pool: Pool) -> Tensor:
    dist.all_reduce(tensor, op=op, group=pool.process_group)
    return tensor


def _padded(values: Tensor, groups: int) -> Tensor:
    """(K, …) -> (groups, …), with zeros."""
    return F.pad(values, (0, 0, 0, groups - len(values)))
