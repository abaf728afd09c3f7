"""Several processes that train one run together.

All run the same program on their share of every batch; only the first writes and prints.
"""

import io
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from normrnn.errors import UserError
from normrnn.nn.base import Normalised
from normrnn.nn.batchnorm import Normaliser
from normrnn.processes import STORE, rank_and_size
from normrnn.runs.store import load_torch_file

T = TypeVar("T")
_LONGEST = timedelta(days=7)  # that the others wait while the first evaluates
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)


@dataclass(frozen=True)
class Ranks:
    """Rank of this process, and number of processes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return this rank's share of `count` streams: as many as the others, or one more.

        >>> [Ranks(rank, 3).share(7) for rank in range(3)]
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
        """
        whole, rest = divmod(count, self.size)
        start = self.rank * whole + min(self.rank, rest)
        return slice(start, start + whole + (self.rank < rest))

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks, in double precision."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def gather_states(self, share: Tensor, count: int) -> Tensor:
        """Return the states (layers, B, H) of all `count` streams, from every rank's share."""
        states = share.new_zeros(share.shape[0], count, *share.shape[2:])
        states[:, self.share(count)] = share
        if self.size > 1:
            dist.all_reduce(states)
        return states.cpu()

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank only; return its result on all: tensors and plain values,
        which unlike those of torch's functions for objects are not unpickled."""
        if self.size == 1:
            return work()
        buffer = io.BytesIO()
        if self.first:
            torch.save(work(), buffer)
        size = torch.tensor(len(buffer.getbuffer()))
        dist.broadcast(size, 0)
        content = bytearray(buffer.getvalue() or int(size))
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), 0)
        return load_torch_file(io.BytesIO(content))


ALONE = Ranks()


def current() -> Ranks:
    """Return the ranks of the process group, or this process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size())


@contextmanager
def process_group(device: torch.device) -> Iterator[Ranks]:
    """Form the process group of the processes that were started together, for the block.

    When one of them fails inside, the others exit with code 1; the failed rank prints the error.
    """
    rank, size = rank_and_size()
    if size == 1:
        yield ALONE
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        if path := os.environ.get(STORE):  # of our launcher
            store: dist.Store = dist.FileStore(path, -1)
        else:
            store = _torchrun_store(rank, size)
        group = {"store": store, "rank": rank, "world_size": size}
        dist.init_process_group(backend, timeout=_LONGEST, **group)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"process {rank} of {size} cannot join the others: {reason}") from None
    try:
        yield current()
    except RuntimeError as error:
        if _LOST.search(str(error)):
            raise SystemExit(1) from None
        raise
    finally:
        dist.destroy_process_group()


def _torchrun_store(rank: int, size: int) -> dist.Store:
    """Return the store of torchrun's environment with a prefix that the first rank draws.

    torchrun keeps one store over restarts, with addresses of earlier attempts. The number of
    restarts is not a prefix: machines count their own.
    """
    store, token = next(rendezvous("env://"))[0], secrets.token_hex(8)
    if rank:
        store.set(f"request/{rank}", token)
        token = store.get(f"reply/{token}").decode()  # waits for it
        store.set(f"{token}/{rank}", "here")
    missing = [] if rank else list(range(1, size))
    while missing:
        for other in missing:  # a request of an earlier attempt is answered too, without effect
            store.set(f"reply/{store.get(f'request/{other}').decode()}", token)
        time.sleep(0.02)
        missing = [other for other in missing if not store.check([f"{token}/{other}"])]
    return dist.PrefixStore(token, store)


def device_of_rank(device: torch.device) -> torch.device:
    """Return the GPU of this process, where several processes share a machine."""
    if device.type == "cuda" and device.index is None and rank_and_size()[1] > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def share_statistics(model: nn.Module, sync: bool) -> None:
    """Set whether batch statistics are pooled over ranks."""
    for module in model.modules():
        if isinstance(module, Normaliser):
            module.sync = sync


def empty_loss(model: nn.Module) -> Tensor:
    """Return the loss, 0, of a rank without a share of a batch. It takes part in the others'
    statistics, and its gradients are 0."""
    loss = sum((p.flatten()[:1] * 0).sum() for p in model.parameters() if p.requires_grad)
    for layer in model.modules():
        if isinstance(layer, Normalised):
            rows = torch.zeros(1, 0, layer.input_size, device=layer.weight_hh_l0.device)
            loss = loss + layer(rows.transpose(0, 1) if layer.batch_first else rows)[0].sum()
    assert isinstance(loss, Tensor)
    return loss


class _Losses(nn.Module):
    """The loss of a task as a module, because torch distributes modules."""

    def __init__(self, model: nn.Module, loss: Callable[[int, int], T]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, epoch: int, index: int) -> Any:
        return self._loss(epoch, index)


def distributed_loss(
    model: nn.Module, loss: Callable[[int, int], T], same_statistics: bool
) -> Callable[[int, int], T]:
    """Return `loss` with gradients averaged over ranks.

    Gradients have a process group of their own: a rank without a share of a batch exchanges
    statistics and gradients in another order than the others.
    """
    return DistributedDataParallel(
        _Losses(model, loss),
        process_group=dist.new_group(),
        forward_sync_buffers=not same_statistics,
        gradient_as_bucket_view=True,
    )
