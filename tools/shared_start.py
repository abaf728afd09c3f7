"""Which rule for time steps whose rows are all equal lets eval agree with training?

    python -m tools.shared_start [--updates 600] [--seeds 3]

Frame-wise normalisation has a variance of 0 at such a step, as at a start token that all sequences
share. The task: a GRU decoder with teacher forcing; the state tells the sequence, the first token
is <s>. Running statistics are shared over time, or kept with one slot per step.

Printed are the training loss of the last 50 updates and the loss in eval mode on the training
data, with running and with recalibrated statistics. The rules are written here in plain torch;
"normrnn" is what the package does.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normrnn

RULES = {
    "batch": "every step by the batch's statistics",
    "mean": "a constant step by the batch's mean and the running variance",
    "counted": "a constant step by the running statistics, which it updates",
    "feature": "a constant feature of a step by the running statistics, not updated",
    "step": "a constant step by the running statistics, not updated",
}
EPS, MOMENTUM, CONSTANT = 1e-5, 0.1, 1e-12


class FrameNorm(nn.Module):
    """Frame-wise batch normalisation of (T, B, C) by one of the rules."""

    def __init__(self, channels: int, rule: str, slots: int | None):
        super().__init__()
        self.rule, self.slots = rule, slots or 1
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.mean = torch.zeros(self.slots, channels)
        self.var, self.seen = torch.ones_like(self.mean), torch.zeros(self.slots)
        self.sums: Tensor | None = None

    def running(self, time: int) -> tuple[Tensor, Tensor]:
        """Of every step: the last slot updated, else the first one updated."""
        slot = torch.arange(self.slots)
        last = torch.where(self.seen > 0, slot, -1).cummax(0).values
        last = torch.where(last < 0, (self.seen > 0).to(torch.int64).argmax(), last)
        last = last[torch.arange(time).clamp(max=self.slots - 1)]
        return self.mean[last], self.var[last]

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(1), x.var(1, correction=0)
        old_mean, old_var = self.running(len(x))
        if self.rule == "feature":
            flat = var <= CONSTANT * mean.square()
        else:
            flat = var.sum(1, keepdim=True) <= CONSTANT * mean.square().sum(1, keepdim=True)
            flat = flat.expand_as(var)
        if self.training:
            counts = torch.ones_like(var)
            if self.rule in ("feature", "step"):
                counts = (~flat).to(var.dtype)
            self.update(mean.detach(), var.detach(), counts, x.shape[1])
        else:
            flat = torch.ones_like(flat)
        used_mean, used_var = torch.where(flat, old_mean, mean), torch.where(flat, old_var, var)
        if self.training and self.rule == "batch":
            used_mean, used_var = mean, var
        elif self.training and self.rule == "mean":
            used_mean = mean
        out = (x - used_mean[:, None]) * (used_var + EPS).rsqrt()[:, None]
        return out * self.weight + self.bias

    @torch.no_grad()
    def update(self, mean: Tensor, var: Tensor, counts: Tensor, rows: float | Tensor) -> None:
        """Running averages, or, while ``sums`` is not None, those of the whole data."""
        if self.slots == 1:
            whole = counts.sum(0, keepdim=True).clamp(min=1)
            pooled = (mean * counts).sum(0, keepdim=True) / whole
            var = ((var + (mean - pooled).square()) * counts).sum(0, keepdim=True) / whole
            rows, mean, counts = rows * whole, pooled, counts.amax(0, keepdim=True)
        if self.sums is not None:
            self.sums += torch.stack([counts, counts * mean, counts * (var + mean.square())])
            return
        share = MOMENTUM * counts
        if self.rule == "mean":  # the variance of a constant step is not one to keep
            flat = var.sum(1, keepdim=True) <= CONSTANT * mean.square().sum(1, keepdim=True)
            var = torch.where(flat, self.running(len(var))[1], var)
        self.mean += share * (mean - self.mean)
        self.var += share * (var * rows / (rows - 1) - self.var)
        self.seen += counts.amax(1)

    def adopt(self) -> None:
        assert self.sums is not None
        count, mean, squares = self.sums
        self.seen, self.sums = count.amax(1), None
        mean, square = mean / count.clamp(min=1), squares / count.clamp(min=1)
        self.mean = torch.where(count > 0, mean, self.mean)
        self.var = torch.where(count > 0, (square - mean.square()).clamp(min=0), self.var)


class GRU(nn.Module):
    """h_t = GRU(BN(W_x x_t), h_{t-1}), one layer."""

    def __init__(self, inputs: int, hidden: int, rule: str, slots: int | None):
        super().__init__()
        like: dict[str, Tensor] = dict(nn.GRU(inputs, hidden).named_parameters())
        self.w_x, self.w_h = like["weight_ih_l0"], like["weight_hh_l0"]
        self.b_n = like["bias_hh_l0"]
        self.norm = FrameNorm(3 * hidden, rule, slots)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for gates in self.norm(x @ self.w_x.t()):
            (r, z, n), (hr, hz, hn) = gates.chunk(3, 1), (h @ self.w_h.t() + self.b_n).chunk(3, 1)
            n, z = torch.tanh(n + torch.sigmoid(r + hr) * hn), torch.sigmoid(z + hz)
            h = n + z * (h - n)
            outputs.append(h)
        return torch.stack(outputs), h


def make_gru(inputs: int, hidden: int, rule: str, slots: int | None) -> GRU | normrnn.GRU:
    if rule == "normrnn":
        return normrnn.GRU(inputs, hidden, norm="frame", time_steps=slots)
    return GRU(inputs, hidden, rule, slots)


class Decoder(nn.Module):
    """The state tells which of 200 sequences of 8 tokens is wanted; the first input is <s>."""

    time, hidden = 8, 48

    def __init__(self, rule: str, slots: bool):
        super().__init__()
        self.rnn = make_gru(16, self.hidden, rule, self.time if slots else None)
        self.tokens, self.start = nn.Embedding(13, 16), nn.Embedding(200, self.hidden)
        self.head = nn.Linear(self.hidden, 12)

    def loss(self, batch: Tensor) -> Tensor:
        which, targets = batch[0], batch[1:]
        inputs = torch.cat([torch.full_like(targets[:1], 12), targets[:-1]])
        h = torch.tanh(self.start(which))
        if isinstance(self.rnn, normrnn.GRU):
            h = h[None]
        output = self.rnn(self.tokens(inputs), h)[0]
        return F.cross_entropy(self.head(output).flatten(0, 1), targets.flatten())

    @staticmethod
    def data() -> Tensor:
        """(1 + T, sequences): the number of each, then its tokens."""
        return torch.cat([torch.arange(200)[None], torch.randint(12, (Decoder.time, 200))])


def batches(data: Tensor, size: int = 50) -> Iterator[Tensor]:
    """One epoch in random order."""
    yield from data[:, torch.randperm(data.shape[1])].split(size, 1)


@torch.no_grad()
def recalibrate(model: Decoder, data: Tensor) -> None:
    def run(_: nn.Module, batch: Tensor) -> None:
        model.loss(batch)

    if isinstance(model.rnn, normrnn.GRU):
        normrnn.recalibrate(model, list(batches(data)), run)
        return
    norm = model.rnn.norm
    norm.sums = torch.zeros(3, *norm.mean.shape)
    model.train()
    for batch in batches(data):
        model.loss(batch)
    norm.adopt()


@torch.no_grad()
def eval_loss(model: Decoder, data: Tensor) -> float:
    model.eval()
    losses = [float(model.loss(batch)) for batch in batches(data)]
    return sum(losses) / len(losses)


def measure(data: Tensor, rule: str, slots: bool, updates: int) -> tuple[float, float, float]:
    """Losses: training, eval with running statistics, with recalibrated ones."""
    model = Decoder(rule, slots)
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    while len(losses) < updates:
        for batch in batches(data):
            model.train()
            loss = model.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    running = eval_loss(model, data)
    recalibrate(model, data)
    return sum(losses[-50:]) / 50, running, eval_loss(model, data)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args(arguments)
    print("slots   rule     train  running  recalibrated")
    for slots in (False, True):
        for rule in (*RULES, "normrnn"):
            found = []
            for seed in range(args.seeds):
                torch.manual_seed(seed)
                found.append(measure(Decoder.data(), rule, slots, args.updates))
            train, running, again = (sum(x) / len(x) for x in zip(*found, strict=True))
            kind = "steps" if slots else "shared"
            print(f"{kind:7} {rule:8} {train:5.3f}  {running:7.3f}  {again:.3f}")


if __name__ == "__main__":
    main()
