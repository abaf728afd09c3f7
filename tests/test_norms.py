"""The table of normalisations: one row each, asked by everybody, needing no torch."""

import ast
from pathlib import Path

import normrnn
from normrnn import norms

PACKAGE = Path(normrnn.__file__).parent


def test_rows_of_the_paper() -> None:
    paper = "none sequence frame hidden layer recurrent whiten"
    assert {*paper.split(" ")} <= {*norms.names()}
    assert norms.names()[0] == "none"
    assert [n for n in norms.names() if norms.get(n).looks_ahead] == ["sequence", "whiten"]
    for name in ("none", "layer"):
        assert not norms.get(name).keeps_statistics
    assert norms.get(None) is norms.get("none")
    assert norms.get("hidden").acts == "step"
    assert norms.get("frame").takes_time_steps
    assert not norms.get("sequence").takes_time_steps


def comparisons(file: Path) -> list[str]:
    """Places where something called norm is held against a name from the table."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        lookup = isinstance(node, ast.Call | ast.Subscript) and isinstance(
            getattr(getattr(node, "func", node), "value", None), ast.Dict
        )
        if isinstance(node, ast.Compare) or lookup:
            inside = list(ast.walk(node))
            names = {getattr(n, "id", "") + getattr(n, "attr", "") for n in inside}
            constants = {n.value for n in inside if isinstance(n, ast.Constant)}
            by_name = {n for n in constants if isinstance(n, str)} & set(norms.names())
            if any("norm" in n.lower() for n in names) and (by_name or "BASELINE" in names):
                found.append(f"{file.name}: {ast.unparse(node)}")
    return found


def test_nobody_else_compares_a_norm_by_name() -> None:
    """The reference does: it is read beside the paper, which has these names."""
    files = set(PACKAGE.rglob("*.py")) - {PACKAGE / "norms.py"}
    assert len(files) > 50
    assert [place for file in sorted(files) for place in comparisons(file)] == []
