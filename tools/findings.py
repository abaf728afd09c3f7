"""The claims of the paper, one row each, from the committed runs: the table of docs/findings.md."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from normrnn.config.measure import bits
from normrnn.report.comparison import Comparison
from normrnn.report.groups import Group, groups
from normrnn.report.paired import Difference
from normrnn.report.runs import load
from normrnn.report.study import read_study
from normrnn.report.tables import DASH
from normrnn.report.trials import Trial, arms_of, best, pairs
from normrnn.report.verdict import group_verdict

LOWER, HIGHER = -1, 1
NOT_RUN = "not run"


@dataclass(frozen=True)
class Claim:
    """Something the paper says of a normalised network beside its baseline: that a figure of
    `Comparison.figures` is lower or higher, in one of our recipes (or studies of runs)."""

    where: str
    says: str
    runs: str
    figure: str
    expected: int
    settings: str = ""
    """What sets the group apart, where there are several."""


CLAIMS = (
    Claim(
        "Table 1, Figure 1",
        "speech: the normalised network fits the training set better (FCE 0.73 against 0.95)",
        "librispeech-mini",
        "best_training",
        LOWER,
    ),
    Claim(
        "Table 1",
        "speech: and is a little worse on the dev set (FCE 1.19 against 1.11)",
        "librispeech-mini",
        "best_validation",
        HIGHER,
    ),
    Claim("Figure 1, section 6", "speech: it overfits more", "librispeech-mini", "gap", HIGHER),
    Claim(
        "Table 1, Figure 1",
        "speech, three layers of 128: it fits the training set better",
        "librispeech-mini-small",
        "best_training",
        LOWER,
    ),
    Claim(
        "Table 1",
        "speech, three layers: worse on dev",
        "librispeech-mini-small",
        "best_validation",
        HIGHER,
    ),
    Claim(
        "Figure 1",
        "speech, three layers: it overfits more",
        "librispeech-mini-small",
        "gap",
        HIGHER,
    ),
    Claim(
        "Table 2, small",
        "words: it fits the training text better (perplexity 62.5 against 78.5)",
        "ptb-small-authors",
        "best_training",
        LOWER,
    ),
    Claim(
        "Table 2, small",
        "words: and is a little worse on validation (120.9 against 119.2), with the mini-batch's"
        " own statistics, as the authors' code had them",
        "ptb-small-authors",
        "best_with_batch_statistics",
        HIGHER,
    ),
    Claim(
        "Table 2, small",
        "the same with running statistics, which is what a user would have",
        "ptb-small-authors",
        "best_validation",
        HIGHER,
    ),
    Claim(
        "Table 2, small",
        "the same over the fifteen epochs of the paper's text",
        "ptb-small",
        "best_validation",
        HIGHER,
    ),
    Claim(
        "Table 2, medium",
        "words: a little worse on validation (90.6 against 89.0), mini-batch's own statistics",
        "ptb-medium",
        "best_with_batch_statistics",
        HIGHER,
    ),
    Claim(
        "Table 2, medium",
        "the same with running statistics, which dropout biases",
        "ptb-medium",
        "best_validation",
        HIGHER,
    ),
    Claim(
        "Table 2, medium",
        "the same with recalibrated statistics, dropout off",
        "ptb-medium",
        "best_with_recalibrated_statistics",
        HIGHER,
    ),
    Claim(
        "Table 2, large; Figure 2",
        "words: much better in training (35.0 against 49.3), much worse on validation (97.4 against"
        " 81.8)",
        "ptb-large",
        "best_validation",
        HIGHER,
    ),
    Claim(
        "Figure 2, section 6",
        "words: training is faster (updates to the baseline's best training loss, small network)",
        "ptb-small-authors",
        "updates_to_target",
        LOWER,
    ),
    Claim(
        "Figure 2, section 6",
        "words: it overfits more (the gap between training and validation, small network)",
        "ptb-small-authors",
        "gap",
        HIGHER,
    ),
    Claim(
        "Figure 3",
        "inside the recurrence: the normalised network learns, and stays behind",
        "studies/ptb-char-runs",
        "best_validation",
        HIGHER,
        "optimizer.lr 0.00078",
    ),
    Claim(
        "Table 3, appendix",
        "at the settings of the best baseline (1.10 nats there; here with clipped gradients) it is"
        " worse, or at best equivalent",
        "studies/ptb-char-runs",
        "best_validation",
        HIGHER,
        "optimizer.clip_norm 1.0",
    ),
)


COLUMNS = (
    "in the paper",
    "it says",
    "here: baseline, normalised",
    "difference (95% interval)",
    "verdict",
    "runs",
)


def findings(root: Path) -> str:
    """A table with a row per claim: what was said, what came out of which runs, the verdict."""
    rows = [_row(root, claim) for claim in CLAIMS]
    return table(COLUMNS, [*rows, _rates(root), *_search(root), _gradients(root)])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def judged(found: Difference, expected: int) -> str:
    """Whether a claim was found again: several seeds by their interval, one by its sign."""
    if found.answer == "some diverged":
        return found.answer
    answers = {"better": LOWER, "worse": HIGHER, "no difference seen": 0}
    if len(found.seeds) == 1:
        direction = (found.mean > 0) - (found.mean < 0)
    else:
        direction = answers[found.answer]
    says = "found again" if direction == expected else "turned round" if direction else "not found"
    return f"{says} (one seed)" if len(found.seeds) == 1 else says


def comparisons(root: Path, runs: str, norm: str = "") -> Iterator[tuple[Group, Comparison]]:
    """A normalisation, the paper's unless named, against the baseline: in every group of a study's
    runs, or in that of a recipe as it is."""
    directory = root / "results" / runs if "/" in runs else root / "results"
    found = [load(path.parent) for path in sorted(directory.glob("*/config.json"))]
    for group in groups(found):
        if "/" not in runs and (group.recipe, group.variant) != (runs, ""):
            continue
        wanted = norm or (group.paper.norm if group.paper else "")
        for comparison in group_verdict(group).comparisons:
            if comparison.other.norm == wanted:
                yield group, comparison


def _row(root: Path, claim: Claim) -> list[str]:
    for group, found in comparisons(root, claim.runs):
        if claim.settings not in group.title or claim.figure not in found.figures:
            continue
        figure = found.figures[claim.figure]
        digits = 3 if claim.figure == "gap" else found.measure.digits
        return [
            claim.where,
            claim.says,
            values(figure, 0 if figure.relative else digits),
            difference(figure, 1 if figure.relative else digits),
            _verdict(figure, claim.expected, found),
            seeds_of(claim.runs, found),
        ]
    return [claim.where, claim.says, DASH, DASH, NOT_RUN, link(claim.runs, name_of(claim.runs))]


def saved(found: Comparison, digits: int) -> str:
    """Updates to the baseline's best training loss, as a share more or less."""
    target = found.target
    if target.where != "training":
        return DASH  # its training loss is none
    if "updates_to_target" in found.figures:
        return difference(found.figures["updates_to_target"], digits)
    there = len(target.other) - target.other.count(None)
    return f"reached in {there} of {len(target.other)}" if there else "not reached"


def _verdict(figure: Difference, expected: int, found: Comparison) -> str:
    """What a claim came to; runs that are still to end say so far, which is not the claim."""
    said, far = judged(figure, expected), how_far(found)
    return f"open; so far {said}{far}" if far else said


def how_far(found: Comparison) -> str:
    both = (found.baseline.runs[0], found.other.runs[0])
    far = min(both, key=lambda run: run.epochs_done).progress_in_recipe
    return "" if far.startswith("all") else f", {far} epochs"


def seeds_of(runs: str, found: Comparison) -> str:
    return link(runs, several(len(found.pairs)))


def several(seeds: int) -> str:
    return f"{seeds} seed{'s' if seeds > 1 else ''}"


def name_of(runs: str) -> str:
    return runs.removeprefix("studies/")


def values(figure: Difference, digits: int) -> str:
    return ", ".join(f"{mean(arm):,.{digits}f}" for arm in (figure.baseline, figure.other))


def difference(figure: Difference, digits: int) -> str:
    shown = f"+.{digits}%" if figure.relative else f"+.{digits}f"
    more = " or more" if figure.at_least and figure.mean < 0 else ""
    text = f"{figure.mean:{shown}}{more}"
    ends = figure.interval
    return text if ends is None else f"{text} ({ends[0]:{shown}} to {ends[1]:{shown}})"


def link(runs: str, words: str) -> str:
    return f"[{words}](../RESULTS.md#{name_of(runs)})"


def _rates(root: Path) -> list[str]:
    """Section 6: the normalised network at its own learning rate, and at twice that."""
    name, figures = "ptb-small-learning-rate", {}
    for group, found in comparisons(root, f"studies/{name}"):
        rate = group.runs[0].settings["optimizer.lr"]
        figures[rate] = found.figures["best_validation"].other[0]
    where, says = "Section 6", "higher learning rates did not work well (twice the rate)"
    if not {1.0, 2.0} <= figures.keys():
        return [where, says, DASH, DASH, NOT_RUN, link(name, name)]
    both = Difference((1,), (figures[1.0],), (figures[2.0],))
    shown = f"normalised, perplexity {values(both, 1)}"
    verdict = f"open; so far {judged(both, HIGHER)}, 2 of 15 epochs"
    return [where, says, shown, difference(both, 1), verdict, link(name, "1 seed")]


def _search(root: Path) -> list[list[str]]:
    """The appendix: 52 settings, both arms."""
    name = "ptb-char-search"
    claims = (
        ("Table 3", "the best networks of a search are similar (1.11 nats against 1.10)"),
        ("Appendix", "with the same settings the normalised one was worse, or at best equivalent"),
        ("Appendix", "unless the learning rate is so high that the baseline alone breaks down"),
    )
    trials = read_study(root / "results/studies" / name).trials
    if not trials:
        return [[*claim, DASH, DASH, NOT_RUN, link(name, name)] for claim in claims]
    baseline, other = arms_of(trials)[:2]
    low, high = (_best_loss(trials, arm) for arm in (baseline, other))
    found = pairs(trials, baseline, other)
    both, worse = len(found.better) + len(found.worse), len(found.worse)
    broke, kept = len(found.only_other), len(found.only_baseline)
    apart = f"{high - low:+.3f} nats, {bits(high - low):+.3f} bits"
    similar = "turned round" if high < low else "found again" if high - low < 0.05 else "not found"
    outcomes = (
        (f"{low:.3f}, {high:.3f}", apart, similar),
        (f"worse in {worse} of {both}", DASH, "found again" if worse > 0.9 * both else "not found"),
        (
            f"only the baseline broke down: {broke} settings, only the other: {kept}",
            DASH,
            "found again" if broke > kept else "not found",
        ),
    )
    place = link(name, f"{len(trials)} settings")
    return [
        [*claim, shown, between, f"{verdict}, a quarter of an epoch each", place]
        for claim, (shown, between, verdict) in zip(claims, outcomes, strict=True)
    ]


def _best_loss(trials: Sequence[Trial], arm: str) -> float:
    top = best(trials, arm)
    return math.inf if top is None else top["arms"][arm]["loss"]


def _gradients(root: Path) -> list[str]:
    """The appendix's guess at the reason."""
    where, name = "Appendix", "ptb-char-runs"
    says = "perhaps because γ and β, repeated, make gradients explode or vanish"
    file = root / "results/studies" / name / "gradients-start.json"
    if not file.exists():
        return [where, says, DASH, DASH, NOT_RUN, link(name, name)]
    records: Sequence[dict] = json.loads(file.read_text(encoding="utf-8"))
    growth = [record["layers"]["l0"]["growth_per_step"] for record in records[:2]]
    both = ", ".join(f"{factor:.3f}" for factor in growth)
    faster = growth[1] < min(growth[0], 1) or growth[1] > max(growth[0], 1.02)
    verdict = "found again" if faster else "not found: it vanishes more slowly"
    shown = f"a gradient keeps {both} of its size per step"
    return [where, says, shown, f"{growth[1] - growth[0]:+.3f}", verdict, link(name, "1 network")]
