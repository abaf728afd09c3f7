"""`normrnn recipes`."""

from normrnn.commands.options import entry
from normrnn.recipes import RECIPES


def recipes() -> None:
    """List the recipes: what each reproduces, the length of training and whether it needs data."""
    for name, recipe in RECIPES.items():
        config = recipe()
        needs = "" if config.data else ", --data needed"
        print(f"{entry(name)}\n{' ' * 24}{config.epochs} epochs{needs}")
