"""`normrnn score RUN FILE`."""

import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import RunArgument


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
    from normrnn.files import open_regular
    from normrnn.text.config import perplexity
    from normrnn.text.corpus import UNKNOWN, text_lines
    from normrnn.text.reading import Reader

    reader = Reader.of_run(run)
    vocabulary = reader.model.vocabulary
    is_input = str(file) == "-"
    name = "standard input" if is_input else str(file)
    # The end of an imagined line before the text, so that its first word is predicted too.
    last, nats, count, unknown = vocabulary.eos, 0.0, 0, 0
    with sys.stdin.buffer if is_input else open_regular(file) as text:
        for line in text_lines(text, name):
            ids = vocabulary.encode(line)
            lost = reader.nats([last, *ids]).double().sum().item()
            if lines or is_input:
                print(f"{perplexity(lost / len(ids)):.2f}\t{len(ids)}\t{line}", end="", flush=True)
            last, nats, count = ids[-1], nats + lost, count + len(ids)
            unknown += ids.count(vocabulary.index.get(UNKNOWN, -1))
    loss = nats / count
    in_bits = f", {bits(loss):.4f} bits per character" if vocabulary.level == "char" else ""
    print(
        f"{name}: {count:,} tokens ({unknown:,} {UNKNOWN}), loss {loss:.4f} nats{in_bits},"
        f" perplexity {perplexity(loss):,.2f}"
    )
