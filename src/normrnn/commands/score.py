"""`normrnn score RUN FILE`."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import RunArgument
from normrnn.errors import UserError


def command(
    run: RunArgument,
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
    from normrnn.config.measure import bits
    from normrnn.runs.environment import named_device
    from normrnn.runs.store import RunDirectory
    from normrnn.text.config import LanguageConfig, perplexity
    from normrnn.text.reading import Reader
    from normrnn.text.task import LanguageTask
    from normrnn.text.vocabulary import UNKNOWN

    directory = RunDirectory(run)
    config = directory.config(LanguageConfig)
    model = LanguageTask.load(directory, named_device("cpu"))
    vocabulary = model.vocabulary
    reader = Reader.as_trained(model, config)
    is_input = str(file) == "-"
    # The end of an imagined line before the text, so that its first word is predicted too.
    last, nats, count, unknown = vocabulary.eos, 0.0, 0, 0
    for line in _input_lines() if is_input else _file_lines(file):
        ids = vocabulary.encode([line]).tolist()
        lost = reader.nats([last, *ids]).double().sum().item()
        if lines or is_input:
            print(f"{perplexity(lost / len(ids)):.2f}\t{len(ids)}\t{line}", flush=True)
        last, nats, count = ids[-1], nats + lost, count + len(ids)
        unknown += ids.count(vocabulary.index.get(UNKNOWN, -1))
    name = "standard input" if is_input else str(file)
    if not count:
        raise UserError(f"{name} is empty")
    loss = nats / count
    in_bits = f", {bits(loss):.4f} bits per character" if vocabulary.level == "char" else ""
    print(
        f"{name}: {count:,} tokens ({unknown:,} {UNKNOWN}), loss {loss:.4f} nats{in_bits},"
        f" perplexity {perplexity(loss):,.2f}"
    )


def _file_lines(file: Path) -> list[str]:
    from normrnn.text.files import read_blocks

    return "".join(read_blocks(file, hashlib.sha256())).split("\n")[:-1]


def _input_lines() -> Iterator[str]:
    """Yield lines as they come."""
    from normrnn.text.files import decoded

    offset = 0
    for raw in sys.stdin.buffer:
        yield decoded(raw, "standard input", offset).removesuffix("\n")
        offset += len(raw)
