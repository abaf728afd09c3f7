"""The documentation: its code runs, its links lead somewhere, its prose is short."""

import contextlib
import inspect
import io
import re
import shlex
from pathlib import Path

import pytest

import normrnn
from normrnn.cli import COMMANDS
from normrnn.commands.recipes import NEEDS
from normrnn.recipes import RECIPES
from tools.figures import texts as drawn

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINE = 105
"""Characters in a line of the site at 1280 pixels."""
GENERATED = {"layers", "tools", "laboratory", "commands", "settings"}
"""Pages of the reference that the build writes from the code."""
PUBLIC = {
    *("RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"),
    *("recalibrate", "batch_statistics", "fold", "convert", "replace", "replacing", "initialise"),
    "backend",
    *("export", "Stream", "compare", "verdict", "train", "evaluate", "sample", "load"),
    *("reporting", "__version__"),
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def prose(text: str) -> list[str]:
    """Paragraphs and list items, without code, tables, headings and comments."""
    text = re.sub(r"^(`{3,}|:{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<picture>.*?</picture>", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [
            line for line in paragraph.splitlines() if not line.lstrip().startswith(("|", "#"))
        ]
        items = re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
        parts += [" ".join(item.split()) for item in items if item.strip()]
    return parts


def cells(text: str) -> list[str]:
    """The cells of all tables, without the addresses of links."""
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [
        re.sub(r"\]\(.*?\)", "]", cell) for row in rows for cell in re.split(r" ?(?<!\\)\| ?", row)
    ]


def test_paragraphs_and_cells_are_found() -> None:
    text = "# A\none\ntwo\n\n- item\n  more\n- next\n\n```sh\ncode\n```\n\n| a | b c |\n|---|---|\n"
    assert prose(text) == ["one two", "- item more", "- next"]
    assert {"a", "b c"} <= {*cells(text)}


@pytest.mark.parametrize("page", NAMES)
def test_no_paragraph_is_over_five_lines(page: str) -> None:
    for paragraph in prose((ROOT / page).read_text()):
        assert len(paragraph) <= 5 * LINE, f"{len(paragraph)} characters: {paragraph[:80]}…"


@pytest.mark.parametrize("page", NAMES)
def test_no_cell_is_over_fifteen_words(page: str) -> None:
    for cell in cells((ROOT / page).read_text()):
        assert len(cell.split()) <= 15, cell


@pytest.mark.parametrize("page", [name for name in NAMES if blocks(name, "python")])
def test_python_blocks_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, page, "exec"), names)  # asserts inside


def test_pages_that_show_the_layers_have_such_blocks() -> None:
    for page in (
        "README.md",
        *(f"docs/guides/{n}.md" for n in ("moving", "statistics", "lengths")),
    ):
        assert blocks(page, "python"), page


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(
        r'src(?:set)?="([^"]+)"', text
    ):
        assert link.startswith("http") or ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", NAMES)
def test_commands_and_recipes_exist(page: str) -> None:
    for line in "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["normrnn"]:
            assert words[1] in COMMANDS, line
            if words[1] in ("train", "compare", "search"):
                assert words[2] in RECIPES or ":" in words[2] or "/" in words[2], line


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_described(name: str) -> None:
    text = (DOCS / "reference" / "recipes.md").read_text()
    assert f"\n## {name}\n" in text
    (row,) = re.findall(rf"^\| \[`{name}`\]\(#{name}\) \|(.*)\|$", text, re.MULTILINE)
    data, epoch, epochs = (cell.strip() for cell in row.split("|"))
    assert (data.replace("`", ""), epoch) == NEEDS[name]
    assert int(epochs) == RECIPES[name]().epochs


def test_public_names() -> None:
    """A change here is a change of the API: it needs an entry in CHANGELOG.md."""
    assert set(normrnn.__all__) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_every_public_name_is_in_the_reference_with_an_example(name: str) -> None:
    reference = "".join((DOCS / "reference" / f"{page}.md").read_text() for page in GENERATED)
    assert re.search(rf":: normrnn\.{name}$", reference, re.MULTILINE)
    thing = getattr(normrnn, name)
    example = ">>> " in (inspect.getdoc(thing) or "")
    assert example or any(f"normrnn.{name}" in b for page in NAMES for b in blocks(page, "python"))


def test_there_are_at_most_25_pages_to_read() -> None:
    read = [
        page
        for page in DOCS.rglob("*.md")
        if page.parent.name != "results" and page.stem not in GENERATED
    ]
    assert len(read) <= 25, sorted(page.name for page in read)


def test_the_readme_fits_on_one_screen() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 70
    assert len(" ".join(prose(text)).split()) <= 300


def test_pictures_are_fresh_and_shown() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    for path, text in drawn().items():
        assert (ROOT / path).read_text() == text, "run `python -m tools.figures`"
    for picture in [*DOCS.rglob("*.png"), *DOCS.rglob("*.svg")]:
        assert picture.name in pages, f"nothing shows {picture.name}"
