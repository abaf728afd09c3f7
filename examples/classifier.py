"""A classifier of packed sequences: nn.LSTM, and normrnn.LSTM in its place, trained alike.

    python examples/classifier.py [--epochs N] [--sequences N]

Synthetic data: noise with a slow wave of one of three periods. Features are standardised.
On this easy problem normalisation does not help. Prints (two cores, five seconds):

    epoch 5: accuracy on held-out sequences  nn.LSTM 1.00   normrnn.LSTM 0.94
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import normrnn

PERIODS = 5.0, 7.0, 10.0
Data = list[tuple[Tensor, int]]


class Classifier(nn.Module):
    def __init__(self, kind: type[nn.LSTM]):
        super().__init__()
        self.lstm = kind(10, 32, bidirectional=True)  # the one line that differs
        self.head = nn.Linear(64, len(PERIODS))

    def forward(self, x: PackedSequence) -> Tensor:
        _, (h, _) = self.lstm(x)
        return self.head(torch.cat([h[0], h[1]], 1))


def make_data(count: int) -> Data:
    data: Data = []
    for _ in range(count):
        label, length = int(torch.randint(3, ())), int(torch.randint(12, 37, ()))
        phase = torch.rand(()) * 6.3
        wave = torch.sin(torch.arange(length) * 6.3 / PERIODS[label] + phase)
        scales = torch.logspace(-1, 1, 10)
        data.append(((torch.randn(length, 10) + wave[:, None]) * scales + 3 * scales, label))
    return data


def standardised(data: Data, by: Data) -> Data:
    """Features with mean 0 and variance 1 over the frames of `by`, the training data."""
    frames = torch.cat([x for x, _ in by])
    return [((x - frames.mean(0)) / frames.std(0), label) for x, label in data]


def batches(data: Data, size: int) -> list[tuple[PackedSequence, Tensor]]:
    batched = []
    for first in range(0, len(data), size):
        x, y = zip(*data[first : first + size], strict=True)
        batched.append((pack_sequence(list(x), enforce_sorted=False), torch.tensor(y)))
    return batched


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=800)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    data, test_data = make_data(args.sequences), make_data(300)
    train = batches(standardised(data, by=data), 32)
    test = batches(standardised(test_data, by=data), 100)
    models = {"nn.LSTM": Classifier(nn.LSTM), "normrnn.LSTM": Classifier(normrnn.LSTM)}
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3) for m in models.values()]
    for epoch in range(1, args.epochs + 1):
        scores = []
        for (name, model), optimizer in zip(models.items(), optimizers, strict=True):
            model.train()
            for x, y in train:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            model.eval()
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
            scores.append(f"{name} {right / 300:.2f}")
        print(f"epoch {epoch}: accuracy on held-out sequences  {'   '.join(scores)}")


if __name__ == "__main__":
    main()
