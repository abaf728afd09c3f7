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
from tools import padding

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
        "the same with population statistics, which is what a user would have",
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
        "best_with_running_statistics",
        HIGHER,
    ),
    Claim(
        "Table 2, medium",
        "the same with recalibrated statistics, dropout off",
        "ptb-medium",
        "best_validation",
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


@dataclass(frozen=True)
class Question:
    """Something the paper did not ask: what another normalisation, or the paper's in another
    setting, does beside its baseline."""

    asks: str
    norm: str
    runs: str
    settings: str = ""
    """What sets the group apart, where there are several."""


REGULARISERS, SMALL_TEXT = "studies/quickstart-regularisers", "studies/quickstart-norms"
QUESTIONS = (
    Question("words: layer normalisation", "layer", "ptb-small-authors"),
    Question("words: sequence-wise", "sequence", "ptb-small-authors"),
    Question("words: both transitions", "recurrent", "ptb-small-authors"),
    Question("words, regularised: frame-wise", "frame", "ptb-small-regularised"),
    Question("speech: layer normalisation", "layer", "librispeech-mini-small"),
    Question("a small text: frame-wise", "frame", SMALL_TEXT),
    Question("a small text: inside the recurrence", "hidden", SMALL_TEXT),
    Question("a small text: layer normalisation", "layer", SMALL_TEXT),
    Question("a small text: both transitions", "recurrent", SMALL_TEXT),
    Question("a small text: whitening, which sees ahead", "whiten", SMALL_TEXT),
    Question("a small text, locked dropout: frame-wise", "frame", REGULARISERS, "dropout 0.3"),
    Question("a small text, zoneout: frame-wise", "frame", REGULARISERS, "zoneout_h 0.1"),
    Question("a small text, weight drop: frame-wise", "frame", REGULARISERS, "weight_drop 0.3"),
)
RECALIBRATED = (
    Question(
        "words: recalibrated statistics, in the place of running ones", "frame", "ptb-small-authors"
    ),
    Question("words, dropout: the same", "frame", "ptb-medium"),
    Question("a small text: the same", "frame", SMALL_TEXT),
    Question("a small text, locked dropout: the same", "frame", REGULARISERS, "dropout 0.3"),
)
"""The same of what a network is tested with: the first kind of statistics stands for a baseline."""
ANSWERS = (
    "asked",
    "updates to the baseline's best training loss",
    "held out, at its best: baseline, normalised",
    "difference (95% interval)",
    "answer",
    "runs",
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
    return _table(COLUMNS, [*rows, _rates(root), *_search(root), _gradients(root)])


def answers(root: Path) -> str:
    """A table with a row per question that the paper did not ask."""
    rows = [_answer(root, question) for question in QUESTIONS]
    tested = [_recalibrated(root, question) for question in RECALIBRATED]
    return _table(ANSWERS, [*rows, *_padding(root), *tested])


def _padding(root: Path) -> list[list[str]]:
    """What it does to count padding, in the place of a baseline that does not."""
    name = "librispeech-mini-small-padding"
    file = root / "results/studies" / name / padding.FILE
    if not file.exists():
        return [["speech: counting padding", DASH, DASH, DASH, NOT_RUN, _link(name, name)]]
    return [
        [
            f"speech: counting padding, {one.padding:.0%} of all frames, beside not counting it",
            DASH,
            _values(one.found, 3),
            _difference(one.found, 3),
            one.found.answer,
            _link(name, _several(len(one.found.seeds))),
        ]
        for one in padding.counted(json.loads(file.read_text(encoding="utf-8")))
        if one.statistics == "running"
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
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


def _comparisons(root: Path, runs: str, norm: str = "") -> Iterator[tuple[Group, Comparison]]:
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
    for group, found in _comparisons(root, claim.runs):
        if claim.settings not in group.title or claim.figure not in found.figures:
            continue
        figure = found.figures[claim.figure]
        digits = 3 if claim.figure == "gap" else found.measure.digits
        return [
            claim.where,
            claim.says,
            _values(figure, 0 if figure.relative else digits),
            _difference(figure, 1 if figure.relative else digits),
            _verdict(figure, claim.expected, found),
            _seeds(claim.runs, found),
        ]
    return [claim.where, claim.says, DASH, DASH, NOT_RUN, _link(claim.runs, _name(claim.runs))]


def _answer(root: Path, question: Question) -> list[str]:
    for group, found in _comparisons(root, question.runs, question.norm):
        best = found.figures.get("best_validation")
        if question.settings not in group.title or best is None:
            continue
        digits = found.measure.digits
        return [
            question.asks,
            saved(found, 1),
            _values(best, digits),
            _difference(best, digits),
            best.answer + _how_far(found),
            _seeds(question.runs, found),
        ]
    place = _link(question.runs, _name(question.runs))
    return [question.asks, DASH, DASH, DASH, NOT_RUN, place]


def _recalibrated(root: Path, question: Question) -> list[str]:
    for group, found in _comparisons(root, question.runs, question.norm):
        kinds = ("best_with_running_statistics", "best_validation")
        if question.settings in group.title and set(kinds) <= found.figures.keys():
            running, recalibrated = (found.figures[kind] for kind in kinds)
            both = Difference(running.seeds, running.other, recalibrated.other)
            digits = found.measure.digits
            shown = _values(both, digits), _difference(both, digits), both.answer + _how_far(found)
            return [question.asks, DASH, *shown, _seeds(question.runs, found)]
    place = _link(question.runs, _name(question.runs))
    return [question.asks, DASH, DASH, DASH, NOT_RUN, place]


def saved(found: Comparison, digits: int) -> str:
    """Updates to the baseline's best training loss, as a share more or less."""
    target = found.target
    if target.where != "training":
        return DASH  # its training loss is none
    if "updates_to_target" in found.figures:
        return _difference(found.figures["updates_to_target"], digits)
    there = len(target.other) - target.other.count(None)
    return f"reached in {there} of {len(target.other)}" if there else "not reached"


def _verdict(figure: Difference, expected: int, found: Comparison) -> str:
    """What a claim came to; runs that are still to end say so far, which is not the claim."""
    said, far = judged(figure, expected), _how_far(found)
    return f"open; so far {said}{far}" if far else said


def _how_far(found: Comparison) -> str:
    both = (found.baseline.runs[0], found.other.runs[0])
    far = min(both, key=lambda run: run.epochs_done).progress
    return "" if far.startswith("all") else f", {far} epochs"


def _seeds(runs: str, found: Comparison) -> str:
    return _link(runs, _several(len(found.pairs)))


def _several(seeds: int) -> str:
    return f"{seeds} seed{'s' if seeds > 1 else ''}"


def _name(runs: str) -> str:
    return runs.removeprefix("studies/")


def _values(figure: Difference, digits: int) -> str:
    return ", ".join(f"{mean(arm):,.{digits}f}" for arm in (figure.baseline, figure.other))


def _difference(figure: Difference, digits: int) -> str:
    shown = f"+.{digits}%" if figure.relative else f"+.{digits}f"
    more = " or more" if figure.at_least and figure.mean < 0 else ""
    text = f"{figure.mean:{shown}}{more}"
    ends = figure.interval
    return text if ends is None else f"{text} ({ends[0]:{shown}} to {ends[1]:{shown}})"


def _link(runs: str, words: str) -> str:
    return f"[{words}](../RESULTS.md#{_name(runs)})"


def _rates(root: Path) -> list[str]:
    """Section 6: the normalised network at its own learning rate, and at twice that."""
    name, figures = "ptb-small-learning-rate", {}
    for group, found in _comparisons(root, f"studies/{name}"):
        rate = group.runs[0].settings["optimizer.lr"]
        figures[rate] = found.figures["best_validation"].other[0]
    where, says = "Section 6", "higher learning rates did not work well (twice the rate)"
    if not {1.0, 2.0} <= figures.keys():
        return [where, says, DASH, DASH, NOT_RUN, _link(name, name)]
    both = Difference((1,), (figures[1.0],), (figures[2.0],))
    values = f"normalised, perplexity {_values(both, 1)}"
    verdict = f"open; so far {judged(both, HIGHER)}, 2 of 15 epochs"
    return [where, says, values, _difference(both, 1), verdict, _link(name, "1 seed")]


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
        return [[*claim, DASH, DASH, NOT_RUN, _link(name, name)] for claim in claims]
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
    link = _link(name, f"{len(trials)} settings")
    return [
        [*claim, shown, difference, f"{verdict}, a quarter of an epoch each", link]
        for claim, (shown, difference, verdict) in zip(claims, outcomes, strict=True)
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
        return [where, says, DASH, DASH, NOT_RUN, _link(name, name)]
    records: Sequence[dict] = json.loads(file.read_text(encoding="utf-8"))
    growth = [record["layers"]["l0"]["growth_per_step"] for record in records[:2]]
    values = ", ".join(f"{factor:.3f}" for factor in growth)
    faster = growth[1] < min(growth[0], 1) or growth[1] > max(growth[0], 1.02)
    verdict = "found again" if faster else "not found: it vanishes more slowly"
    shown = f"a gradient keeps {values} of its size per step"
    return [where, says, shown, f"{growth[1] - growth[0]:+.3f}", verdict, _link(name, "1 network")]
