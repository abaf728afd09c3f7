"""`normrnn prepare ptb DIR`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.commands.options import parse
from normrnn.errors import UsageError


def run(arguments: list[str]) -> int:
    """Check or make the data of a recipe."""
    kinds = {"ptb": _ptb}
    usage = f"usage: normrnn prepare {{{','.join(kinds)}}} DIR"
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"{usage}\n\n  ptb   check that DIR holds Penn Treebank as the paper used it")
        return 0
    if not arguments or arguments[0] not in kinds:
        named = f", not {arguments[0]!r}" if arguments else ""
        raise UsageError(f"prepare needs one of {', '.join(kinds)}{named}; {usage}")
    return kinds[arguments[0]](arguments[1:])


def _ptb(arguments: list[str]) -> int:
    def options(directory: Annotated[Positional[Path], arg(metavar="DIR")]) -> None:
        """Check that DIR holds the three files of Penn Treebank, whole and unchanged.

        Args:
            directory: Where ptb.train.txt, ptb.valid.txt and ptb.test.txt are.
        """
        from normrnn.data.ptb import check_ptb

        for name, count in check_ptb(directory).items():
            print(f"{name}: {count:,} tokens, intact")
        print(f"ready: normrnn train ptb-small --data {directory}")

    parse(options, "prepare ptb", arguments)
    return 0
