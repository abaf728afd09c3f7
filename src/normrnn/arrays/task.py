"""Network and task of arrays: classes or values, per sequence or per step."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normrnn.arrays.config import ArrayConfig
from normrnn.arrays.read import read_arrays
from normrnn.deploy.networks import Exportable
from normrnn.engine.model import Loss, SequenceModel, Sequences, State
from normrnn.engine.task import Split, Task, Tensors, evenly_spread
from normrnn.errors import UserError

LABELS = "labels"  # entry in the header of model.safetensors: the labels of the classes


class ArrayModel(SequenceModel):
    """Standardised features, recurrent layers, and a linear head.

    Buffers: `mean` and `scale` (F,) of the features, `target_mean` and `target_scale` (O,) of
    values. The head sees every step, or the last state of both directions. `labels` are those of
    the classes, where known.
    """

    target_mean: Tensor
    target_scale: Tensor

    def __init__(
        self,
        config: ArrayConfig,
        features: int,
        outputs: int,
        time_steps: int = 0,
        labels: Sequence[Any] | None = None,
    ) -> None:
        m = config.model
        options = {"time_steps": time_steps or None, **m.options(config.normalisation)}
        super().__init__(features, outputs, bidirectional=m.bidirectional, **options)
        self.per_step, self.values = config.target_per == "step", config.target == "values"
        self.labels = labels
        for part, size in (("", features), ("target_", outputs)):
            self.register_buffer(f"{part}mean", torch.zeros(size))
            self.register_buffer(f"{part}scale", torch.ones(size))
        self.glorot()

    def features(self, inputs: Sequences, state: State | None = None) -> tuple[Tensor, None]:  # noqa: ARG002
        """Return what the head sees: rows (N, D·H) of all steps, or (B, D·H)."""
        output = self._seen(inputs)
        return output.data if isinstance(output, PackedSequence) else output.flatten(0, -2), None

    def _seen(self, inputs: Sequences, lengths: Tensor | None = None) -> Any:
        """Return the output of every step, (T, B, D·H) or packed, or the last state (B, D·H)."""
        options = {} if lengths is None else {"lengths": lengths}  # a folded layer is torch's
        output, state = self.rnn(self.standardised(inputs), **options)
        if self.per_step:
            return self.dropout(output)
        last = state[0] if isinstance(state, tuple) else state
        h = last[-(1 + self.rnn.bidirectional) :].transpose(0, 1).flatten(1)
        return self.dropout(h[None])[0]

    def forward(self, features: Sequences, lengths: Tensor | None = None) -> Tensor:
        """Return logits, or values in the units of the targets, per step or per sequence.

        `features` are padded (T, B, F) with `lengths` (B,), or packed; then steps are rows (N, O).
        """
        seen = self._seen(features, lengths)
        output = self.decoder(seen.data if isinstance(seen, PackedSequence) else seen)
        return output * self.target_scale + self.target_mean if self.values else output

    def loss(self, inputs: Sequences, targets: Tensor, state: State | None = None) -> Loss:
        """Return the cross entropy, or the squared error in the units of the targets, averaged over
        outputs; the standardised error is differentiated."""
        if not self.values:
            return super().loss(inputs, targets, state)
        output = self.decoder(self.features(inputs)[0]).float()
        wanted = (targets.reshape(len(output), -1) - self.target_mean) / self.target_scale
        squared = (output - wanted).square()
        total = (squared.detach() * self.target_scale.square()).mean(1).sum()
        return Loss(total, objective=squared.mean(1).sum())

    def exportable(self) -> Exportable:
        """Return the network with arguments to trace `forward` with."""
        example = torch.zeros(5, 3, len(self.mean)), torch.tensor([5, 4, 2])
        dynamic = {"features": {0: "T", 1: "B"}, "lengths": {0: "B"}}
        notes = {} if self.labels is None else {LABELS: json.dumps(self.labels)}
        return Exportable(self, example, dynamic, notes=notes)


class ArrayTask(Task):
    """Batches of whole sequences."""

    network = ArrayModel
    size_tensors: ClassVar = {"features": "mean", "outputs": "target_mean"}
    config: ArrayConfig
    model: ArrayModel

    def __init__(self, config: ArrayConfig) -> None:
        self.arrays = arrays = read_arrays(config)
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
        if steps < 0:
            longest = int(train.lengths.max())
            steps = longest if (train.lengths == longest).all() else 0
        features, outputs = train.rows.shape[1], arrays.outputs
        self.sizes = {"features": features, "outputs": outputs, "time_steps": steps}
        if arrays.labels is not None:
            self.sizes[LABELS] = arrays.labels.tolist()
            self.metadata = {LABELS: json.dumps(self.sizes[LABELS])}
        is_scored = np.zeros(len(train.lengths), bool)
        is_scored[evenly_spread(config.evaluation.train_sequences, len(is_scored))] = True
        self.has_train_eval = bool(is_scored.any())
        splits = {**arrays.splits, "train_eval": train.take(is_scored)}
        self.lengths = {split: one.lengths.tolist() for split, one in splits.items()}
        self._data = {
            split: tuple(map(torch.from_numpy, (one.rows, one.targets, one.lengths, one.starts)))
            for split, one in splits.items()
        }

    @classmethod
    def saved_sizes(cls, weights: Tensors, metadata: Any) -> dict[str, Any]:
        """Return the sizes of a saved network."""
        running = weights.get("rnn.norm_l0.running_mean", torch.empty(0))
        time_steps = len(running) if running.dim() == 2 else 0
        labels = json.loads(metadata.get(LABELS, "null"))  # older runs have none
        sizes = super().saved_sizes(weights, metadata)
        return {**sizes, "time_steps": time_steps, LABELS: labels}

    @classmethod
    def open(cls, config: ArrayConfig, model: ArrayModel | None = None) -> "ArrayTask":
        """Read the data of a config; UserError if it does not fit the model to evaluate on it."""
        task = super().open(config, model)
        labels = task.sizes.get(LABELS)
        if model is not None and model.labels not in (None, labels):
            raise UserError(f"{task.where} has labels {labels!r:.60}, not {model.labels!r:.60}")
        return task

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
