"""`normrnn evaluate RUN`."""

from typing import Annotated

from tyro.conf import arg

from normrnn.commands.options import RunArgument
from normrnn.console import PlainConsole


def command(
    run: RunArgument,
    data: Annotated[str, arg(metavar="DATA")] = "",
    device: str = "cpu",
    threads: int = 0,
    one_stream: bool = True,
) -> None:
    """Evaluate the best model of a run with running, recalibrated and batch statistics.

    Writes evaluation.json into the run directory, unless on other data than the run's.

    Args:
        run: Run directory.
        data: Where the data is now, if it moved; or other data.
        device: Where to compute.
        threads: Threads of the tensor library; 0 is its own choice.
        one_stream: Also read the test text as one stream, as Zaremba did: slow for large nets.
    """
    from normrnn.engine.evaluate import show
    from normrnn.experiments.training import evaluate
    from normrnn.runs.environment import set_threads
    from normrnn.runs.store import RunDirectory

    set_threads(threads)
    result = evaluate(run, data, device=device, one_stream=one_stream, keep=False)
    show(result, RunDirectory(run).config(), PlainConsole())
    if result["same_data"]:
        from normrnn.engine.evaluate import keep

        keep(run, result)
    else:
        print(f"{data} is not what {run} was trained on: its evaluation.json is left alone")
