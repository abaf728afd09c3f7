"""Text that a language model writes."""

from dataclasses import dataclass

import torch

from normrnn.text.config import LanguageConfig
from normrnn.text.model import LanguageModel
from normrnn.text.reading import Reader


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
    reader = Reader(model, sampling.steps, sampling.carried, overlap=True)
    drawn: list[int] = []
    last = reader.push(start)[-1]
    while len(drawn) < count:
        # From the largest down: however small the temperature, nothing overflows.
        scaled = (last - last.max()) / max(sampling.temperature, 1e-30)
        drawn.append(int(torch.multinomial(scaled.softmax(0), 1, generator=generator)))
        if len(drawn) < count:
            last = reader.push(drawn[-1:])[0]
    return drawn
