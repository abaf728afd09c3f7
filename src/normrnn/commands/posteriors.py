"""`normrnn posteriors RUN --data DIR --out PREFIX`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.errors import UsageError


def command(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    data: Annotated[Path, arg(metavar="DIR")],
    out: Annotated[Path, arg(metavar="PREFIX")],
    priors: bool = False,
    prior_floor: float | None = None,
    device: str = "cpu",
    threads: int = 0,
) -> None:
    """Natural-log posteriors per frame and state, as Kaldi's decoders read them.

    Writes PREFIX.ark and PREFIX.scp.

    Args:
        run: Run directory.
        data: Kaldi directory with feats.scp, of the features the network was trained on.
        out: Where to write.
        priors: Subtract the log priors of the states: scaled log-likelihoods, which is what a
            hybrid decoder wants.
        prior_floor: With --priors, training frames that a state counts as having at least; 1
            unless given.
        device: Where to compute.
        threads: Threads of the tensor library; 0 is its own choice.
    """
    from normrnn.runs.environment import set_threads
    from normrnn.speech.posteriors import write_posteriors

    if prior_floor is not None and not priors:
        raise UsageError("--prior-floor needs --priors")
    set_threads(threads)
    floor = (1.0 if prior_floor is None else prior_floor) if priors else None
    utterances, frames = write_posteriors(run, data, out, floor, device)
    print(f"{out}.scp: {utterances:,} utterances, {frames:,} frames")
