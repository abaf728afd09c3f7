"""Text that a language model writes."""

from dataclasses import dataclass

import torch

from normrnn.engine.statistics import evaluating
from normrnn.text.config import LanguageConfig
from normrnn.text.model import LanguageModel, State


@dataclass(frozen=True)
class Sampling:
    """How a network is read while it writes."""

    steps: int
    """Tokens of a window. With statistics kept per position the window's tokens are read again at
    every step, so that each meets the statistics of its own position; 1 otherwise."""
    carried: bool = True
    """Whether the state goes on from window to window. Where it does not, a full window is
    followed by one that begins with its second half."""
    temperature: float = 1.0

    @classmethod
    def of(cls, config: LanguageConfig, temperature: float) -> "Sampling":
        """As the network was trained."""
        carried = config.train.reading == "streams"
        again = config.model.time_steps or not carried
        return cls(config.train.steps if again else 1, carried, temperature)


@torch.no_grad()
def sample(
    model: LanguageModel,
    start: list[int],
    count: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> list[int]:
    """`count` ids that follow `start`, drawn one at a time."""
    steps = sampling.steps
    state: State | None = None
    window: list[int] = []
    drawn: list[int] = []
    feed = list(start)
    with evaluating(model):
        while True:
            for token in feed:
                window.append(token)
                logits, after = model(torch.tensor(window)[:, None], state)
                if len(window) == steps:
                    if sampling.carried:
                        state, window = after, []
                    else:
                        state, window = None, window[steps - steps // 2 :]
            if len(drawn) == count:
                return drawn
            last = logits[-1, 0]  # type: ignore[possibly-unbound]
            # From the largest down: however small the temperature, nothing overflows.
            scaled = (last - last.max()) / max(sampling.temperature, 1e-30)
            drawn.append(int(torch.multinomial(scaled.softmax(0), 1, generator=generator)))
            feed = drawn[-1:]
