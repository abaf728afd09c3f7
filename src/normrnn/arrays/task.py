"""Sequences of numbers: classes or values, per sequence or per step."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normrnn.arrays.config import ArrayConfig
from normrnn.arrays.model import ArrayModel
from normrnn.arrays.read import Arrays, read_arrays
from normrnn.engine.model import Sequences
from normrnn.engine.task import Split, Task, Tensors, evenly_spread
from normrnn.errors import UserError


class ArrayTask(Task):
    """Batches of whole sequences."""

    network = ArrayModel
    config: ArrayConfig
    model: ArrayModel

    def __init__(self, config: ArrayConfig, arrays: Arrays | None = None) -> None:
        self.arrays = arrays = arrays or read_arrays(config)
        settings = {
            "target": "values" if arrays.labels is None else "classes",
            "target_per": "step" if arrays.per_step else "sequence",
        }
        completed = replace(config, **settings)
        super().__init__(completed, arrays.sha256, arrays.where, arrays.summary)
        self.settings = settings
        self.per_step = arrays.per_step
        self.splits = tuple(split for split in ("valid", "test") if split in arrays.splits)
        self.calibration_batches = config.evaluation.recalibrate_batches
        train, steps = arrays.splits["train"], config.model.time_steps
        longest = int(train.lengths.max())
        if steps < 0:
            steps = longest if (train.lengths == longest).all() else 0
        self.sizes = {
            "features": train.rows.shape[1],
            "outputs": arrays.outputs,
            "time_steps": steps,
        }
        scored = evenly_spread(config.evaluation.train_sequences, len(train.lengths))
        self.has_train_eval = bool(scored)
        is_scored = np.isin(np.arange(len(train.lengths)), scored)
        splits = {**arrays.splits, "train_eval": train.take(is_scored)}
        self.lengths = {split: one.lengths.tolist() for split, one in splits.items()}
        self._data = {
            split: tuple(map(torch.from_numpy, (one.rows, one.targets, one.lengths, one.starts)))
            for split, one in splits.items()
        }

    @classmethod
    def saved_sizes(cls, weights: Tensors, metadata: Any) -> dict[str, Any]:  # noqa: ARG003
        """Return the sizes of a saved network."""
        running = weights.get("rnn.norm_l0.running_mean", torch.empty(0))
        return {
            "features": len(weights.get("mean", ())),
            "outputs": len(weights.get("target_mean", ())),
            "time_steps": len(running) if running.dim() == 2 else 0,
        }

    def check_model(self, model: ArrayModel) -> None:
        """Raise UserError if the data has other features or targets than a network."""
        sizes, settings = self.sizes, self.settings
        if (settings["target"] == "values", self.per_step) != (model.values, model.per_step):
            raise UserError(
                f"{self.where} has {settings['target']} per {settings['target_per']} as targets"
            )
        if (sizes["features"], sizes["outputs"]) != (len(model.mean), len(model.target_mean)):
            raise UserError(
                f"{self.where} has {sizes['features']} features and {sizes['outputs']} outputs; the"
                f" network has {len(model.mean)} and {len(model.target_mean)}"
            )

    def initialise(self, model: ArrayModel) -> None:
        """Set mean and scale of the training features and values."""
        train = self.arrays.splits["train"]
        if self.config.arrays.standardise:
            mean, deviation = _moments(train.rows)
            model.mean.copy_(mean)
            model.scale.copy_(1 / deviation)
        if self.arrays.labels is None:
            mean, deviation = _moments(train.targets.reshape(len(train.targets), -1))
            model.target_mean.copy_(mean)
            model.target_scale.copy_(deviation)

    def read(self, split: Split, indices: list[int]) -> tuple[Sequences, Tensor]:
        """Return some sequences, longest first, (T, B, F) if they are equally long, else packed,
        and their targets."""
        rows, targets, all_lengths, starts = self._data[split]
        which = torch.tensor(indices)
        lengths = all_lengths[which]
        steps = torch.arange(int(lengths[0]))[:, None]
        is_used = steps < lengths
        at = (starts[which] + steps)[is_used]
        x = rows[at].float().to(self.device)
        y = targets[at if self.per_step else which].to(self.device)
        if is_used.all():
            return x.unflatten(0, (len(steps), len(which))), y
        return PackedSequence(x, is_used.sum(1)), y


def _moments(rows: Any) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of every column; 1 for a constant one."""
    deviation = np.std(rows, axis=0, dtype=np.float64)
    deviation[deviation < 1e-8] = 1.0
    return torch.from_numpy(np.mean(rows, axis=0, dtype=np.float64)), torch.from_numpy(deviation)
