"""The HTML report and what `compare` returns."""

import base64
import math
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import normrnn
from normrnn.reporting.pictures import COLOURS, figure
from normrnn.reporting.result import Result
from normrnn.reporting.runs import find, load
from normrnn.reporting.study import RecordedStudy
from tests.reporting.made_runs import make_run
from tests.reporting.test_study import TRIALS

PICTURE = "data:image/svg+xml;base64,"


class Reader(HTMLParser):
    """All tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("runs")
    return [
        make_run(parent, "ptb-small-authors", norm, seed, segments=2)
        for norm in ("none", "frame")
        for seed in (1, 2)
    ]


@pytest.fixture(scope="module")
def text(runs: list[Path]) -> str:
    every = [*TRIALS, {**TRIALS[0], "trial": 9, "arms": {"none": TRIALS[0]["arms"]["none"]}}]
    studies = [RecordedStudy(Path("made"), every, problem="made is damaged")]
    return Result(*find(runs), studies=studies).page()


def test_the_page_leads_with_the_lines_of_the_terminal(runs: list[Path], text: str) -> None:
    plain = unescape(text)
    for line in normrnn.verdict(list(runs)).lines():
        assert line in plain
    section = text[text.index('id="s1"') :]
    assert section.index("<pre") < section.index("<img") < section.index("<table")


def test_nothing_comes_from_elsewhere_and_references_lead_somewhere(text: str) -> None:
    assert "http" not in re.sub(r"base64,[\w+/=]*", "", text).lower()
    assert "@import" not in text
    tags = Reader(text).tags
    ids = Counter(attributes["id"] for _, attributes in tags if "id" in attributes)
    assert max(ids.values()) == 1
    for tag, attributes in tags:
        assert tag not in ("script", "iframe", "object", "svg")
        assert not any(name.startswith("on") for name in attributes)
        for name in attributes.get("aria-labelledby", "").split():
            assert ids[name] == 1, name
        if tag == "a":
            assert ids[attributes["href"].removeprefix("#")] == 1
        if tag == "img":
            assert attributes["alt"]
            drawn = base64.b64decode(attributes["src"].removeprefix(PICTURE))
            assert b"<script" not in drawn
            assert drawn.rstrip().endswith(b"</svg>")
        if tag == "th":
            assert "scope" in attributes


def luminance(colour: str) -> float:
    """WCAG 2: relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read(text: str) -> None:
    pairs = re.findall(r"--(\w+): (#[0-9a-f]{6})", text)
    themes = dict(pairs[: len(pairs) // 2]), dict(pairs[len(pairs) // 2 :])
    assert themes[0].keys() == themes[1].keys()
    for theme in themes:
        for ground in ("page", "box", "warn"):
            assert contrast(theme["text"], theme[ground]) >= 7
            assert contrast(theme["quiet"], theme[ground]) >= 4.5
        assert contrast(theme["link"], theme["page"]) >= 4.5
    assert min(contrast(colour, "#ffffff") for colour in COLOURS) >= 4.5


def test_text_of_runs_is_text_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    make_run(tmp_path, evil, name="one", data=f"/home/{evil}", note=f"{evil}&amp;", until=300)
    damaged = make_run(tmp_path, norm="frame") / "metrics.jsonl"
    damaged.write_text(damaged.read_text() + "what\n" * 2)
    (tmp_path / "empty").mkdir()
    text = Result(*find([tmp_path, tmp_path / "empty"]), title=evil).page()
    assert "<script" not in text
    for words in ("&lt;script&gt;", "not finished", "is damaged", "it is empty"):
        assert words in text


def test_a_result_is_short_and_saves_a_report(runs: list[Path], tmp_path: Path) -> None:
    result = Result(*find(runs))
    assert len(repr(result)) < 200
    assert max(map(len, str(result).splitlines())) <= 80
    assert "frame" in result._repr_html_()
    assert [run.label for run in result.runs][::2] == ["none, seed 1", "frame, seed 1"]
    assert result.to_dict()["variants"]["frame"]["quality"]["seeds"] == 2
    assert result.to_dict() == result.verdict.to_dict()
    (axes,) = result.plot().axes
    assert len(axes.lines) == len(axes.collections) == 2  # a line and a band per variant
    for _ in range(2):  # a report is overwritten
        result.save(tmp_path / "a" / "r.html")
    assert "frame" in (tmp_path / "a" / "r.html").read_text()


def test_a_band_from_the_lowest_to_the_highest_seed(runs: list[Path]) -> None:
    drawn = figure(runs)
    assert drawn._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    last = [load(path).split("valid", "running")[-1] for path in runs[:2]]
    values = sorted(math.exp(row["loss"]) for row in last)
    at = last[0]["updates"]
    band = np.asarray(drawn.axes[0].collections[0].get_paths()[0].vertices)
    ends = sorted({round(float(y), 6) for x, y in band if x == at})
    assert ends == pytest.approx(values, rel=1e-5)
