"""`normrnn sample RUN`."""

from normrnn.commands.options import RunArgument


def command(
    run: RunArgument,
    tokens: int = 100,
    temperature: float = 1.0,
    prompt: str = "",
    seed: int | None = None,
) -> None:
    """Draw text from the best model of a run.

    Args:
        run: Run directory.
        tokens: Words or characters to draw.
        temperature: Below 1: nearer to the likeliest words; above: wilder.
        prompt: Text to continue.
        seed: The same seed gives the same text.
    """
    from normrnn.experiments.training import sample

    print(sample(run, tokens, temperature=temperature, prompt=prompt, seed=seed))
