"""The statistics of a network's normalisers, exchanged and put back.

- running: the buffers as training left them;
- recalibrated: population statistics over training batches, without dropout;
- batch: each batch's own, as the authors' code validated.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normrnn.config.base import Config
from normrnn.engine.task import Tensors
from normrnn.errors import UserError
from normrnn.nn import batch_statistics, recalibrate
from normrnn.nn.tools import NothingFinite
from normrnn.runs.names import MODEL, RUNNING
from normrnn.runs.store import RunDirectory

StatisticsKind = Literal["running", "recalibrated", "batch"]


def statistics_of(model: nn.Module) -> Tensors:
    """A copy of all buffers: the normalisers' statistics, and what else the model keeps there."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def set_statistics(model: nn.Module, statistics: Tensors) -> None:
    """Put such a copy back; UserError if it is another network's."""
    buffers = dict(model.named_buffers())
    if any(n not in buffers or buffers[n].shape != v.shape for n, v in statistics.items()):
        raise UserError("the saved statistics belong to another network")
    with torch.no_grad():
        for name, value in statistics.items():
            buffers[name].copy_(value)


def put_running_back(run: RunDirectory, model: nn.Module) -> Tensors:
    """The running statistics of a best model that was saved with recalibrated ones, which are given
    back. They must be of that model: a kill can fall between the two files."""
    headers = [run.tensors_metadata(name) for name in (MODEL, RUNNING)]
    if len({(header.get("run"), header.get("updates")) for header in headers}) > 1:
        raise UserError(
            f"{MODEL} and {RUNNING} of {run.path} are of different runs or updates; if it was"
            " stopped while it wrote them, training it further writes both"
        )
    saved = statistics_of(model)
    set_statistics(model, run.read_tensors(RUNNING))
    return saved


def of_other_data(same_data: bool, config: Config, where: object) -> list[str]:
    """What is to be said of recalibrated statistics that are not those the run was saved with."""
    known = same_data or config.deciding_statistics == "recalibrated"
    if known or not config.normalisation.keeps_statistics:
        return []
    return [f"recalibrated statistics are those of the training set of {where}, not of the run's"]


@contextlib.contextmanager
def using(model: nn.Module, statistics: Tensors) -> Iterator[None]:
    """These statistics inside, the model's own outside."""
    before = statistics_of(model)
    set_statistics(model, statistics)
    try:
        yield
    finally:
        set_statistics(model, before)


def population_statistics(
    model: nn.Module, batches: Iterable[Any], step: Callable[[nn.Module, Any], Tensor]
) -> Tensors:
    """Recalibrated statistics over training batches, or its own of a network that has diverged;
    the model keeps its own."""
    before = statistics_of(model)
    try:
        with contextlib.suppress(NothingFinite):
            recalibrate(model, batches, step=step)
        return statistics_of(model)
    finally:
        set_statistics(model, before)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; outside every module is as it was, also those that were frozen, and also
    after an error."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def own_or_kept(model: nn.Module, own: bool) -> contextlib.AbstractContextManager[Any]:
    """Inside, each batch's own statistics, or those that the model keeps."""
    return batch_statistics(model) if own else contextlib.nullcontext()
