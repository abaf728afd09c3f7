"""The documentation: its code runs, its links lead somewhere, its prose is short."""

import contextlib
import importlib.util
import inspect
import io
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

import normrnn
from normrnn.cli import COMMANDS
from normrnn.recipes import RECIPES
from tools.figures import texts as drawn

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
NOTEBOOKS = [str(path.relative_to(ROOT)) for path in sorted(DOCS.rglob("*.ipynb"))]
LINE = 105
"""Characters in a line of the site at 1280 pixels."""
NEEDED = re.compile(r"^```python needs=(\w+)$", re.MULTILINE)
"""The package that a block of code needs."""
GENERATED = {"layers", "tools", "laboratory", "commands", "settings"}
"""Pages of the reference that the build writes from the code."""


def blocks(page: str, language: str, packages: Iterable[str] = ()) -> list[str]:
    """The code blocks of a page, with those that need one of `packages`, in order."""
    infos = "|".join(["", *(f" needs={name}" for name in packages)])
    pattern = rf"```{language}(?:{infos})\n(.*?)```"
    return re.findall(pattern, (ROOT / page).read_text(), re.DOTALL)


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


def markdown(page: str) -> str:
    """The text of a page, or of the cells of a notebook."""
    text = (ROOT / page).read_text()
    if not page.endswith(".ipynb"):
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


@pytest.mark.parametrize("page", [*NAMES, *NOTEBOOKS])
def test_paragraphs_and_cells_are_short(page: str) -> None:
    for paragraph in prose(markdown(page)):
        assert len(paragraph) <= 5 * LINE, f"{len(paragraph)} characters: {paragraph[:80]}…"
    for cell in cells(markdown(page)):
        assert len(cell.split()) <= 15, cell


def run_blocks(page: str, packages: Iterable[str] = ()) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python", packages):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, page, "exec"), names)  # asserts inside


@pytest.mark.parametrize("page", [name for name in NAMES if blocks(name, "python")])
def test_python_blocks_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(page)


@pytest.mark.parametrize(
    "page", [name for name in NAMES if NEEDED.search((ROOT / name).read_text())]
)
@pytest.mark.filterwarnings("ignore")
def test_python_blocks_that_need_other_packages(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run where they are installed, which the development environment does not do."""
    packages = set(NEEDED.findall((ROOT / page).read_text()))
    if not (installed := {name for name in packages if importlib.util.find_spec(name)}):
        pytest.skip(f"none of {', '.join(sorted(packages))} is installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    run_blocks(page, installed)


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
    data, _, epochs = (cell.strip() for cell in row.split("|"))
    assert int(epochs) == RECIPES[name]().epochs
    assert data.startswith("no data") == bool(RECIPES[name]().data)


@pytest.mark.parametrize("name", sorted({*normrnn.__all__} - {"__version__"}))
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
