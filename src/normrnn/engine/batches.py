"""Sequences in batches of similar length, in an order that seed and epoch determine."""

from collections.abc import Sequence

import torch


def shuffled_batches(
    lengths: Sequence[int], batch: int, pool: int = 1, *, seed: int, epoch: int
) -> list[list[int]]:
    """Return the numbers of all sequences once, in batches of similar length.

    Pools of `pool` batches are drawn at random and sorted by length; their batches come in random
    order. Only the last batch drawn may be smaller; a single sequence left over joins the batch
    before it, because statistics of a time step need two.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(order), pool * batch):
        some = sorted(order[start : start + pool * batch], key=lambda i: (lengths[i], i))
        batches += [some[i : i + batch] for i in range(0, len(some), batch)]
    batches = _join_single(batches, batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def sorted_batches(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Return the numbers of all sequences once, by length.

    >>> sorted_batches([5, 3, 4, 9, 1], 2)
    [[4, 1], [2, 0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    return _join_single([order[i : i + batch] for i in range(0, len(order), batch)], batch)


def evenly_spread(count: int, total: int) -> list[int]:
    """Return `count` of `total` numbers, or all of them if there are fewer.

    >>> evenly_spread(3, 10)
    [0, 3, 6]
    """
    count = min(count, total)
    return [i * total // count for i in range(count)]


def _join_single(batches: list[list[int]], batch: int) -> list[list[int]]:
    if batch > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        return [*batches[:-2], batches[-2] + batches[-1]]
    return batches
