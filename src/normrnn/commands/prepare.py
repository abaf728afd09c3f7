"""`normrnn prepare`: check or make the data of a recipe."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import EXAMPLES, parse
from normrnn.commands.prepare_speech import kaldi, librispeech
from normrnn.errors import UsageError

KINDS = {
    "ptb": "check that DIR holds Penn Treebank as the paper used it",
    "librispeech": "features and aligned labels of a folder in LibriSpeech's layout",
    "kaldi": "features and labels of Kaldi data and alignment directories",
}


def run(arguments: list[str]) -> int:
    """Check or make the data of a recipe."""
    usage = f"usage: normrnn prepare {{{','.join(KINDS)}}} ..."
    if arguments and arguments[0] in ("-h", "--help"):
        listed = "\n".join(f"  {name:<12} {text}" for name, text in KINDS.items())
        example = EXAMPLES["prepare librispeech"]
        print(f"{usage}\n\n{listed}\n\nexample: {example}")
        print("normrnn prepare NAME --help lists the options.")
        return 0
    if not arguments or arguments[0] not in KINDS:
        named = f", not {arguments[0]!r}" if arguments else ""
        raise UsageError(f"prepare needs one of {', '.join(KINDS)}{named}; {usage}")
    kind, *rest = arguments
    function = {"ptb": ptb, "librispeech": librispeech, "kaldi": kaldi}[kind]
    return parse(function, f"prepare {kind}", rest)


def ptb(directory: Annotated[Positional[Path], arg(metavar="DIR")]) -> int:
    """Check that DIR holds the three files of Penn Treebank, whole and unchanged.

    Args:
        directory: Where ptb.train.txt, ptb.valid.txt and ptb.test.txt are.
    """
    from normrnn.text.ptb import check_ptb

    for name, count in check_ptb(directory).items():
        print(f"{name}: {count:,} tokens, intact")
    print(f"ready: normrnn train ptb-small --data {directory}")
    return 0
