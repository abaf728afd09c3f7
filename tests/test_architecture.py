"""Dependencies run one way, torch is imported late, and the public names are these."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import normrnn
import normrnn.nn
import normrnn.ops
from normrnn.recipes import RECIPES

PACKAGE = Path(normrnn.__file__).parent

BASE = {"errors", "files", "imports", "norms", "terminal", "version"}
"""Single modules at the bottom, in no room."""
MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"terminal"},
    "imports": set(),
    "version": set(),
    "norms": set(),
    "processes": {"errors", "files"},
    "files": {"errors"},
    "terminal": set(),
    "extras": {"errors"},
    "cli": {"errors", "terminal", "version"},
    "__main__": {"cli"},
    "ops": set(),
    "nn": {"imports", "ops", "norms"},
    "config": {"errors", "files", "norms"},
    "runs": {"config", "ops", *BASE},
    "engine": {"runs", "config", "nn", "ops", "processes", "extras", *BASE},
    "deploy": {"runs", "config", "nn", "ops", "extras", *BASE},
    "text": {"deploy", "engine", "runs", "config", "nn", "ops", *BASE},
    "speech": {"deploy", "engine", "runs", "config", "nn", "ops", "extras", "processes", *BASE},
    "arrays": {"deploy", "engine", "runs", "config", "nn", *BASE},
    "recipes": {"arrays", "text", "speech", "config", "norms"},
    "verdicts": {"errors", "files", "terminal"},
    "reporting": {"verdicts", "recipes", "runs", "config", "extras", *BASE},
    "analysis": {"engine", "config", "nn", "ops", "norms", "errors"},
}
"""Room, or single module -> the others that it may import. What is not here may not be."""
MAY_IMPORT["experiments"] = set(MAY_IMPORT) - {"__main__", "analysis", "deploy", "speech"}
"""Comparisons train and report; they know the arrays and the text that `sample` draws."""
ABOVE = {*MAY_IMPORT, "commands"}
MAY_IMPORT["commands"] = ABOVE - {"commands"}
OF_THE_PACKAGE = {"deploy", "nn", "reporting", "experiments", "imports", "version"}
MAY_IMPORT[""] = OF_THE_PACKAGE  # normrnn/__init__.py
TORCH_FREE = ["config", "recipes", "reporting", "verdicts"]
TORCH_FREE_MODULES = [
    *(f"text/{name}.py" for name in ("__init__", "config")),
    *(f"speech/{name}.py" for name in ("__init__", "config")),
    *(f"arrays/{name}.py" for name in ("__init__", "config")),
    *(f"runs/{name}.py" for name in ("__init__", "records")),
]


def module(file: Path) -> str:
    """normrnn/text/config.py -> normrnn.text.config."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


FILES = {module(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports(file: Path) -> set[str]:
    """Every module that a file imports, also inside functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where things come from"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else node.module for name in names}
    return found


def room(name: str) -> str:
    """normrnn.text.config -> text; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


def rooms(file: Path) -> set[str]:
    """The rooms that a file imports from."""
    return {room(name) for name in imports(file) if name.split(".")[0] == "normrnn"}


def files(folder: str) -> list[Path]:
    return [file for name, file in FILES.items() if room(name) == folder]


@pytest.mark.parametrize("name", FILES)
def test_only_these_rooms_are_imported(name: str) -> None:
    here = room(name)
    assert here in MAY_IMPORT, f"{here} is a new room: what may it import?"
    beyond = rooms(FILES[name]) - MAY_IMPORT[here] - {here}
    assert not beyond, f"{name} imports {beyond or 'the package itself'}"


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """A way round, if there is one."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            if found := walk(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := walk(node, []))), [])


def test_no_room_and_no_module_leads_back_to_itself() -> None:
    assert not cycle(MAY_IMPORT)
    assert not cycle({name: imports(file) - {name} for name, file in FILES.items()})
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize("folder", ["engine", "runs", "reporting", "analysis"])
def test_what_serves_every_task_names_none(folder: str) -> None:
    """No recipe by its name, no question of what class a config is."""
    for file in files(folder):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                assert node.value not in RECIPES, f"{file.name} names {node.value}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                kind = ast.unparse(node.args[1])
                assert not kind.endswith("Config"), f"{file.name} asks for {kind}"


def test_ops_need_torch_and_nothing_else() -> None:
    allowed = {"torch", "normrnn", *sys.stdlib_module_names}
    optional = {"triton_layer.py": {"triton"}}
    for file in files("ops"):
        own = allowed | optional.get(file.name, set())
        assert {name.split(".")[0] for name in imports(file)} <= own, file.name


def test_configs_and_reports_import_no_torch() -> None:
    some = [PACKAGE / name for name in TORCH_FREE_MODULES]
    for file in some + [file for folder in TORCH_FREE for file in files(folder)]:
        assert "torch" not in {name.split(".")[0] for name in imports(file)}, file.name


def test_the_check_itself_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from normrnn import reporting, __version__\n"
        "def f():\n    from normrnn import nn\n    import normrnn.engine.loop\n"
    )
    assert rooms(file) == {"nn", "engine", "reporting", ""}


@pytest.mark.parametrize(
    "code",
    [
        "import normrnn; normrnn.__version__; dir(normrnn)",
        "from normrnn.cli import main",
        "import normrnn.recipes",
        "import normrnn.commands.models, normrnn.reporting.study",
        "import normrnn; normrnn.reporting.load; normrnn.reporting.figure; normrnn.compare",
        "import normrnn.reporting.page, normrnn.commands.report, normrnn.reporting.result",
        "from normrnn.commands import training, about, prepare, models",
    ],
)
def test_torch_is_imported_late(code: str) -> None:
    check = f"{code}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


LAYERS = "GRU GRUCell LSTM LSTMCell LiGRU RNN RNNCell"
TOOLS = "backend batch_statistics convert fold initialise recalibrate replace replacing"
EXPERIMENTS = "Stream __version__ compare evaluate export load reporting sample train verdict"
"""A change here is a change of the API: it needs an entry in CHANGELOG.md."""


def test_public_names_are_pinned() -> None:
    assert sorted(normrnn.__all__) == sorted(f"{LAYERS} {TOOLS} {EXPERIMENTS}".split())
    assert dir(normrnn) == sorted(normrnn.__all__)
    for name in normrnn.__all__:
        assert getattr(normrnn, name) is not None
    assert normrnn.LSTM is normrnn.nn.LSTM
    assert sorted(normrnn.nn.__all__) == sorted(f"{LAYERS} {TOOLS} Normaliser".split())
    with pytest.raises(AttributeError, match="no attribute 'Lstm'"):
        normrnn.Lstm  # noqa: B018
    assert sorted(normrnn.ops.__all__) == list(normrnn.ops.__all__)
    for name in normrnn.ops.__all__:
        assert getattr(normrnn.ops, name) is not None
    assert "reference" not in normrnn.ops.__all__
