"""Several processes that train one run together.

All run the same program on their share of every batch; only the first writes and prints.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normrnn.engine.launch import STORE, rank_and_size
from normrnn.errors import UserError
from normrnn.nn.base import Normalised
from normrnn.nn.batchnorm import Normaliser
from normrnn.norms import Norm
from normrnn.runs.torchfile import load_torch_file

T = TypeVar("T")
_SECONDS = timedelta(seconds=5)
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)


class LostError(UserError):
    """Another process of the run has ended, so this one cannot continue."""


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

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return self.total([float(flag)])[0] > 0

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank only; return its result on all."""
        if self.size == 1:
            return work()
        content = _packed(work()) if self.first else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor(len(content))
        dist.broadcast(size, 0)
        if not self.first:
            content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return _unpacked(content)

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks on the first; elsewhere only its own."""
        if self.size == 1:
            return [value]
        content = _packed(value)
        sizes = [torch.tensor(0) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor(len(content)))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(content)] = content
        parts = [torch.empty_like(padded) for _ in sizes] if self.first else None
        dist.gather(padded, parts, 0)
        if parts is None:
            return [value]
        return [_unpacked(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def same_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of the first rank to all."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


def _packed(value: Any) -> Tensor:
    """Return tensors and plain values as bytes; unlike torch's functions for objects, `_unpacked`
    does not unpickle."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).clone()


def _unpacked(content: Tensor) -> Any:
    return load_torch_file(io.BytesIO(content.numpy().tobytes()))


ALONE = Ranks()
_reports: bool | None = None
"""Whether this process reports why the run ends, once that is known."""


def current() -> Ranks:
    """Return the ranks of the process group, or this process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Ranks(dist.get_rank(), dist.get_world_size())


def evaluating(norm: Norm) -> Ranks:
    """Return the ranks that share an evaluation. Where statistics cannot be pooled, each process
    evaluates whole batches alone."""
    return current() if norm.sync or not norm.keeps_statistics else ALONE


@contextmanager
def together(device: torch.device) -> Iterator[Ranks]:
    """Form the process group of the processes that were started together, for the block.

    LostError in the others when one of them ends before.
    """
    if rank_and_size()[1] == 1:
        yield ALONE
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    try:
        _join_group(backend)
        yield current()
    except BaseException as error:
        if isinstance(error, RuntimeError) and _LOST.search(str(error)):
            raise LostError(
                "another process of this run has ended; the same command resumes from the last"
                " checkpoint"
            ) from None
        # Before the others notice the end: this process knows the reason.
        may_report(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join_group(backend: str) -> None:
    """Form the default process group, through the file that our launcher names or as torchrun's
    environment says."""
    if path := os.environ.get(STORE):
        rank, size = rank_and_size()
        store = dist.FileStore(path, -1)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group(backend)


def device_of_rank(device: torch.device) -> torch.device:
    """Return the GPU of this process, where several processes share a machine."""
    if device.type == "cuda" and device.index is None and rank_and_size()[1] > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def share_statistics(model: nn.Module, sync: bool = True) -> None:
    """Set whether batch statistics are pooled over ranks."""
    for module in model.modules():
        if isinstance(module, Normaliser):
            module.sync = sync


@contextmanager
def sharing_statistics(model: nn.Module) -> Iterator[None]:
    """Pool batch statistics over ranks inside the block."""
    before = {m: m.sync for m in model.modules() if isinstance(m, Normaliser)}
    share_statistics(model)
    try:
        yield
    finally:
        for module, sync in before.items():
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


def distributed(
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


def may_report(error: BaseException) -> bool:
    """Return whether this process reports an error: the first of the run to ask, and not the same
    error as before a restart."""
    global _reports
    if _reports is None:
        _reports = rank_and_size()[1] == 1 or _is_first_to_report(str(error))
    return _reports


def _is_first_to_report(text: str) -> bool:
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    sentence = hashlib.sha256(text.encode()).hexdigest()
    try:
        store = _shared_store()
        first = store.add(f"normrnn/reports/{restart}", 1) == 1
        return first and store.add(f"normrnn/reported/{sentence}", 1) == 1
    except (RuntimeError, ValueError):  # it is gone
        return rank_and_size()[0] == 0


def _shared_store() -> dist.Store:
    if path := os.environ.get(STORE):
        return dist.FileStore(path, -1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=_SECONDS)
