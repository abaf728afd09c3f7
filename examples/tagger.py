"""A tagger of ragged batches with ``lengths=``: nothing is packed, padding is never read.

    python examples/tagger.py [--updates N]

Synthetic data: numbers one after the other; is each larger than the mean of all so far? Trains
normrnn.GRU on padded batches (NaN in the padding, to show that it is not read), folds it, and tags
with the folded model, which still takes lengths. Prints (two cores, four seconds):

    update 50: accuracy 0.92
    update 100: accuracy 0.95
    update 150: accuracy 0.96
    update 200: accuracy 0.96
    folded: GRU(1, 32, batch_first=True, norm=None), the same tags: True
"""

import argparse

import torch
from torch import Tensor, nn

import normrnn

NAN = float("nan")


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = normrnn.GRU(1, 32, batch_first=True, norm="sequence")
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        return self.head(self.gru(x, lengths=lengths)[0])  # 0 in the padding


def make_data(count: int) -> tuple[Tensor, Tensor, list[int]]:
    """(B, T, 1) with NaN in the padding, tags (B, T) with -100 there, and lengths."""
    lengths = torch.randint(5, 41, (count,)).tolist()
    x = torch.full((count, max(lengths), 1), NAN)
    tags = torch.full((count, max(lengths)), -100)
    for b, n in enumerate(lengths):
        values = torch.randn(n) * 3 + torch.randn(()) * 5
        x[b, :n, 0] = values
        mean = values.cumsum(0) / torch.arange(1, n + 1)
        tags[b, :n] = (values > mean).long()
    return x, tags, lengths


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=200)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x_test, tags_test, lengths_test = make_data(200)
    for update in range(1, args.updates + 1):
        x, tags, lengths = make_data(32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, lengths).flatten(0, 1), tags.flatten()).backward()
        optimizer.step()
        if update % 50 == 0 or update == args.updates:
            model.eval()
            guess = model(x_test, lengths_test).argmax(2)
            real = tags_test >= 0
            print(f"update {update}: accuracy {(guess == tags_test)[real].float().mean():.2f}")
            model.train()
    model.eval()
    folded = normrnn.fold(model)  # ours without a norm, because lengths= were seen
    same = torch.equal(
        folded(x_test, lengths_test).argmax(2), model(x_test, lengths_test).argmax(2)
    )
    print(f"folded: {folded.gru}, the same tags: {same}")


if __name__ == "__main__":
    main()
