"""Networks on features that run an ONNX session, to measure their loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from normrnn.engine.task import Loss


class ExportedClassifier(nn.Module):
    """A session with inputs `features` (T, B, F) and `lengths` (B,), and outputs per step (T, B, C)
    or per sequence (B, C): logits or log posteriors, or values."""

    def __init__(self, session: Any, per_step: bool = True, values: bool = False) -> None:
        super().__init__()
        self.session, self.per_step, self.values = session, per_step, values

    def loss(self, sequences: Tensor | PackedSequence, targets: Tensor) -> Loss:
        """Return the summed cross entropy and the errors, or the squared error of values."""
        if isinstance(sequences, PackedSequence):
            # Sequences are sorted by length already; their order before that does not matter.
            rows = PackedSequence(sequences.data, sequences.batch_sizes)
            features, lengths = pad_packed_sequence(rows)
        else:
            features = sequences
            lengths = torch.full((sequences.shape[1],), len(sequences))
        given = {"features": features.numpy(), "lengths": lengths.numpy()}
        output = torch.from_numpy(self.session.run(None, given)[0])
        if self.per_step:
            output = pack_padded_sequence(output, lengths).data
        if self.values:
            return Loss((output - targets.reshape(output.shape)).square().mean(1).sum())
        nats = F.cross_entropy(output, targets, reduction="sum")
        return Loss(nats, (output.argmax(1) != targets).sum())
