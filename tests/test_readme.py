"""What the README shows, runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_python_blocks_run_in_order() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # asserts inside
    assert "plain" in names


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert link.startswith("http") or (ROOT / link).exists(), link
