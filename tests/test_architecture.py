"""Dependencies run one way, torch is imported late, and the public names are these."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import normrnn
import normrnn.nn
import normrnn.ops

PACKAGE = Path(normrnn.__file__).parent

# What each folder may import of the package.
MAY_IMPORT = {
    "config": {"config"},
    "ops": {"ops"},
    "nn": {"nn", "ops"},
    "recipes": {"recipes", "config", "text", "speech"},
}
NEVER = {"engine": {"search", "commands"}}
NEVER["search"] = {"commands", "nn", "ops"}
NEVER["report"] = {"nn", "engine", "ops", "text", "speech"}  # run directories only
TORCH_FREE = ["config", "recipes", "report"]


def imports(file: Path) -> set[str]:
    """Every module that a file imports anywhere, functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where things come from"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts(file: Path) -> set[str]:
    """The folders of normrnn that a file imports from."""
    return {
        pieces[1]
        for name in imports(file)
        if (pieces := name.split("."))[0] == "normrnn"
        and len(pieces) > 1
        and (PACKAGE / pieces[1]).is_dir()
    }


def files(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_dependencies_run_one_way(folder: str) -> None:
    assert files(folder)
    for file in files(folder):
        assert parts(file) <= MAY_IMPORT[folder], (
            f"{file.relative_to(PACKAGE)} imports {parts(file)}"
        )


@pytest.mark.parametrize("folder", NEVER)
def test_and_never_these(folder: str) -> None:
    for file in files(folder):
        assert not parts(file) & NEVER[folder], f"{file.relative_to(PACKAGE)} imports {parts(file)}"


def test_ops_need_torch_and_nothing_else() -> None:
    allowed = {"torch", "normrnn", *sys.stdlib_module_names}
    for file in files("ops"):
        assert {name.split(".")[0] for name in imports(file)} <= allowed, file.name


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_configs_import_no_torch(folder: str) -> None:
    for file in files(folder):
        assert "torch" not in {name.split(".")[0] for name in imports(file)}, file.name


def test_the_check_itself_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def f():\n    from normrnn import nn\n    import normrnn.engine.loop\n")
    assert parts(file) == {"nn", "engine"}


@pytest.mark.parametrize(
    "code",
    [
        "import normrnn; normrnn.__version__; dir(normrnn)",
        "from normrnn.cli import main",
        "import normrnn.recipes",
        "import normrnn.commands.search, normrnn.commands.gradients, normrnn.report.study",
        "import normrnn; normrnn.report.load; normrnn.report.figure; normrnn.compare",
        "import normrnn.report.write, normrnn.commands.report",
    ],
)
def test_torch_is_imported_late(code: str) -> None:
    check = f"{code}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_pinned() -> None:
    assert sorted(normrnn.__all__) == [
        "GRU",
        "LSTM",
        "RNN",
        "__version__",
        "batch_statistics",
        "compare",
        "convert",
        "fold",
        "load",
        "recalibrate",
        "report",
    ]
    assert dir(normrnn) == sorted(normrnn.__all__)
    for name in normrnn.__all__:
        assert getattr(normrnn, name) is not None
    assert normrnn.LSTM is normrnn.nn.LSTM
    assert sorted(normrnn.nn.__all__) == [
        "GRU",
        "LSTM",
        "Normaliser",
        "RNN",
        "batch_statistics",
        "convert",
        "fold",
        "recalibrate",
    ]
    with pytest.raises(AttributeError, match="no attribute 'Lstm'"):
        normrnn.Lstm  # noqa: B018


def test_ops_names_exist() -> None:
    assert sorted(normrnn.ops.__all__) == list(normrnn.ops.__all__)
    for name in normrnn.ops.__all__:
        assert getattr(normrnn.ops, name) is not None
    assert "reference" not in normrnn.ops.__all__
