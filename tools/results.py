"""Write docs/results/, and the tables of README.md and docs/findings.md.

    python -m tools.results            (or: make results)
    python -m tools.results --check    names what is stale and changes nothing

Everything comes from results/ and studies/. Texts are compared whole, pictures by their presence.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from normrnn.recipes import PAPER
from normrnn.reporting.groups import Group, groups
from normrnn.reporting.page import DASH, runs_table
from normrnn.reporting.pictures import figure
from normrnn.reporting.result import group_verdict
from normrnn.reporting.runs import Run, load
from normrnn.reporting.study import TRIALS, read_study
from normrnn.verdicts.result import Verdict
from tools import padding
from tools.claims import claims_table, describe, questions_table, statistics_table
from tools.studies import CURVES, markdown
from tools.tables import as_markdown, gradients_table, rows_to_markdown, study_summary, with_title

ROOT = Path(__file__).parent.parent
PAGES, INDEX, FINDINGS = "docs/results", "docs/results/index.md", "docs/findings.md"
PICTURED = ("ptb-small-authors", "ptb-small-regularised", "librispeech-mini-small")
SUMMARY = (
    ("ptb-small-authors", "frame"),
    ("ptb-small-regularised", "frame"),
    ("librispeech-mini-small", "sequence"),
)
"""Rows of the README: experiments with several seeds."""
HEAD = """# Experiments

Every comparison of the committed runs, variant against baseline, written by `make results`. Each
experiment has a page with all figures and runs. [What differs from the paper](notes.md);
[the paper, claim by claim](../findings.md).

Quality is the test value at the best validation, or the best validation value without a test set.
Speed is the ratio of updates to a validation value that all runs reach. Seeds: of the variant, of
the baseline. 95 % intervals, simultaneous over the variants of an experiment.
"""
TOCTREE = "```{{toctree}}\n:hidden:\n\n{}\n```"


def experiments(root: Path) -> dict[str, list[Group]]:
    """Name of each page -> its groups: recipes first, then studies."""
    found: dict[str, list[Group]] = {}
    for group in groups(_runs(root / "results")):
        found.setdefault(group.recipe, []).append(group)
    for path in studies(root):
        found[path.name] = groups(_runs(path))
    return found


def studies(root: Path) -> list[Path]:
    """The directories of committed studies."""
    places = [*root.glob("results/studies/*"), *root.glob("studies/*")]
    return sorted((p for p in places if p.is_dir()), key=lambda path: path.name)


def _runs(directory: Path) -> list:
    return [load(path.parent) for path in sorted(directory.glob("*/config.json"))]


def index_page(root: Path) -> str:
    """One row per comparison."""
    rows = []
    for name, parts in experiments(root).items():
        for group in parts:
            for variant, cells in _compared(group_verdict(group)):
                setting = f", {group.variant}" if group.variant else ""
                page = f"[{name}]({name}.md)"
                rows.append([page + as_markdown(setting), as_markdown(variant), *cells])
    empty = [n for n, parts in experiments(root).items() if not any(n in row[0] for row in rows)]
    head = ["experiment", "variant", "seeds", "quality", "speed"]
    parts = [HEAD.strip(), rows_to_markdown(head, rows)]
    if empty:
        links = ", ".join(f"[{name}]({name}.md)" for name in empty)
        parts.append(f"Without a comparison of runs: {links}.")
    return "\n\n".join(parts) + "\n"


def site_page(root: Path, table: str) -> str:
    """The same page in the documentation, with the list of pages."""
    return f"{table}\n{TOCTREE.format(chr(10).join(['notes', *experiments(root)]))}\n"


def top_level(table: str) -> str:
    """The page with links from the top of the repository."""
    links = re.sub(r"\]\(([\w-]+\.md)\)", rf"]({PAGES}/\1)", table)
    return links.replace("](../", "](docs/").replace("# Experiments", "# Results", 1)


def _compared(verdict: Verdict) -> list[tuple[str, list[str]]]:
    """Seeds, quality and speed of every variant."""
    found = []
    for name, one in verdict.variants.items():
        shown = [
            DASH if f is None else f"{describe(f, verdict.measure)}: {f.answer}"
            for f in (one.quality, one.speed)
        ]
        counted = one.quality or one.speed
        seeds = DASH if counted is None else f"{len(counted.other)}, {len(counted.baseline)}"
        if counted is not None and counted.paired:
            seeds = f"{counted.seeds} pairs"
        found.append((name, [seeds, *shown]))
    return found


def page(root: Path, name: str, parts: Sequence[Group]) -> str:
    """All that is known of an experiment."""
    lines = [f"# {name}", "Written by `make results`."]
    directory = next((path for path in studies(root) if path.name == name), None)
    if directory is not None and (directory / "NOTES.md").exists():
        lines.append((directory / "NOTES.md").read_text(encoding="utf-8").strip())
    if directory is not None and (directory / "README.md").exists():
        lines[0], text = (directory / "README.md").read_text(encoding="utf-8").split("\n", 1)
        lines += [text.strip(), *markdown(root, name)]
        lines += [f"![Figure of {name}]({name}.png)"] if parts else []
    if directory is not None and (directory / TRIALS).exists():
        study = read_study(directory)
        if study.problem:
            raise SystemExit(study.problem)
        lines.append(study_summary(study))
    for group in parts:
        lines.append(f"## {as_markdown(group.title)}")
        verdict = group_verdict(group)
        if verdict.variants:
            lines.append(f"```\n{verdict.details()}\n```")
        if group.recipe in PAPER and (figures := PAPER[group.recipe].words):
            lines.append(f"{figures}.")
        if name in PICTURED and not group.variant:
            lines.append(f"![Validation of {name}]({name}.png)")
        lines += with_title(runs_table(group))
    if directory is not None and (directory / padding.FILE).exists():
        records = json.loads((directory / padding.FILE).read_text("utf-8"))
        lines += with_title(padding.table(records))
    for file in sorted(directory.glob("gradients*.json")) if directory is not None else ():
        table = gradients_table(json.loads(file.read_text("utf-8")))
        lines += [f"`{file.name}`", *with_title(table)]
    return "\n\n".join(lines) + "\n"


def readme_table(root: Path) -> str:
    """Quality and speed of the comparisons with several seeds."""
    rows = []
    for name, norm in SUMMARY:
        for group in experiments(root).get(name, ()):
            for variant, (seeds, *cells) in _compared(group_verdict(group)):
                if variant.split(" (")[0] == norm and not group.variant:
                    number = seeds.removesuffix(" pairs").split(",")[0]
                    link = f"[{name}]({PAGES}/{name}.md), `{norm}`, {number} seeds"
                    rows.append([link, *cells])
    return rows_to_markdown(["experiment", "quality", "speed"], rows)


def findings_parts(root: Path) -> dict[str, str]:
    """The tables of docs/findings.md."""

    def link(name: str) -> str:
        return f"[{name}](results/{name}.md)"

    claims = ["in the paper", "claim", "here: normalised vs baseline", "verdict", "runs"]
    asked = ["question", "quality", "speed", "runs"]
    tested = ["statistics at test time", "best validation, same weights", "answer", "runs"]
    return {
        "claims": rows_to_markdown(claims, claims_table(root, link)),
        "questions": rows_to_markdown(asked, questions_table(root, link)),
        "statistics": rows_to_markdown(tested, statistics_table(root, link)),
    }


def filled(file: Path, parts: Mapping[str, str]) -> str:
    """A page with the text between its marks replaced."""
    text = file.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{file.name} needs one {begin} and one {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def texts(root: Path) -> dict[str, str]:
    """Every file that `make results` writes, or writes in."""
    notes = (root / "results/NOTES.md").read_text(encoding="utf-8")
    table = index_page(root)
    found = {
        INDEX: site_page(root, table),
        "RESULTS.md": top_level(table),
        "README.md": filled(root / "README.md", {"results": readme_table(root)}),
        FINDINGS: filled(root / FINDINGS, findings_parts(root)),
        f"{PAGES}/notes.md": f"# Notes on the results\n\n{notes.strip()}\n",
    }
    pages = experiments(root).items()
    return found | {f"{PAGES}/{name}.md": page(root, name, parts) for name, parts in pages}


def pictures(root: Path) -> dict[str, list[Run]]:
    """Path of every picture -> the runs in it: of recipes and of studies with a README."""
    found = {}
    for name, parts in experiments(root).items():
        is_study = (root / "studies" / name / "README.md").exists()
        runs = [r for g in parts if is_study or not g.variant for r in g.runs]
        if runs and (is_study or name in PICTURED):
            found[f"{PAGES}/{name}.png"] = runs
    return found


def stale(root: Path) -> list[str]:
    """What `make results` would change, pictures aside; and pictures that are missing."""
    found = texts(root)
    old = [
        n
        for n, text in found.items()
        if not (root / n).exists() or (root / n).read_text("utf-8") != text
    ]
    return old + [name for name in pictures(root) if not (root / name).exists()]


def write(root: Path) -> None:
    """Write everything."""
    (root / PAGES).mkdir(parents=True, exist_ok=True)
    for name, text in texts(root).items():
        (root / name).write_text(text, encoding="utf-8")
    for name, runs in pictures(root).items():
        curves = CURVES.get(Path(name).stem)
        picture = figure(runs) if curves is None else curves(root).draw()
        picture.savefig(root / name, dpi=80)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"stale, run `make results`: {', '.join(names)}" if (names := stale(ROOT)) else 0)
    write(ROOT)
