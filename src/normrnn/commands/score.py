"""`normrnn score RUN FILE`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import parse


def run(arguments: list[str]) -> int:
    """Score a text."""

    def options(
        run: Annotated[Positional[Path], arg(metavar="RUN")],
        file: Annotated[Positional[Path], arg(metavar="FILE")],
        lines: bool = False,
    ) -> None:
        """Perplexity of a text under the best model of a run, read as one stream, or as sequences
        from zero state if the run was trained on such.

        Args:
            run: Run directory.
            file: UTF-8 text.
            lines: Also print, for each line, its perplexity, tokens and text, tab-separated.
        """
        _score(run, file, lines)

    parse(options, "score", arguments)
    return 0


def _score(run: Path, file: Path, show_lines: bool) -> None:
    import torch

    from normrnn.config.measure import bits, perplexity
    from normrnn.runs.environment import named_device
    from normrnn.runs.store import RunDirectory
    from normrnn.text.config import LanguageConfig
    from normrnn.text.evaluation import read_ids, token_nats, window_for_one_stream
    from normrnn.text.files import read_lines
    from normrnn.text.load import load
    from normrnn.text.vocabulary import UNKNOWN, tokens

    directory = RunDirectory(run)
    model = load(directory, named_device("cpu"))
    assert model.vocabulary is not None
    vocabulary = model.vocabulary
    text = read_lines(file)
    ids = torch.from_numpy(vocabulary.encode(text))
    # The end of an imagined line before the text, so that its first word is predicted too.
    before = torch.tensor([vocabulary.eos])
    config = directory.config(LanguageConfig)
    stream = read_ids(config, torch.cat([before, ids]), 1)
    nats = token_nats(model, stream, window_for_one_stream(config))
    if show_lines:
        counts = [len(tokens(line, vocabulary.level)) for line in text]
        for line, part in zip(text, nats.split(counts), strict=True):
            print(f"{perplexity(part.mean().item()):.2f}\t{len(part)}\t{line}")
    loss = nats.double().mean().item()
    unknown = int((ids == vocabulary.index.get(UNKNOWN, -1)).sum())
    in_bits = f", {bits(loss):.4f} bits per character" if vocabulary.level == "char" else ""
    print(
        f"{file}: {len(nats):,} tokens ({unknown:,} {UNKNOWN}), loss {loss:.4f} nats{in_bits},"
        f" perplexity {perplexity(loss):,.2f}"
    )
