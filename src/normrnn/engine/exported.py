"""A network that runs an ONNX session, to measure its loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from normrnn.engine.sums import Loss, State


class Exported(nn.Module):
    """A session with inputs (T, B) or (T, B, F), then `lengths` (B,) or states, and outputs per
    step (T, B, C) or per sequence (B, C), then states."""

    def __init__(self, session: Any, per_step: bool = True, is_regression: bool = False) -> None:
        super().__init__()
        self.session, self.per_step, self.is_regression = session, per_step, is_regression

    def loss(self, inputs: Any, targets: Tensor, state: State | None = None) -> Loss:
        """Return the summed cross entropy and the errors, or the squared error."""
        lengths = None
        if isinstance(inputs, PackedSequence):
            # Sequences are sorted by length already; their order before that does not matter.
            inputs, lengths = pad_packed_sequence(PackedSequence(*inputs[:2]))
        first, *others = self.session.get_inputs()
        values = {first.name: inputs.numpy()}
        if [put.name for put in others] == ["lengths"]:
            same = torch.full((inputs.shape[1],), len(inputs))
            values["lengths"] = (same if lengths is None else lengths).numpy()
        else:
            for i, put in enumerate(others):
                zeros = torch.zeros(put.shape[0], inputs.shape[1], put.shape[2])
                values[put.name] = (zeros if state is None else state[i]).numpy()
        output, *after = map(torch.from_numpy, self.session.run(None, values))
        if lengths is not None and self.per_step:
            output = pack_padded_sequence(output, lengths).data
        output = output.flatten(0, -2)
        if self.is_regression:
            return Loss((output - targets.reshape(output.shape)).square().mean(1).sum())
        targets = targets.flatten()
        nats = F.cross_entropy(output, targets, reduction="sum")
        return Loss(nats, (output.argmax(1) != targets).sum(), state=tuple(after) or None)
