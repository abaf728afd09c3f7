"""Writes RESULTS.md, the results in README.md and the pictures of both from results/.

    python -m tools.results            (or: make results)
    python -m tools.results --check    says what is stale and changes nothing

Texts are compared whole, the inputs by a hash in RESULTS.md; pictures never by their bytes.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from normrnn.report import gradients
from normrnn.report.comparison import Comparison
from normrnn.report.groups import Group, groups
from normrnn.report.page import evidence
from normrnn.report.paired import Difference
from normrnn.report.pictures import figure, headline, save
from normrnn.report.runs import load
from normrnn.report.study import TRIALS, RecordedStudy, read_study
from normrnn.report.tables import DASH, Table, paper_table, runs_table
from normrnn.report.trials import figure as study_figure
from normrnn.report.trials import markdown as study_markdown
from normrnn.report.verdict import group_verdict
from tools import padding, windows
from tools.answers import answers
from tools.findings import findings, saved

ROOT = Path(__file__).parent.parent
ORDER = ("ptb-small", "ptb-small-authors", "ptb-small-regularised", "ptb-medium", "ptb-large")
ORDER += ("librispeech-mini", "librispeech-mini-small", "wsj")
PICTURED = ("ptb-small-authors", "librispeech-mini")
SUMMARY = ("ptb-small-authors", "ptb-small", "ptb-medium", "librispeech-mini")
SUMMARY += ("librispeech-mini-small",)
"""Recipes with a picture, and with a row, in the README."""
PICTURE = "docs/pictures/overview.png"
FINDINGS = "docs/findings.md"
STUDIES = "## Studies: normalisation inside the recurrence (Table 3, Figure 3), learning rates"
TEXT = """# Results

Written by `make results` from the committed settings and metrics under `results/`; the best epoch
of each column. "2 of 40": two epochs of the forty of the recipe. Perplexities:

- **here**: train is the exponential of the mean loss over an epoch, in training mode, as it went;
  valid is the corpus perplexity over all 73,759 predicted tokens, state carried, with the
  statistics that the best model is chosen and saved with (the baseline has none): running ones, or,
  where there is dropout or another regulariser, those recalibrated over 100 training windows;
- **authors' protocol**: arithmetic mean of the mini-batches' perplexities; in validation with the
  mini-batch's own statistics, which is what the authors' code did (see below);
- **running**, **recalibrated**, **batch** statistics: corpus perplexity on validation with those.
"""


def experiments(root: Path) -> list[Group]:
    """The committed runs, in the paper's order; those of studies apart."""
    return _in_order(root / "results")


def studies(root: Path) -> dict[Path, tuple[RecordedStudy | None, list[Group]]]:
    """The committed studies: the trials, if there are any, and runs kept beside them."""
    found = {}
    for path in sorted(p for p in root.glob("results/studies/*") if p.is_dir()):
        study = read_study(path) if (path / TRIALS).exists() else None
        if study and (study.problem or not study.trials):
            raise SystemExit(f"{path} {study.problem or 'has no trials'}")
        found[path] = (study, _in_order(path))
    return found


def _in_order(directory: Path) -> list[Group]:
    runs = [load(path.parent) for path in sorted(directory.glob("*/config.json"))]
    known = {name: i for i, name in enumerate(ORDER)}
    return sorted(groups(runs), key=lambda g: (known.get(g.recipe, len(ORDER)), g.title))


def inputs_hash(root: Path) -> str:
    """Of everything that the texts and pictures are made from."""
    digest = hashlib.sha256()
    files = [root / "results/NOTES.md", *root.glob("results/*/*.json*")]
    files += root.glob("results/studies/*/NOTES.md")
    files += [p for p in root.glob("results/studies/**/*.json*") if p not in files]
    for path in sorted(files, key=lambda p: p.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def picture_path(title: str) -> str:
    name = "".join(c if c.isalnum() or c in "-." else "-" for c in title)
    return f"docs/pictures/{name}.png"


def pictures(root: Path) -> dict[str, Callable[[], Figure]]:
    """Path of every picture of RESULTS.md -> what draws it."""
    found: dict[str, Callable[[], Figure]] = {}
    for group in filter(has_curves, experiments(root)):
        found[picture_path(group.title)] = lambda runs=group.runs: figure(runs)
    for path, (study, parts) in studies(root).items():
        if study and study.drawable:
            found[study_picture(path)] = lambda trials=study.trials: study_figure(trials)
        for group in (g for g in parts if has_curves(g) and len(g.arms) > 1):
            found[study_picture(path, group.title)] = lambda runs=group.runs: figure(runs)
        for file in recorded(path):
            found[study_picture(path, file.stem)] = lambda file=file: gradients.figure(_read(file))
    return found


def recorded(path: Path) -> list[Path]:
    """What `normrnn gradients` wrote of a study's runs."""
    return sorted(path.glob("gradients*.json"))


def _read(file: Path) -> list[gradients.Record]:
    return json.loads(file.read_text(encoding="utf-8"))


def study_picture(path: Path, what: str = "") -> str:
    return picture_path(f"study {path.name} {what}".strip())


def has_curves(group: Group) -> bool:
    return any(run.epochs_done for run in group.runs)


def results_md(root: Path) -> str:
    parts = [TEXT.strip()]
    for group in experiments(root):
        parts.append(f"## {group.title}")
        found = group_verdict(group)
        parts += found.sentences
        for table in (
            *evidence(group, found),
            paper_table(group),
            runs_table(group, in_recipe=True),
        ):
            parts += [f"**{table.title}**", table.markdown(), *([table.note] if table.note else [])]
        if has_curves(group):
            parts.append(f"![Curves of {group.title}]({picture_path(group.title)})")
    parts += _studies(root)
    parts.append((root / "results/NOTES.md").read_text(encoding="utf-8").strip())
    parts.append(f"<!-- inputs: sha256 {inputs_hash(root)} -->")
    return "\n\n".join(parts) + "\n"


def _studies(root: Path) -> list[str]:
    """The studies; nothing if there are none."""
    found = studies(root)
    parts = [STUDIES] if found else []
    for path, (study, several) in found.items():
        parts.append(f"### {path.name}")
        if (path / "NOTES.md").exists():
            parts.append((path / "NOTES.md").read_text(encoding="utf-8").strip())
        if study:
            parts.append(study_markdown(study.trials, study.paper, study.said).strip())
        if study and study.drawable:
            parts.append(f"![Loss against learning rate]({study_picture(path)})")
        if several:
            # The paper's figures are of one setting.
            table = _together(several, beside=len(several) == 1)
            parts += [f"**{table.title}**", table.markdown(), table.note]
        for group in several:
            said = group_verdict(group)
            parts += [f"**{group.title}.** {text}" for text in said.sentences if said.comparisons]
            if has_curves(group) and len(group.arms) > 1:
                parts.append(f"![Curves of {group.title}]({study_picture(path, group.title)})")
        for kind in (padding, windows):
            if (path / kind.FILE).exists():
                records = json.loads((path / kind.FILE).read_text(encoding="utf-8"))
                for table in kind.tables(records):
                    parts += [f"**{table.title}**", table.markdown(), table.note]
        for file in recorded(path):
            table = gradients.table(_read(file))
            parts += [f"**{table.title}** ({file.name})", table.markdown(), table.note]
            parts.append(f"![Back-propagation]({study_picture(path, file.stem)})")
    return parts


def _together(several: Sequence[Group], *, beside: bool = True) -> Table:
    """One table of groups that are measured alike."""
    tables = [paper_table(group, beside=beside) for group in several]
    rows = [
        [f"{first} · {group.title}", *rest]
        for group, table in zip(several, tables, strict=True)
        for first, *rest in table.rows
    ]
    return replace(tables[0], rows=rows)


def readme_parts(root: Path) -> dict[str, str]:
    """What stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->` in the README."""
    dress = "train dotted, validation solid; baseline blue, normalised networks in other colours"
    return {
        "picture": f"![Curves: {dress}]({PICTURE})",
        "results": summary(experiments(root)).markdown(),
    }


def summary(found: Sequence[Group]) -> Table:
    """The paper's normalisation against the baseline, a row per recipe."""
    rows = []
    for group in sorted((g for g in found if g.recipe in SUMMARY), key=_place):
        for one in group_verdict(group).comparisons:
            if group.paper and one.other.norm == group.paper.norm and not group.variant:
                rows.append(_summary_row(group, one))
    columns = ["experiment", "seeds", "updates to the baseline's best training loss"]
    columns += ["held out: baseline, normalised", "difference (95% interval)", "in the paper"]
    return Table("", [("", columns)], rows)


def _place(group: Group) -> int:
    return SUMMARY.index(group.recipe)


def _summary_row(group: Group, found: Comparison) -> list[str]:
    shown, paper = group.measure, group.paper
    best = found.figures.get("best_validation")
    held_out = change = DASH
    if best is not None:
        values = [f"{mean(arm):.{shown.digits}f}" for arm in (best.baseline, best.other)]
        held_out = f"{shown.name} {', '.join(values)}"
        change = f"{best.mean:+.{shown.digits}f}{_interval(best, f'+.{shown.digits}f')}"
        change += f": {best.answer}"
    far = found.other.runs[0].progress_in_recipe
    assert paper is not None
    theirs = ", ".join(str(figures[1][0]) for figures in (paper.baseline, paper.normalised))
    return [
        f"{group.recipe} ({far})",
        str(len(found.pairs)),
        saved(found, 0),
        held_out,
        change,
        theirs,
    ]


def _interval(found: Difference, shown: str) -> str:
    ends = found.interval
    return "" if ends is None else f" ({ends[0]:{shown}} to {ends[1]:{shown}})"


def findings_parts(root: Path) -> dict[str, str]:
    """The same of docs/findings.md."""
    return {"findings": findings(root), "answers": answers(root)}


def filled(file: Path, parts: Mapping[str, str]) -> str:
    """A page with what stands between its marks written anew."""
    text = file.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{file.name} needs one {begin} and one {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def texts(root: Path) -> dict[str, str]:
    """Every page that `make results` writes, or writes in."""
    return {
        "RESULTS.md": results_md(root),
        "README.md": filled(root / "README.md", readme_parts(root)),
        FINDINGS: filled(root / FINDINGS, findings_parts(root)),
    }


def stale(root: Path) -> list[str]:
    """What `make results` would change, pictures aside; and pictures that are not there."""
    old = [n for n, text in texts(root).items() if (root / n).read_text(encoding="utf-8") != text]
    return old + [name for name in (PICTURE, *pictures(root)) if not (root / name).exists()]


def write(root: Path) -> None:
    found = experiments(root)
    for name, text in texts(root).items():
        (root / name).write_text(text, encoding="utf-8")
    for name, draw in pictures(root).items():
        save(draw(), root / name)
    heads = [group for group in found if group.recipe in PICTURED and not group.variant]
    save(headline(heads or found[:1]), root / PICTURE)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"stale, run `make results`: {', '.join(names)}" if (names := stale(ROOT)) else 0)
    write(ROOT)
