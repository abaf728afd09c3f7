"""The claims of the paper and further questions, answered from the committed runs."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from normrnn.reporting.groups import Group, groups
from normrnn.reporting.page import DASH
from normrnn.reporting.result import group_verdict
from normrnn.reporting.runs import Run, load
from normrnn.reporting.study import arms_of, best, pairs, read_study
from normrnn.verdicts.result import cells, verdict_of
from normrnn.verdicts.rows import PlainRun, Point
from normrnn.verdicts.verdict import Figure, Settings
from tools import padding

LOWER, HIGHER = "better", "worse"
SPEECH, WORDS, TEXT = "librispeech-mini-small", "ptb-small-authors", "quickstart-norms"
REGULARISERS, CHAR = "quickstart-regularisers", "ptb-char-runs"
CONVERGED, SCHEDULE = "regularised-converged", "compressed-schedule"
PIXELS = "permuted-mnist"


@dataclass(frozen=True)
class Claim:
    """A claim that a figure of a normalised network is better or worse than the baseline's."""

    where: str
    says: str
    experiment: str
    norm: str
    figure: str
    expected: str
    setting: str = ""


CLAIMS = (
    Claim("Table 1", "speech: fits the training set better", SPEECH, "sequence", "train", LOWER),
    Claim("Table 1", "speech: worse on the dev set", SPEECH, "sequence", "quality", HIGHER),
    Claim("Section 6", "speech: overfits more", SPEECH, "sequence", "gap", HIGHER),
    Claim(
        "Table 1",
        "speech, five layers: worse on the dev set",
        "librispeech-mini",
        "sequence",
        "quality",
        HIGHER,
    ),
    Claim("Table 2", "words, small: fits the training text better", WORDS, "frame", "train", LOWER),
    Claim(
        "Table 2",
        "words, small: worse on validation, batch statistics as in the authors' code",
        WORDS,
        "frame",
        "batch",
        HIGHER,
    ),
    Claim(
        "Table 2",
        "words, small: the same with running statistics, on test data",
        WORDS,
        "frame",
        "quality",
        HIGHER,
    ),
    Claim(
        "Table 2",
        "words, small, fifteen epochs: worse",
        "ptb-small",
        "frame",
        "quality",
        HIGHER,
    ),
    Claim(
        "Table 2",
        "words, medium: worse (6 of 40 epochs run)",
        "ptb-medium",
        "frame",
        "quality",
        HIGHER,
    ),
    Claim(
        "Table 2, Figure 2",
        "words, large: better in training, much worse on validation",
        "ptb-large",
        "frame",
        "quality",
        HIGHER,
    ),
    Claim(
        "Section 6",
        "words, small: faster, to a common validation value",
        WORDS,
        "frame",
        "speed",
        LOWER,
    ),
    Claim(
        "Section 6",
        "words, small: at some points about twice as fast (before the rate drops)",
        WORDS,
        "frame",
        "speed_before_drop",
        LOWER,
    ),
    Claim("Section 6", "words, small: overfits more", WORDS, "frame", "gap", HIGHER),
    Claim(
        "Figure 3",
        "inside the recurrence: learns, but stays behind",
        CHAR,
        "hidden",
        "quality",
        HIGHER,
        "lr 0.00078",
    ),
    Claim(
        "Appendix",
        "at the best baseline's settings: worse or equal (clipped here)",
        CHAR,
        "hidden",
        "quality",
        HIGHER,
        "clip_norm 1.0",
    ),
)
QUESTIONS = (
    ("words: frame-wise", WORDS, "frame", ""),
    ("words: layer", WORDS, "layer", ""),
    ("words: sequence-wise", WORDS, "sequence", ""),
    ("words: both transitions", WORDS, "recurrent", ""),
    ("words, regularised: frame-wise", "ptb-small-regularised", "frame", ""),
    ("speech: sequence-wise", SPEECH, "sequence", ""),
    ("speech: layer, its own learning rate", SPEECH, "layer", ""),
    ("small text: frame-wise", TEXT, "frame", ""),
    ("small text: inside the recurrence", TEXT, "hidden", ""),
    ("small text: layer", TEXT, "layer", ""),
    ("small text: both transitions", TEXT, "recurrent", ""),
    ("small text: whitening", TEXT, "whiten", ""),
    ("small text, locked dropout: frame-wise", REGULARISERS, "frame", "dropout 0.3"),
    ("small text, zoneout: frame-wise", REGULARISERS, "frame", "zoneout_h 0.1"),
    ("small text, weight drop: frame-wise", REGULARISERS, "frame", "weight_drop 0.3"),
    ("three times the epochs, locked dropout: frame-wise", CONVERGED, "frame", "dropout 0.3"),
    ("three times the epochs, zoneout: frame-wise", CONVERGED, "frame", "zoneout_h 0.1"),
    ("three times the epochs, weight drop: frame-wise", CONVERGED, "frame", "weight_drop 0.3"),
    ("words, 3 epochs, rate drops after 2: frame-wise", SCHEDULE, "frame", "decay_after 2"),
    ("words, 4 epochs, rate drops after 3: frame-wise", SCHEDULE, "frame", "decay_after 3"),
    ("words, 5 epochs, rate drops after 4: frame-wise", SCHEDULE, "frame", "decay_after 4"),
    ("permuted pixels: sequence-wise", PIXELS, "sequence", ""),
    ("permuted pixels: layer", PIXELS, "layer", ""),
    ("permuted pixels: both transitions, γ 0.1", PIXELS, "recurrent (gamma 0.1)", ""),
)
STATISTICS = (
    ("words: batch instead of running", WORDS, "frame", "", "batch"),
    ("words: recalibrated instead of running", WORDS, "frame", "", "recalibrated"),
    ("words, dropout: the same", "ptb-small-regularised", "frame", "", "recalibrated"),
    ("small text, frame: the same", TEXT, "frame", "", "recalibrated"),
    ("small text, both transitions: the same", TEXT, "recurrent", "", "recalibrated"),
    ("small text, whitening: the same", TEXT, "whiten", "", "recalibrated"),
    ("small text, locked dropout: the same", REGULARISERS, "frame", "dropout 0.3", "recalibrated"),
)
Link = Callable[[str], str]


def find_group(root: Path, experiment: str, setting: str = "") -> Group | None:
    """The runs of a recipe as it is, or of one setting of a study."""
    folders = [root / "results/studies" / experiment, root / "studies" / experiment]
    study = next((folder for folder in folders if folder.is_dir()), None)
    runs = [load(p.parent) for p in sorted((study or root / "results").glob("*/config.json"))]
    for group in groups(runs):
        own = study is not None or (group.recipe, group.variant) == (experiment, "")
        if own and setting in group.title:
            return group
    return None


def find_figure(group: Group | None, norm: str, name: str) -> Figure | None:
    """A figure of the verdict on a norm; "batch": the best validation with batch statistics."""
    if group is None:
        return None
    if name == "batch":
        plain = [
            PlainRun(arm.norm, run.seed, {"valid": _points(run, group, "batch")})
            for arm in group.arms
            for run in arm.runs
        ]
        verdict = verdict_of([run for run in plain if run.splits["valid"]])
        return verdict.variants[norm].quality if norm in verdict.variants else None
    variants = group_verdict(group).variants
    same = (v for k, v in variants.items() if k.split(" (")[0] == norm)
    one = variants.get(norm) or next(same, None)
    if one is None:
        return None
    return {**one.primary, **one.details}.get(name)


def _points(run: Run, group: Group, kind: str) -> list[Point]:
    own = kind if run.normalisation.keeps_statistics else run.selected_by
    rows = run.split("valid", own)
    return [Point(row["updates"], group.measure.convert(row["loss"])) for row in rows]


def describe(figure: Figure | None, measure: str = "") -> str:
    """A figure in a cell of a table; with what it measures if `measure` is given."""
    if figure is None:
        return DASH
    label, other, baseline, difference = cells(figure, measure)
    unit = " updates" if figure.ratio else ""
    label = f"{label} " if measure and not figure.ratio else ""
    return f"{label}{other} vs {baseline}{unit}, {difference}"


def judge(figure: Figure | None, expected: str) -> str:
    """Whether a claim is reproduced, by the answer of the interval."""
    if figure is None:
        return "open: not run"
    known = {"one seed": "open: one seed", "not settled": "open: not settled"}
    opposite = {LOWER: HIGHER, HIGHER: LOWER}[expected]
    known |= {expected: "reproduced", opposite: "reversed", "equivalent": "not reproduced"}
    return known[figure.answer]


def claims_table(root: Path, link: Link) -> list[list[str]]:
    """A row per claim: where, what it says, what came out, the verdict, the runs."""
    rows = []
    for claim in CLAIMS:
        figure = find_figure(
            find_group(root, claim.experiment, claim.setting), claim.norm, claim.figure
        )
        verdict = judge(figure, claim.expected)
        rows.append([claim.where, claim.says, describe(figure), verdict, link(claim.experiment)])
    return [*rows, _rates(root, link), *_search(root, link), _gradients(root, link)]


def _rates(root: Path, link: Link) -> list[str]:
    name, values = "ptb-small-learning-rate", []
    for rate in ("lr 2.0", ""):
        figure = find_figure(
            find_group(root, name, rate), "frame", "best_validation" if rate else "quality"
        )
        values.append(DASH if figure is None else f"{figure.middle[1]:.1f}")
    says = "words, small: higher learning rates did not work well (twice the rate)"
    return [
        "Section 6",
        says,
        f"perplexity {values[0]} vs {values[1]}",
        "open: one seed",
        link(name),
    ]


def sign_test(successes: int, n: int) -> float:
    """Two-sided p value of the sign test.

    >>> sign_test(3, 3)
    0.25
    """
    k = max(successes, n - successes)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n)


def _search(root: Path, link: Link) -> list[list[str]]:
    name = "ptb-char-search"
    trials = read_study(root / "results/studies" / name).trials
    says = (
        ("Table 3", "best networks of a search are similar (quarter of an epoch here)"),
        ("Appendix", "same settings: inside the recurrence is worse or equal"),
        ("Appendix", "unless the learning rate breaks the baseline alone"),
    )
    if not trials:
        return [[*one, DASH, "open: not run", link(name)] for one in says]
    baseline, other = arms_of(trials)[:2]
    tops = [(best(trials, arm), arm) for arm in (other, baseline)]
    low = [top["arms"][arm]["loss"] for top, arm in tops if top is not None]
    differences, (only_other, only_baseline) = pairs(trials, baseline, other)
    worse, n = sum(d > 0 for d in differences), len(differences)
    only = only_other, only_other + only_baseline
    sure = [sign_test(*pair) <= 0.05 for pair in ((worse, n), only)]
    outcomes = (
        (f"{low[0]:.3f} vs {low[1]:.3f} nats", "open: no repetition"),
        (
            f"worse in {worse} of {n} settings, p {sign_test(worse, n):.1g}",
            ("reproduced" if worse > n / 2 else "reversed") if sure[0] else "open: not settled",
        ),
        (
            f"only the baseline broke: {only[0]} of {only[1]}, p {sign_test(*only):.2g}",
            "reproduced" if sure[1] else "open: not settled",
        ),
    )
    return [[*one, *outcome, link(name)] for one, outcome in zip(says, outcomes, strict=True)]


def _gradients(root: Path, link: Link) -> list[str]:
    says = "γ and β, repeated, make gradients explode or vanish (a guess)"
    file = root / "results/studies" / CHAR / "gradients-start.json"
    if not file.exists():
        return ["Appendix", says, DASH, "open: not run", link(CHAR)]
    records = json.loads(file.read_text(encoding="utf-8"))
    growth = [record["layers"]["l0"]["growth_per_step"] for record in records[:2]]
    shown = f"per step a gradient keeps {growth[1]:.3f} vs {growth[0]:.3f}"
    return ["Appendix", says, shown, "open: one network", link(CHAR)]


def questions_table(root: Path, link: Link) -> list[list[str]]:
    """A row per further question: quality and speed with their answers."""
    rows = []
    for asks, experiment, norm, setting in QUESTIONS:
        group = find_group(root, experiment, setting)
        figures = [find_figure(group, norm, name) for name in ("quality", "speed")]
        measure = "" if group is None else group.measure.name
        shown = [DASH if f is None else f"{describe(f, measure)}: {f.answer}" for f in figures]
        rows.append([asks, *shown, link(experiment)])
    return rows


def statistics_table(root: Path, link: Link) -> list[list[str]]:
    """Other test statistics with the same weights: paired within each run."""
    rows = []
    for asks, experiment, norm, setting, kind in STATISTICS:
        group = find_group(root, experiment, setting)
        figure = None if group is None else _same_weights(group, norm, kind)
        answer = DASH if figure is None else figure.answer
        rows.append([asks, describe(figure), answer, link(experiment)])
    return [*rows, *_speech_statistics(root, link)]


def _speech_statistics(root: Path, link: Link) -> list[list[str]]:
    """The runs of the padding study, which were evaluated with every kind of statistics."""
    name, rows = "librispeech-mini-small-padding", []
    file = root / "results/studies" / name / padding.FILE
    records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    for kind in ("batch", "recalibrated") if records else ():
        plain = [
            PlainRun(own, number, {"valid": [Point(1, record["valid"][own])]})
            for number, record in enumerate(records)
            for own in ("running", kind)
        ]
        figure = verdict_of(plain, Settings("running", paired=True)).variants[kind].quality
        answer = DASH if figure is None else figure.answer
        rows.append([f"speech: {kind} instead of running", describe(figure), answer, link(name)])
    return rows


def _same_weights(group: Group, norm: str, kind: str) -> Figure | None:
    plain = []
    for run in (run for arm in group.arms if arm.norm == norm for run in arm.runs):
        top = run.best("running")
        if top is None:
            continue
        for name in ("running", kind):
            at = [r for r in run.split("valid", name) if r["updates"] == top["updates"]]
            points = [Point(row["updates"], group.measure.convert(row["loss"])) for row in at]
            plain += [PlainRun(name, run.seed, {"valid": points})] if points else []
    if {run.variant for run in plain} != {"running", kind}:
        return None
    return verdict_of(plain, Settings("running", paired=True)).variants[kind].quality
