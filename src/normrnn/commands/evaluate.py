"""`normrnn evaluate RUN`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import parse
from normrnn.console import PlainConsole


def run(arguments: list[str]) -> int:
    """Losses of a trained run."""

    def options(
        run: Annotated[Positional[Path], arg(metavar="RUN")],
        data: str = "",
        device: str = "cpu",
        threads: int = 0,
        one_stream: bool = True,
    ) -> None:
        """The best model of a run with running, recalibrated and batch statistics.

        Perplexities of a language model, cross entropy and error rate per frame of an acoustic one.

        Writes evaluation.json into the run directory, unless on other data than the run's.

        Args:
            run: Run directory.
            data: Where the data is now, if not where it was in training; or other data.
            device: Where to compute.
            threads: Threads of the tensor library; 0 is its own choice.
            one_stream: Also read the test text as one stream, as Zaremba did: slow for large nets.
        """
        from normrnn.engine.evaluate import evaluate, keep, show
        from normrnn.runs.environment import set_threads
        from normrnn.runs.store import RunDirectory

        set_threads(threads)
        result = evaluate(run, data, device, one_stream)
        show(result, RunDirectory(run).config(), PlainConsole())
        if result["same_data"]:
            keep(run, result)
        else:
            print(f"{data} is not what {run} was trained on: its evaluation.json is left alone")

    parse(options, "evaluate", arguments)
    return 0
