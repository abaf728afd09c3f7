"""Directives that write the reference of commands and settings from the package itself."""

import contextlib
import dataclasses
import inspect
import io
import os
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from normrnn import cli
from normrnn.config.base import Config
from normrnn.recipes import RECIPES

_TASKS = ("arrays", "quickstart", "librispeech-mini")
"""One recipe of every kind of task: their settings are listed."""
_EXAMPLE_RECIPE = "quickstart"


def help_text(arguments: list[str]) -> str:
    """Return what `normrnn ARGUMENTS --help` prints, 80 columns wide."""
    output = io.StringIO()
    old = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            cli.main([*arguments, "--help"])
    finally:
        if old is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = old
    return re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue()).rstrip()


def settings(kind: type, prefix: str = "", default: Any = None) -> Iterator[tuple[str, str, str]]:
    """Yield dotted name, default and description of every setting of a config."""
    hints = get_type_hints(kind, include_extras=True)
    texts = _field_texts(kind)
    for field in dataclasses.fields(kind):
        if "Suppress" in str(hints[field.name]):
            continue
        value = getattr(default, field.name, dataclasses.MISSING)
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from settings(type(value), f"{name}.", value)
        else:
            yield name, repr(value), texts.get(field.name, "")


def _field_texts(kind: type) -> dict[str, str]:
    """Return the string below each field, of the class itself and of those it derives from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            source = inspect.getsource(base)
            pattern = r'^    (\w+): [^\n]*(?:\n {8}[^\n]*)*?\n(?:    \)\n)?    """(.*?)"""'
            for name, text in re.findall(pattern, source, re.DOTALL | re.MULTILINE):
                found[name] = " ".join(text.split())
    return found


class Commands(SphinxDirective):
    """One section per command with its help."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for name, text in cli.COMMANDS.items():
            section = nodes.section(ids=[f"normrnn-{name}"], names=[f"normrnn {name}"])
            section += nodes.title(name, name)
            section += nodes.paragraph(text, f"{text[0].upper()}{text[1:]}.")
            calls = [[name]]
            if name in ("train", "compare", "search"):
                calls.append([name, _EXAMPLE_RECIPE])
            for call in calls:
                shown = help_text(call)
                block = nodes.literal_block(shown, shown, language="text")
                section += block
            self.state.document.note_explicit_target(section)
            found.append(section)
        return found


class Settings(SphinxDirective):
    """One table of settings per kind of task."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for name in _TASKS:
            config: Config = RECIPES[name]()
            title = f"{name}"
            section = nodes.section(ids=[f"settings-{nodes.make_id(name)}"], names=[title])
            section += nodes.title(title, title)
            section += _table(list(settings(type(config), default=config)))
            self.state.document.note_explicit_target(section)
            found.append(section)
        return found


def _table(rows: list[tuple[str, str, str]]) -> nodes.table:
    group = nodes.tgroup(cols=3)
    for width in (28, 14, 58):
        group += nodes.colspec(colwidth=width)
    head, body = nodes.thead(), nodes.tbody()
    group += head
    group += body
    for parent, cells in [(head, ("setting", "default", "meaning")), *((body, r) for r in rows)]:
        row = nodes.row()
        for number, cell in enumerate(cells):
            entry = nodes.entry()
            code = parent is body and number < 2
            text = nodes.literal(cell, cell) if code else nodes.Text(cell)
            entry += nodes.paragraph("", "", text)
            row += entry
        parent += row
    return nodes.table("", group)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("normrnn-commands", Commands)
    app.add_directive("normrnn-settings", Settings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
