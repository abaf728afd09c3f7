"""A recurrent policy on batches with resets: episodes of any length in windows of equal size.

    python examples/policy.py [--updates N]

Synthetic task: each frame shows a symbol; the action at the last frame of an episode is rewarded if
it is the first one's. Episodes follow each other in streams that are cut into windows, so a window
holds parts of several. ``resets`` says where one begins: there the state starts again, from one
that is learned. A policy without them cannot know. REINFORCE with a mean baseline. Prints (two
cores, six seconds):

    update 100: reward with resets 0.99, without 0.49
    update 200: reward with resets 1.00, without 0.51
    update 300: reward with resets 1.00, without 0.51
    update 400: reward with resets 1.00, without 0.50
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import normrnn

STREAMS, WINDOW, SYMBOLS = 64, 32, 3


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = normrnn.GRU(SYMBOLS, 48, norm="layer", learn_initial_state=True)
        self.head = nn.Linear(48, SYMBOLS)

    def forward(self, seen: Tensor, state: Any, resets: Tensor | None) -> tuple[Tensor, Any]:
        output, state = self.gru(seen, state, resets=resets)
        return self.head(output), state


class Streams:
    """Windows of episodes of 3 to 8 frames."""

    def __init__(self) -> None:
        self.left = self.wanted = torch.zeros(STREAMS, dtype=torch.long)

    def window(self) -> list[Tensor]:
        """Symbols (T, B), and (T, B) each: where an episode begins, where it ends, its first."""
        frames = []
        for _ in range(WINDOW):
            first, symbol = self.left == 0, torch.randint(SYMBOLS, (STREAMS,))
            self.left = torch.where(first, torch.randint(3, 9, (STREAMS,)), self.left) - 1
            self.wanted = torch.where(first, symbol, self.wanted)
            frames.append((symbol, first, self.left == 0, self.wanted))
        return [torch.stack(part) for part in zip(*frames, strict=True)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=400)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    streams, policies = Streams(), {"with resets": Policy(), "without": Policy()}
    optimizers = [torch.optim.Adam(p.parameters(), lr=1e-2) for p in policies.values()]
    states: list[Any] = [None, None]
    recent = [1 / SYMBOLS, 1 / SYMBOLS]
    for update in range(1, args.updates + 1):
        symbols, first, last, wanted = streams.window()
        seen = nn.functional.one_hot(symbols, SYMBOLS).float()
        for k, (name, policy) in enumerate(policies.items()):
            scores, state = policy(seen, states[k], first if name == "with resets" else None)
            states[k] = state.detach()  # an episode goes on in the next window
            choice = torch.distributions.Categorical(logits=scores[last])
            action = choice.sample()
            reward = (action == wanted[last]).float()
            optimizers[k].zero_grad()
            (-choice.log_prob(action) * (reward - reward.mean())).mean().backward()
            optimizers[k].step()
            recent[k] += 0.05 * (float(reward.mean()) - recent[k])
        if update % 100 == 0 or update == args.updates:
            words = ", ".join(f"{n} {r:.2f}" for n, r in zip(policies, recent, strict=True))
            print(f"update {update}: reward {words}")


if __name__ == "__main__":
    main()
