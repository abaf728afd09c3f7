"""A trained model from its run directory."""

from pathlib import Path

import torch
from torch import nn

from normrnn.config.registry import task_of
from normrnn.runs.environment import named_device
from normrnn.runs.store import RunDirectory


def load(run: str | Path, device: str | torch.device = "cpu") -> nn.Module:
    """Load the best model of a run, in eval mode.

    `.vocabulary` of a language model gives the meaning of its ids. Raise UserError for a directory
    without a usable model.

    >>> load("no-such-run")
    Traceback (most recent call last):
    normrnn.errors.UserError: no-such-run is not a run directory: no config.json
    """
    directory = RunDirectory(Path(run))
    return task_of(directory.config()).load(directory, named_device(device))
