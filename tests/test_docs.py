"""What README and docs show, runs, and leads somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from normrnn.cli import COMMANDS
from normrnn.recipes import RECIPES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [name for name in NAMES if blocks(name, "python")])
def test_python_blocks_run_in_order(page: str) -> None:
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)  # asserts inside
    assert "normrnn" in names


def test_pages_that_show_the_layers_have_such_blocks() -> None:
    for page in ("README.md", "docs/moving.md", "docs/statistics.md"):
        assert len(blocks(page, "python")) >= 2, page


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        assert link.startswith("http") or ((ROOT / page).parent / link).exists(), link


@pytest.mark.parametrize("page", NAMES)
def test_commands_and_recipes_exist(page: str) -> None:
    for line in "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["normrnn"]:
            assert words[1] in COMMANDS, line
            if words[1] in ("train", "compare", "search"):
                assert words[2] in RECIPES, line


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_page(name: str) -> None:
    page = (ROOT / "docs" / "recipes" / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n")


def test_the_readmes_tree_is_the_packages() -> None:
    text = (ROOT / "README.md").read_text()
    tree = text.split("```\nsrc/normrnn/\n")[1].split("```")[0]
    inside, outside = ({*re.findall(rf"^{at}(\w+)/", tree, re.MULTILINE)} for at in ("  ", ""))
    package = ROOT / "src" / "normrnn"
    assert inside == {path.parent.name for path in package.glob("*/__init__.py")}
    for name in outside:
        assert (ROOT / name).is_dir(), name


def test_no_picture_lies_about() -> None:
    pages = "".join(page.read_text() for page in [*PAGES, ROOT / "RESULTS.md"])
    for picture in (ROOT / "docs").rglob("*.png"):
        assert picture.name in pages, f"nothing shows {picture.name}"
