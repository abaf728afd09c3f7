"""`normrnn recipes`."""

from normrnn.commands.options import entry
from normrnn.recipes import RECIPES

NEEDS = {
    "quickstart": ("no data, or a text", "3 s"),
    "ptb-small": ("Penn Treebank", "6 min"),
    "ptb-small-authors": ("Penn Treebank", "5 min"),
    "ptb-small-regularised": ("Penn Treebank", "4 min"),
    "ptb-medium": ("Penn Treebank", "16 min"),
    "ptb-large": ("Penn Treebank", "2 h"),
    "ptb-char": ("Penn Treebank, or a text", "4 min"),
    "wsj": ("WSJ, prepared with Kaldi", ""),
    "librispeech-mini": ("an hour of LibriSpeech", "10 min"),
    "librispeech-mini-small": ("an hour of LibriSpeech", "2 min"),
    "librispeech-mini-depth": ("an hour of LibriSpeech", "2 min"),
    "arrays": ("an .npz file of your own", ""),
    "adding": ("no data: generated", "3 s"),
    "sequential-mnist": ("the four MNIST files", "10 min"),
    "permuted-mnist": ("the four MNIST files", "10 min"),
}
"""Recipe -> its data, and an epoch on one core; empty where it depends on the data."""


def command() -> None:
    """List the recipes: what each reproduces, the data it needs and how long an epoch takes."""
    for name in RECIPES:
        data, epoch = NEEDS.get(name, ("", ""))
        epochs = f"{RECIPES[name]().epochs} epochs" + (f" of {epoch}" if epoch else "")
        needs = "; ".join(filter(None, [f"needs {data}" if data else "", epochs]))
        print(f"{entry(name)}\n{' ' * 24}{needs}")
    print("\nTimes are for one core; compare trains as many runs at a time as there are cores.")
