"""The card of a run or an export: Markdown beside the model, which itself is not read."""

from pathlib import Path

from normrnn.deploy.card import About, of_run
from normrnn.deploy.export import CARD, SUFFIXES
from normrnn.errors import UserError
from normrnn.files import open_regular
from normrnn.runs.names import CONFIG
from normrnn.runs.store import RunDirectory

_LARGEST_CARD = 1 << 20


def info(path: Path, settings: bool = False) -> str:
    """Return the card as Markdown, of a run with its settings if asked.

    Raise UserError for a path that is neither a run nor an export with its card.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    folder = path if path.is_dir() else path.parent
    if (folder / CONFIG).exists():
        about = of_run(RunDirectory(folder))
        return about.card() if settings else about.short()
    if path.is_dir():
        cards = [path / CARD]
    elif path.suffix in SUFFIXES.values():
        cards = [path.with_suffix(".md"), folder / CARD]
    else:
        cards = [path]
    for card in cards:
        if card.exists() and About.is_card(text := _read(card)):
            return text
    raise UserError(f"{path} is neither a run nor an export with its card ({cards[0].name})")


def _read(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read(_LARGEST_CARD).decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
