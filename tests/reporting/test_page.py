"""The HTML report and what `compare` returns."""

import math
import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import normrnn
from normrnn.errors import UserError
from normrnn.reporting.answer import verdicts
from normrnn.reporting.page import page, write_report
from normrnn.reporting.pictures import COLOURS, figure
from normrnn.reporting.result import Result, Runs
from normrnn.reporting.runs import find, load
from normrnn.reporting.study import RecordedStudy
from tests.reporting.made_runs import make_run
from tests.reporting.test_study import TRIALS


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
    return page(find(runs), studies=[RecordedStudy(Path("made"), TRIALS)])


def test_the_page_leads_with_the_lines_of_the_terminal(runs: list[Path], text: str) -> None:
    plain = unescape(text)
    for line in normrnn.verdict(list(runs)).lines():
        assert line in plain
    section = text[text.index('id="s0"') :]
    assert section.index("<pre") < section.index("<svg") < section.index("<table")


def test_nothing_comes_from_elsewhere(text: str) -> None:
    assert "http" not in text.lower()
    assert "@import" not in text
    for tag, attributes in Reader(text).tags:
        assert tag not in ("script", "iframe", "object", "img")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href"):
                assert value.startswith("#") or value == "data:,"


def test_ids_are_unique_and_references_lead_somewhere(text: str) -> None:
    tags = Reader(text).tags
    ids = Counter(attributes["id"] for _, attributes in tags if "id" in attributes)
    assert max(ids.values()) == 1
    for tag, attributes in tags:
        for name in attributes.get("aria-labelledby", "").split():
            assert ids[name] == 1, name
        if tag in ("use", "a"):
            assert ids[attributes["href"].removeprefix("#")] == 1
    assert all("scope" in attributes for tag, attributes in tags if tag == "th")


def luminance(colour: str) -> float:
    """WCAG 2: relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_follow_the_theme_and_can_be_read(text: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= {"#ffffff", "#000000"}
    assert "var(--arm1)" in drawn
    pairs = re.findall(r"--(\w+): (#[0-9a-f]{6})", text)
    themes = dict(pairs[: len(pairs) // 2]), dict(pairs[len(pairs) // 2 :])
    assert themes[0].keys() == themes[1].keys()
    for theme in themes:
        for ground in ("page", "box", "warn"):
            assert contrast(theme["text"], theme[ground]) >= 7
            assert contrast(theme["quiet"], theme[ground]) >= 4.5
        for i in range(len(COLOURS)):
            assert contrast(theme[f"arm{i}"], theme["page"]) >= 4.5


def test_text_of_runs_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    make_run(tmp_path, evil, name="one", data=f"/home/{evil}", note=f"{evil}&amp;")
    text = page(find([tmp_path]), title=evil)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_unfinished_damaged_and_empty_directories(tmp_path: Path) -> None:
    make_run(tmp_path, until=300)
    damaged = make_run(tmp_path, norm="frame") / "metrics.jsonl"
    damaged.write_text(damaged.read_text() + "what\n" * 2)
    text = page(find([tmp_path]))
    assert "300 updates" in text
    assert "damaged" in text
    (tmp_path / "empty").mkdir()
    assert "none of these directories" in page(find([tmp_path / "empty"]))


def test_reports_overwrite_reports_only(runs: list[Path], tmp_path: Path) -> None:
    write_report(find(runs), tmp_path / "a" / "r.html")
    write_report(find(runs[:1]), tmp_path / "a" / "r.html")
    (tmp_path / "mine.html").write_text("<h1>mine</h1>")
    with pytest.raises(UserError, match=r"mine\.html"):
        write_report(find(runs), tmp_path / "mine.html")
    with pytest.raises(UserError, match="directory"):
        write_report(find(runs), tmp_path)


def test_a_result_is_short_and_saves_a_report(runs: list[Path], tmp_path: Path) -> None:
    several = Runs(map(load, runs))
    result = Result(several, verdicts(list(several)))
    assert len(repr(result)) < 200
    assert len(repr(several)) < 80
    assert max(map(len, str(result).splitlines())) <= 80
    assert "frame" in result._repr_html_()
    assert several._repr_html_().count("<tr>") == 5
    assert result.to_dict()["variants"]["frame"]["quality"]["seeds"] == 2
    assert result.to_dict() == result.verdict.to_dict()
    result.save(tmp_path / "r.html")
    assert "frame" in (tmp_path / "r.html").read_text()
    (axes,) = result.plot().axes
    assert len(axes.lines) == len(axes.collections) == 2  # a line and a band per variant


def test_a_band_from_the_lowest_to_the_highest_seed(runs: list[Path]) -> None:
    (axes,) = figure(runs).axes
    loaded = [load(path) for path in runs[:2]]
    last = [run.split("valid", "running")[-1] for run in loaded]
    values = sorted(math.exp(row["loss"]) for row in last)
    at = last[0]["updates"]
    band = np.asarray(axes.collections[0].get_paths()[0].vertices)
    ends = sorted({round(float(y), 6) for x, y in band if x == at})
    assert ends == pytest.approx(values, rel=1e-5)
