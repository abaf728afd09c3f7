"""The report in Chromium: desktop and phone, light and dark."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from normrnn.report.page import THEMES, page
from normrnn.report.runs import find
from normrnn.report.study import RecordedStudy
from tests.report.made_runs import make_run
from tests.report.test_page import contrast
from tests.report.test_study import TRIALS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: not installed")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
FLAGS += ["--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=5000"]

# No window is narrower than 500 pixels; a frame in it is.
FRAME = """<!doctype html><script>
addEventListener("message", e => { document.documentElement.dataset.measured = e.data; });
</script><iframe src="%s" style="border: 0; width: %dpx; height: 2000px"></iframe>"""
MEASURE = """<script>
const seen = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, at = node.parentElement;
  if (!node.textContent.trim() || at.closest("script, title, desc, style")) continue;
  const style = getComputedStyle(at);
  let ground = at;
  while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)")
    ground = ground.parentElement;
  const inside = at instanceof SVGElement;
  seen.push({
    text: node.textContent.trim().slice(0, 30), svg: inside,
    colour: inside ? style.fill : style.color,
    ground: getComputedStyle(ground || document.body).backgroundColor,
    size: inside ? at.getBBox().height * at.ownerSVGElement.getScreenCTM().a
                 : parseFloat(style.fontSize),
  });
}
parent.postMessage(JSON.stringify({
  width: innerWidth, needed: document.documentElement.scrollWidth,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  line: getComputedStyle(document.querySelector(".pictures [style*='--arm1']")).stroke,
  pictures: [...document.querySelectorAll("figure svg")].map(
    p => p.getBoundingClientRect().width),
  seen,
}), "*");
</script></body>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("runs")
    for norm in ("none", "frame"):
        for seed in (1, 2):
            make_run(parent, "ptb-small-authors", norm, seed, segments=2)
    make_run(parent, "ptb-small", until=300, name="<script>alert(1)<script>")
    file = parent / "report.html"
    text = page(find([parent]), studies=[RecordedStudy(parent, TRIALS)])
    file.write_text(text.replace("</body>", MEASURE))
    return file


def opened(report: Path, width: int, dark: bool, tmp_path: Path) -> dict[str, Any]:
    """What the page measures of itself; no message on the console."""
    assert CHROMIUM is not None
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME % (report.as_uri(), width))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    place = [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,2100"]
    done = subprocess.run(
        [CHROMIUM, *FLAGS, scheme, *place, "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    found = re.search(r'data-measured="([^"]*)"', done.stdout)
    assert found is not None
    return json.loads(unescape(found[1]))


def as_hex(colour: str) -> str:
    parts = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour)
    assert parts is not None, colour
    return "#" + "".join(f"{int(part):02x}" for part in parts.groups())


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_report_in_a_browser(report: Path, width: int, dark: bool, tmp_path: Path) -> None:
    found = opened(report, width, dark, tmp_path)
    assert found["width"] == width
    assert found["needed"] <= width, "the page scrolls sideways"
    assert found["dark"] is dark
    theme = THEMES["dark" if dark else "light"]
    assert as_hex(found["line"]) == theme["arm1"]
    assert found["pictures"]
    for size in found["pictures"]:
        assert min(width * 0.9, 320) <= size <= width
    texts = found["seen"]
    assert any("<script>alert(1)" in one["text"] for one in texts)
    assert sum(one["svg"] for one in texts) > 50
    for one in texts:
        assert contrast(as_hex(one["colour"]), as_hex(one["ground"])) >= 4.5, one
        assert one["size"] >= 10, one


def test_the_check_sees_a_console_error(report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text().replace("</main>", "</main><script>nothing()</script>"))
    with pytest.raises(AssertionError, match="CONSOLE"):
        opened(broken, 390, False, tmp_path)
