"""Recurrent layers with a linear head: what the networks of all tasks share, and their weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from normrnn import norms
from normrnn.config.base import Measure
from normrnn.nn import GRU, LSTM, RNN, LiGRU
from normrnn.nn.base import Normalised
from normrnn.ops.layout import Steps
from normrnn.ops.regularise import locked_dropout
from normrnn.runs.records import Row

State = tuple[Tensor, ...]  # what flows from batch to batch, each (layers, B, H)
CHUNK_ROWS = 2048  # rows of logits in memory at once


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, on the device: reading its value would wait for the device."""

    total: Tensor  # summed over the targets
    errors: Tensor | None = None  # number of wrong classes, where they are counted
    # Differentiated instead of `total`, which the task divides by the number of targets or
    # sequences, as the objective: the same loss in other units.
    objective: Any = None
    state: State | None = None  # after the batch, of a network that carries one
    count: int = 0  # targets, on all ranks; set by the task


@dataclass
class Sums:
    """Sums over batches; those of a train row are part of the checkpoint."""

    total: float = 0.0  # sum of the losses over all targets
    count: int = 0  # targets
    errors: int | None = None  # wrong predictions, where they are counted
    figures: float = 0.0  # sum of what the measure's `batch_mean` computes
    batches: int = 0  # batches in `figures` and `grad_norm`
    grad_norm: float = 0.0

    def add(
        self,
        total: float,
        count: int,
        errors: int | None,
        measure: Measure,
        *,
        grad_norm: float = 0.0,
        is_full: bool = True,
    ) -> None:
        """Add a batch; a remainder does not count in means over batches."""
        if errors is not None:
            self.errors = errors + (self.errors or 0)
        self.total += total
        self.count += count
        if is_full:
            self.batches += 1
            self.grad_norm += grad_norm
            self.figures += measure.batch_mean[1](total / count) if measure.batch_mean else 0.0

    def row(self, measure: Measure) -> Row:
        """Return loss, error rate, count, mean over batches and further columns, as far as the
        measure has them."""
        loss = self.total / self.count
        row: Row = {"loss": loss}
        if measure.error_rate and self.errors is not None:
            row[measure.error_rate[0]] = self.errors / self.count
        row["count"] = self.count
        if measure.batch_mean:
            row[measure.batch_mean[0]] = self.figures / self.batches
        return {**row, **{key: convert(loss) for key, convert in measure.columns.items()}}


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a bᵀ + bias of (N, K) and (M, K).

    On a CPU in float32 by oneDNN, which torch itself uses for convolutions and lower precision
    only; its own choice takes up to twice the time on AMD processors (benchmarks/NOTES.md).
    """
    on_cpu = a.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    has_onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if on_cpu and has_onednn and a.numel() and b.numel():
        return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return F.linear(a, b, bias)


def _classify(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return nats and errors of a chunk, summed over its rows, and the gradients of rows, weight
    and bias; logits and probabilities share one buffer."""
    index = targets[:, None]
    z = _product(rows, weight, bias)
    errors = (z.argmax(1) != targets).sum()
    top = z.amax(1, keepdim=True)
    true = z.gather(1, index)
    total = z.sub_(top).exp_().sum(1, keepdim=True)
    nats = (total.log() + top - true).sum()
    z.div_(total)
    z.scatter_add_(1, index, z.new_full((1, 1), -1.0).expand_as(index))
    return nats, errors, _product(z, weight.T), _product(z.T, rows.T), z.sum(0)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss is a scalar, so its gradients are known up to a factor in the forward pass, and no
    logits are kept; double backward computes them again.

    `F.linear_cross_entropy` of torch 2.13 does the same in chunks, and is slower
    on a CPU than the two functions one after the other (benchmarks/NOTES.md).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunks = []
        for some, right in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
            chunks.append(_classify(some, weight, bias, right))
        nats, errors, d_rows, d_weight, d_bias = zip(*chunks, strict=True)
        d_rows = torch.cat(d_rows) if len(chunks) > 1 else d_rows[0]
        sums = (reduce(Tensor.add_, parts) for parts in (nats, errors, d_weight, d_bias))
        nats, errors, d_weight, d_bias = sums
        arguments = rows, weight, bias, targets
        ctx.save_for_backward(d_rows, d_weight, d_bias, *arguments)
        ctx.mark_non_differentiable(errors)
        return nats, errors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *gradients, rows, weight, bias, targets = ctx.saved_tensors
        scale = grads[0]
        if torch.is_grad_enabled():  # double backward
            logits = F.linear(rows, weight, bias)
            d = scale * (logits.softmax(1) - F.one_hot(targets, len(weight)))
            return d @ weight, d.T @ rows, d.sum(0), None
        return *(d * scale for d in gradients), None


def nats_and_errors(
    rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, *, count_errors: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the summed nats of `targets` (N,) under softmax(rows Wᵀ + b), and how many are wrong.
    rows (N, H), weight (C, H)."""
    kind = rows.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):  # sums need full precision
            rows = rows.to(weight.dtype)
            return nats_and_errors(rows, weight, bias, targets, count_errors=count_errors)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(rows, weight, bias, targets)
    nats, errors = rows.new_zeros(()), targets.new_zeros(())
    for some, right in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
        logits = _product(some, weight, bias)
        nats += F.cross_entropy(logits, right, reduction="sum")
        if count_errors:
            errors += (logits.argmax(1) != right).sum()
    return nats, errors


Sequences = Tensor | PackedSequence  # (T, B, I) of equal lengths, or packed, longest first
Generators = Callable[[str], torch.Generator]


def derived_seed(*parts: int | str) -> int:
    """Return a seed that depends on all `parts` and on nothing else."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:8], "little")


def generators_by_name() -> Generators:
    """Return a function from a parameter's name to a generator of its own.

    All depend on one draw from torch's generator. Variants of a network built from the same seed
    therefore start from the same values of the parameters that they share, whatever else they have.
    """
    base = int(torch.randint(2**62, (), device="cpu"))
    return lambda name: torch.Generator().manual_seed(derived_seed(base, name))


@torch.no_grad()
def glorot_(rnn: Normalised, decoder: nn.Linear, generators: Generators) -> None:
    """Draw U(-b, b), b = √(6/(I+H)), for each gate's own matrix; set biases to 0; keep γ and β.

    A stacked (4H, I) matrix counts as four of (H, I), a diagonal peephole as the diagonal of an
    (H, H) one.
    """
    H = rnn.hidden_size
    for name, parameter in rnn.named_parameters(recurse=False):
        if name.startswith("bias"):
            parameter.zero_()
        else:
            inputs = parameter.shape[1] if parameter.dim() == 2 else H
            bound = (6 / (inputs + H)) ** 0.5
            parameter.uniform_(-bound, bound, generator=generators(f"rnn.{name}"))
    nn.init.xavier_uniform_(decoder.weight, generator=generators("decoder.weight"))
    decoder.bias.zero_()


@torch.no_grad()
def train_one_bias(rnn: Normalised) -> None:
    """Train only one of torch's two biases, which get equal gradients, as long as they are two.

    Otherwise they would learn at twice the rate of β. ``bias_hh`` stays at zero; of a GRU's the
    candidate's part, which is inside r ⊙ (W_h h + b), is trained.
    """
    is_gru, inside = rnn.mode == "GRU", 2 * rnn.hidden_size

    def without_other_gates(grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(grad[:inside]), grad[inside:]])

    for name, bias in rnn.named_parameters(recurse=False):
        if "bias_hh" in name:
            bias[: inside if is_gru else None] = 0
            bias.requires_grad_(is_gru)
            if is_gru:
                bias.register_hook(without_other_gates)


class Dropout(nn.Dropout):
    """:class:`torch.nn.Dropout` of (T, B, F), or packed; ``kind="locked"``: one mask per sequence.

    >>> import torch
    >>> out = Dropout(0.5, "locked")(torch.ones(3, 2, 8))
    >>> torch.equal(out[0], out[2])
    True
    """

    def __init__(self, p: float = 0.5, kind: Literal["element", "locked"] = "element"):
        super().__init__(p)
        self.kind = kind

    def forward(self, input: Any) -> Any:
        if not self.training or self.p == 0:
            return input
        packed = isinstance(input, PackedSequence)
        rows = input.data if packed else input.flatten(0, 1)
        if self.kind == "element":
            rows = F.dropout(rows, self.p)
        else:
            steps = Steps.packed(input.batch_sizes) if packed else Steps.dense(*input.shape[:2])
            rows = locked_dropout(rows, steps, self.p)
        return input._replace(data=rows) if packed else rows.view_as(input)


class SequenceModel(nn.Module):
    """Recurrent layers, dropout between them and before a linear head, softmax.

    `options` are arguments of the layers: norm, gamma, eps, peephole, zoneout, ...
    """

    mean: Tensor  # (I,) of the features
    scale: Tensor  # factors (I,) of the features without their mean
    counts_errors = True

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: int,
        layers: int,
        *,
        cell: Literal["lstm", "rnn", "gru", "ligru"] = "lstm",
        norm: Any = None,
        bidirectional: bool = False,
        dropout: float = 0.0,
        dropout_kind: Literal["element", "locked"] = "element",
        **options: Any,
    ) -> None:
        super().__init__()
        if cell != "lstm":
            options.pop("peephole", None)
        if not norms.get(norm).takes_time_steps:
            options.pop("time_steps", None)
        options |= {"norm": norm, "bidirectional": bidirectional, "dropout_kind": dropout_kind}
        options["dropout"] = dropout if layers > 1 else 0.0  # torch warns about one layer
        kinds = {"lstm": LSTM, "rnn": RNN, "gru": GRU, "ligru": LiGRU}
        # The numbers that torch draws for a layer depend on its norm; `glorot` draws all again.
        with torch.random.fork_rng([]):
            self.dropout = Dropout(dropout, dropout_kind)
            self.rnn = kinds[cell](inputs, hidden, layers, **options)
            self.decoder = nn.Linear((1 + bidirectional) * hidden, outputs)

    def glorot(self) -> None:
        """Draw the weights: Glorot per gate, zero biases. γ and β keep their values."""
        glorot_(self.rnn, self.decoder, generators_by_name())
        train_one_bias(self.rnn)

    def standardised(self, sequences: Sequences) -> Any:
        """Return the sequences with standardised features."""
        if isinstance(sequences, PackedSequence):
            return sequences._replace(data=(sequences.data - self.mean) * self.scale)
        return (sequences - self.mean) * self.scale

    def features(self, inputs: Any, state: State | None = None) -> tuple[Tensor, State | None]:  # noqa: ARG002
        """Return what the head sees, rows (N, D·H), and the state after the last step."""
        output = self.dropout(self.rnn(self.standardised(inputs))[0])
        rows = output.data if isinstance(output, PackedSequence) else output.flatten(0, 1)
        return rows, None

    def loss(self, inputs: Any, targets: Tensor, state: State | None = None) -> Loss:
        """Return the cross entropy of the targets in nats, without keeping logits."""
        rows, state = self.features(inputs, state)
        weight, bias, count = self.decoder.weight, self.decoder.bias, self.counts_errors
        nats, errors = nats_and_errors(rows, weight, bias, targets.flatten(), count_errors=count)
        return Loss(nats, errors if count else None, state=state)
