"""A trained model from its run directory."""

from pathlib import Path

import torch
from torch import nn

from normrnn.config.registry import task_of
from normrnn.runs.environment import named_device
from normrnn.runs.store import RunDirectory


def load(run: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """The best model of a run, in eval mode: a network of the run's task.

    `.vocabulary` of a language model says what its ids mean. A UserError says what is wrong with a
    directory that holds no usable model. docs/reference/files.md has an example.

    >>> load("no-such-run")
    Traceback (most recent call last):
    normrnn.errors.UserError: no-such-run is no run directory with a config.json
    """
    directory = RunDirectory(Path(run))
    return task_of(directory.config()).load(directory, named_device(device))
