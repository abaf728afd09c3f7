"""A tagger under torch.compile, beside the same one uncompiled.

    python examples/compiled.py [--updates N]

Compiling takes a while (and a C++ compiler); what it gains is around the recurrence, which is one
call of compiled code either way. Prints (two cores, fifteen seconds):

    largest difference of the first losses, eager and compiled: 1.2e-07
    update 50: loss 0.19
"""

import argparse
import copy

import torch
from torch import Tensor, nn

import normrnn


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = normrnn.LSTM(8, 32, norm="frame", batch_first=True)
        self.body = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.lstm(x)[0])


def make_data() -> tuple[Tensor, Tensor]:
    """(B, T, 8), and whether the first feature is larger than the frame before."""
    x = torch.randn(32, 30, 8)
    before = torch.cat([torch.zeros(32, 1), x[:, :-1, 0]], 1)
    return x, (x[..., 0] > before).long()


def loss_of(model: nn.Module, x: Tensor, tags: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), tags.flatten())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=50)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    eager = Tagger()
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True)
    models = [eager, compiled]
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in models]
    worst, loss = 0.0, torch.zeros(())
    for update in range(1, args.updates + 1):
        x, tags = make_data()
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, x, tags)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if update <= 5:
            worst = max(worst, abs(losses[0] - losses[1]))
    print(f"largest difference of the first losses, eager and compiled: {worst:.1e}")
    print(f"update {args.updates}: loss {loss:.2f}")


if __name__ == "__main__":
    main()
