"""`normrnn recipes`."""

from rich.table import Table

from normrnn.console import PlainConsole
from normrnn.errors import UsageError
from normrnn.recipes import RECIPES, summary


def run(arguments: list[str]) -> int:
    """List the recipes."""
    if arguments in (["-h"], ["--help"]):
        print("usage: normrnn recipes\n\nLists the recipes with what they reproduce.")
        return 0
    if arguments:
        raise UsageError(f"recipes takes no arguments, not {arguments[0]!r}")
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("reproduces")
    for name in RECIPES:
        table.add_row(name, summary(name))
    PlainConsole().print(table)
    return 0
