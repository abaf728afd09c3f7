"""The HTML report: complete, self-contained, escaped, readable; whatever the runs look like."""

import fcntl
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from normrnn.errors import UserError
from normrnn.report.groups import groups, without_repeats
from normrnn.report.page import THEMES, markdown, page
from normrnn.report.pictures import COLOURS
from normrnn.report.runs import find, load
from normrnn.report.write import safe, write_pictures, write_report
from tests.report.made_runs import make_run

VOID = {"meta", "link", "line", "use", "path", "br"}
SVG = {"svg", "title", "desc", "defs", "style", "g", "path", "use", "text", "line", "clippath"}
SVG |= {"rect", "tspan", "image"}
HTML = {"html", "head", "meta", "link", "body", "main", "h1", "h2", "h3", "p", "b", "a", "nav"}
HTML |= {"section", "div", "ul", "li", "code", "figure", "figcaption", "table", "thead", "tbody"}
HTML |= {"tr", "th", "td", "details", "summary"}


class Reader(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def words(self) -> str:
        return " ".join(self.text.split())


def read(*paths: Path) -> Reader:
    return Reader(page(without_repeats(find(list(paths)))))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("pair")
    return [make_run(parent, "ptb-small-authors", norm, segments=2) for norm in ("none", "frame")]


@pytest.fixture(scope="module")
def text(pair: list[Path]) -> str:
    return page(find(pair))


def test_nothing_comes_from_elsewhere(text: str) -> None:
    assert "http" not in text.lower().replace('charset="utf-8"', "")
    assert "@import" not in text
    for tag, attributes in Reader(text).tags:
        assert tag in SVG | HTML, tag
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href"):
                assert value.startswith("#") or value == "data:,"
    for target in re.findall(r"url\((.*?)\)", text):
        assert target.startswith("#")


def test_ids_are_unique_and_references_lead_somewhere(pair: list[Path], tmp_path: Path) -> None:
    tags = read(*pair, make_run(tmp_path, "ptb-char", kind="char")).tags
    ids = Counter(attributes["id"] for _, attributes in tags if "id" in attributes)
    assert ids
    assert max(ids.values()) == 1
    for tag, attributes in tags:
        for name in attributes.get("aria-labelledby", "").split():
            assert ids[name] == 1, name
        if tag in ("use", "a"):
            assert ids[attributes["href"].removeprefix("#")] == 1


def test_pictures_and_tables_can_be_read_aloud(text: str) -> None:
    tags = Reader(text).tags
    pictures = [a for tag, a in tags if tag == "svg" and a.get("role") == "img"]
    assert len(pictures) == 6  # three times curves, gap, gradient norm, learning rate
    assert text.count("<title id=") == text.count("<desc id=") == len(pictures)
    assert all("aria-labelledby" in picture for picture in pictures)
    assert all("scope" in attributes for tag, attributes in tags if tag == "th")
    assert all("aria-label" in attributes for tag, attributes in tags if tag == "table")
    assert ("html", {"lang": "en", "data-by": "normrnn report"}) in tags
    assert sum(tag == "h1" for tag, _ in tags) == 1


def test_pictures_take_their_colours_from_the_page(text: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= {"#ffffff", "#000000"}
    assert "currentColor" in drawn
    for variable in ("--grid", "--arm0", "--arm1"):
        assert f"var({variable})" in drawn
    # matplotlib's patches behind figure and axes are not painted.
    assert not re.search(r"fill: #(ffffff|000000)(?!; opacity: 0|; stroke-opacity)", drawn)


def luminance(colour: str) -> float:
    """WCAG 2: relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_contrast(theme: str) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    colours = THEMES[theme]
    for ground in ("page", "box", "warn"):
        assert contrast(colours["text"], colours[ground]) >= 7
        assert contrast(colours["quiet"], colours[ground]) >= 4.5
    assert contrast(colours["arm0"], colours["page"]) >= 4.5  # links
    arms = [colours[f"arm{i}"] for i in range(5)]
    assert len(arms) == len(COLOURS)
    for colour in arms:
        assert contrast(colour, colours["page"]) >= 4.5
    for colour in COLOURS:
        assert contrast(colour, "#ffffff") >= 4.5
    assert THEMES["light"].keys() == THEMES["dark"].keys()


def test_what_every_report_says(pair: list[Path]) -> None:
    words = read(*pair).words()
    assert "fewer updates: " in words
    assert "Seconds are not compared: where the runs ran is not recorded." in words
    place = [{"torch": "2.13.0", "cpu": "Some <b>CPU</b>", "cores": 2, "python": "3.11"}]
    for run in pair[::-1]:
        (run / "environment.json").write_text(json.dumps(place))
        words = read(*pair).words()
        where = "the runs were made in different surroundings" if run == pair[1] else "which also"
        assert where in words
    (pair[1] / "environment.json").unlink()
    words = read(*pair).words()
    assert "Its best perplexity on validation was" in words
    assert "nats above its training loss" in words
    assert "Table 2" in words
    for figure in ("78.5", "119.2", "62.5", "120.9"):
        assert figure in words
    assert "The runs differ in normalisation and seed alone." in words
    assert "2.13.0" in words
    assert "Some <b>CPU</b>" in words
    assert "not recorded" in words  # of the other run
    assert "normrnn train ptb-small-authors --norm frame --data mine" in words
    assert "/home/someone" not in words
    for title in ("against updates", "against epochs", "against seconds", "Gap between train"):
        assert title in words
    assert "Gradient norm" in words
    assert "Learning rate" in words


def test_text_of_runs_is_text(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    first = make_run(tmp_path, bad, "none", name="<script>alert(1)<script>", until=300)
    second = make_run(tmp_path, bad, f'frame"><img src=x onerror=alert(1)>{bad}', name="b")
    third = make_run(tmp_path, "ptb-small", "none", name="c", until=300, model={"x$_^\\frac": bad})
    (third / "environment.json").write_text(json.dumps([{"cpu": bad}]))
    written = page(find([first, second, third]))
    assert "<script" not in written
    reader = Reader(written)
    tags = {tag for tag, _ in reader.tags}
    assert "script" not in tags
    assert "img" not in tags
    words = reader.words()
    assert bad in words
    assert "<script>alert(1)<script>" in words
    assert "onerror=alert(1)" in words
    assert not any(name.startswith("on") for _, a in reader.tags for name in a)
    shown = markdown(find([first, second]))
    assert "| \\<script\\>" not in shown.replace("frame", "")
    assert "\\<img src=x" in shown


def test_states_in_words(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, content in (("torn", "{"), ("list", "[]"), ("other", '{"norm": 3, "seed": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    new = make_run(tmp_path, name="new")
    (new / "metrics.jsonl").unlink()
    make_run(tmp_path, seed=2, name="stopped", until=450)
    damaged = make_run(tmp_path, seed=3, name="damaged", until=450)
    lines = (damaged / "metrics.jsonl").read_text().split("\n")
    lines[5] = lines[5].replace('"loss": ', '"loss": "x", "old": ')
    (damaged / "metrics.jsonl").write_text("\n".join(lines))
    running = make_run(tmp_path, seed=4, name="running", until=450)
    with (running / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = read(*sorted(tmp_path.iterdir())).words()
    assert "empty is no run directory: it is empty." in words
    for name in ("torn", "list", "other"):
        assert f"{name} is no run directory: config.json is missing or damaged." in words
    assert "new (baseline, seed 1) has no rows yet." in words
    assert "stopped (baseline, seed 2) has not finished: it stopped after 450 updates." in words
    assert "damaged is damaged: line 6 of metrics.jsonl is no row of metrics; the rows" in words
    assert "running (baseline, seed 4) is still running: 450 updates so far." in words
    assert "2 of 5, running" in words
    assert "no normalised run here" in words
    # The lock is free again: nobody runs.
    assert "it stopped after 450 updates" in read(running).words()


def test_nothing_but_strange_directories(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "There is nothing to show" in read(tmp_path / "empty").words()
    only = make_run(tmp_path, norm="frame", name="only")
    (only / "metrics.jsonl").write_text("")
    words = read(only).words()
    assert "There is no baseline to compare the frame-wise normalised network with yet." in words
    assert "There are no rows to draw yet." in words


def test_several_recipes_and_seeds(tmp_path: Path) -> None:
    for norm in ("none", "sequence"):
        make_run(tmp_path, "librispeech-mini", norm, kind="speech", segments=4)
    for norm in ("none", "hidden"):
        make_run(tmp_path, "ptb-char", norm, kind="char", epochs=20)
    for seed in (1, 2):
        make_run(tmp_path, "ptb-small", "frame", seed)
        make_run(tmp_path, "ptb-small", "none", seed)
    reader = read(tmp_path)  # a directory of runs stands for them
    words = reader.words()
    assert sum(tag == "h2" for tag, _ in reader.tags) == 3
    assert "Table 1" in words
    assert "Its best frame error rate was" in words
    for figure in ("0.28", "0.33", "0.22", "0.34"):
        assert figure in words
    assert "Table 3" in words
    assert "here, bits" in words
    assert "No saving: the network normalised inside the recurrence did not reach" in words
    assert "2 paired seeds." in words
    assert "thin: one seed; thick: their mean" in words


def test_copies_of_a_run_count_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a", norm="frame", until=450)
    make_run(tmp_path / "a", norm="none")
    short = make_run(tmp_path / "b", norm="frame", until=250, name="copy")
    words = read(tmp_path / "a", short, tmp_path / "a").words()
    assert "copy is left out: ptb-small-frame-1 is the same run (frame, seed 1)" in words
    assert "2 runs of ptb-small" in words


def test_reports_overwrite_reports_only(pair: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = find([tmp_path / "empty"])
    target = tmp_path / "new" / "report.html"
    write_report(found, target, "first")
    write_report(found, target, "second")
    assert "<h1>second</h1>" in target.read_text()
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    config = (pair[0] / "config.json").read_text()
    for path, said in ((pair[0] / "config.json", "is no report"), (tmp_path, "is a directory")):
        with pytest.raises(UserError, match=said):
            write_report(found, path)
    assert (pair[0] / "config.json").read_text() == config
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report(found, tmp_path / "file" / "report.html")
    with pytest.raises(UserError, match="cannot be written"):
        write_pictures(find(pair[:1]), tmp_path / "file" / "png")


def test_pictures_of_data_of_the_same_name(tmp_path: Path) -> None:
    """Two texts called alike are two groups with names of their own; long names are cut."""
    runs = []
    for place in ("one", "two"):
        for norm in ("none", "frame"):
            path = make_run(tmp_path / place, norm=norm)
            config = json.loads((path / "config.json").read_text())
            config |= {"data": f"/{place}/text", "data_sha256": place * 20}
            (path / "config.json").write_text(json.dumps(config))
            runs.append(path)
    titles = [group.title for group in groups([load(path) for path in runs])]
    assert titles == ["ptb-small, data text (oneoneon)", "ptb-small, data text (twotwotw)"]
    written = write_pictures(find(runs), tmp_path / "png")
    assert len({path.name for path in written}) == len(written)
    assert sum("oneoneon" in path.name for path in written) == len(written) / 2
    long = [safe("ptb-small, " + "model.dropout 0.5, " * 30 + last) for last in "ab"]
    assert long[0] != long[1]
    assert max(map(len, long)) < 200
