"""`normrnn posteriors RUN --data DIR --out PREFIX`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


def command(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    data: Annotated[Path, arg(metavar="DIR")],
    out: Annotated[Path, arg(metavar="PREFIX")],
    priors: bool = False,
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
        device: Where to compute.
        threads: Threads of the tensor library; 0 is its own choice.
    """
    from normrnn.runs.environment import set_threads
    from normrnn.speech.posteriors import write_posteriors

    set_threads(threads)
    utterances, frames = write_posteriors(run, data, out, priors, device)
    print(f"{out}.scp: {utterances:,} utterances, {frames:,} frames")
