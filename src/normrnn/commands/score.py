"""`normrnn score RUN FILE`."""

import hashlib
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import parse
from normrnn.errors import UserError


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
            file: UTF-8 text; - is standard input, line by line as they come, --lines implied.
            lines: Also print, for each line, its perplexity, tokens and text, tab-separated.
        """
        if str(file) == "-":
            _score_input(run)
        else:
            _score(run, file, lines)

    parse(options, "score", arguments)
    return 0


def _score(run: Path, file: Path, show_lines: bool) -> None:
    from normrnn.config.measure import perplexity
    from normrnn.runs.environment import named_device
    from normrnn.runs.store import RunDirectory
    from normrnn.text.config import LanguageConfig
    from normrnn.text.files import read_blocks
    from normrnn.text.reading import Reader
    from normrnn.text.task import LanguageTask
    from normrnn.text.vocabulary import UNKNOWN, tokens

    directory = RunDirectory(run)
    config = directory.config(LanguageConfig)
    model = LanguageTask.load(directory, named_device("cpu"))
    vocabulary = model.vocabulary
    text = "".join(read_blocks(file, hashlib.sha256())).split("\n")[:-1]
    ids = vocabulary.encode(text).tolist()
    # The end of an imagined line before the text, so that its first word is predicted too.
    nats = Reader.as_trained(model, config).nats([vocabulary.eos, *ids])
    if show_lines:
        counts = [len(tokens(line, vocabulary.level)) for line in text]
        for line, part in zip(text, nats.split(counts), strict=True):
            print(f"{perplexity(part.mean().item()):.2f}\t{len(part)}\t{line}")
    unknown = ids.count(vocabulary.index.get(UNKNOWN, -1))
    print(_total(str(file), vocabulary.level, nats.double().sum().item(), len(nats), unknown))


def _total(name: str, level: str, nats: float, count: int, unknown: int) -> str:
    from normrnn.config.measure import bits, perplexity
    from normrnn.text.vocabulary import UNKNOWN

    loss = nats / count
    in_bits = f", {bits(loss):.4f} bits per character" if level == "char" else ""
    return (
        f"{name}: {count:,} tokens ({unknown:,} {UNKNOWN}), loss {loss:.4f} nats{in_bits},"
        f" perplexity {perplexity(loss):,.2f}"
    )


def _score_input(run: Path) -> None:
    """Each line of standard input is scored, in the light of those before it, when it comes."""
    import torch
    import torch.nn.functional as F

    from normrnn.config.measure import perplexity
    from normrnn.runs.environment import named_device
    from normrnn.runs.store import RunDirectory
    from normrnn.text.config import LanguageConfig
    from normrnn.text.files import decoded
    from normrnn.text.reading import Reader
    from normrnn.text.task import LanguageTask
    from normrnn.text.vocabulary import UNKNOWN

    directory = RunDirectory(run)
    config = directory.config(LanguageConfig)
    model = LanguageTask.load(directory, named_device("cpu"))
    vocabulary = model.vocabulary
    reader = Reader.as_trained(model, config)
    last, nats, count, unknown, offset = vocabulary.eos, 0.0, 0, 0, 0
    for raw in sys.stdin.buffer:
        line = decoded(raw, "standard input", offset).removesuffix("\n")
        offset += len(raw)
        ids = vocabulary.encode([line]).tolist()
        logits = reader.push([last, *ids[:-1]])
        lost = F.cross_entropy(logits, torch.tensor(ids), reduction="none").double().sum().item()
        print(f"{perplexity(lost / len(ids)):.2f}\t{len(ids)}\t{line}", flush=True)
        last, nats, count = ids[-1], nats + lost, count + len(ids)
        unknown += ids.count(vocabulary.index.get(UNKNOWN, -1))
    if not count:
        raise UserError("standard input is empty")
    print(_total("standard input", vocabulary.level, nats, count, unknown))
