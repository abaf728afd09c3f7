"""`normrnn sample RUN`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import parse
from normrnn.errors import UsageError


def run(arguments: list[str]) -> int:
    """Let a trained run write."""

    def options(
        run: Annotated[Positional[Path], arg(metavar="RUN")],
        tokens: int = 100,
        temperature: float = 1.0,
        prompt: str = "",
        seed: int | None = None,
    ) -> None:
        """Text drawn from the best model of a run.

        Args:
            run: Run directory.
            tokens: Words or characters to draw.
            temperature: Below 1: nearer to the likeliest words; above: wilder.
            prompt: Text to go on from.
            seed: The same seed gives the same text.
        """
        if tokens < 1:
            raise UsageError(f"--tokens must be at least 1, not {tokens}")
        if not temperature > 0:
            raise UsageError(f"--temperature must be positive, not {temperature}")
        if seed is not None and not 0 <= seed < 2**32:
            raise UsageError(f"--seed must lie in [0, 2**32), not {seed}")
        print(_sample(run, tokens, temperature, prompt, seed))

    parse(options, "sample", arguments)
    return 0


def _sample(run: Path, count: int, temperature: float, prompt: str, seed: int | None) -> str:
    import torch

    from normrnn.runs.environment import named_device
    from normrnn.runs.store import RunDirectory
    from normrnn.text.config import LanguageConfig
    from normrnn.text.sampling import Sampling, sample
    from normrnn.text.task import LanguageTask

    directory = RunDirectory(run)
    sampling = Sampling.of(directory.config(LanguageConfig), temperature)
    model = LanguageTask.load(directory, named_device("cpu"))
    vocabulary = model.vocabulary
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    given = vocabulary.begin(prompt)
    drawn = sample(model, [vocabulary.eos, *given], count, sampling, generator)
    return vocabulary.decode([*given, *drawn])
