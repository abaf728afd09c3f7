"""Text drawn from a language model."""

from dataclasses import dataclass

import torch

from normrnn.text.config import LanguageConfig
from normrnn.text.model import LanguageModel
from normrnn.text.reading import Reader


@dataclass(frozen=True)
class Sampling:
    """How tokens are read back while drawing."""

    steps: int
    """Tokens of a window, which are read again at every step where statistics are kept per
    position; 1 otherwise."""
    carried: bool = True
    """Whether the state is carried from window to window; else the next window begins with the
    second half of the last."""
    temperature: float = 1.0

    @classmethod
    def of(cls, config: LanguageConfig, temperature: float) -> "Sampling":
        """Return the settings of training."""
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
    """Draw `count` ids that follow `start`, one at a time."""
    reader = Reader(model, sampling.steps, sampling.carried, overlap=True)
    drawn: list[int] = []
    last = reader.push(start)[-1]
    while len(drawn) < count:
        # Relative to the largest, so that a small temperature does not overflow.
        scaled = (last - last.max()) / max(sampling.temperature, 1e-30)
        drawn.append(int(torch.multinomial(scaled.softmax(0), 1, generator=generator)))
        if len(drawn) < count:
            last = reader.push(drawn[-1:])[0]
    return drawn
