"""Questions that the paper did not ask, one row each, from the committed runs: the second table of
docs/findings.md."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from normrnn.config.measure import perplexity
from normrnn.report.comparison import Comparison
from normrnn.report.paired import Difference
from normrnn.report.runs import Run
from normrnn.report.tables import DASH
from tools import padding
from tools.findings import (
    NOT_RUN,
    comparisons,
    difference,
    how_far,
    link,
    name_of,
    saved,
    seeds_of,
    several,
    table,
    values,
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
    Question("words, locked dropout, weight drop: the same", "frame", "ptb-small-regularised"),
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


def answers(root: Path) -> str:
    """A table with a row per question that the paper did not ask."""
    rows = [_answer(root, question) for question in QUESTIONS]
    tested = [_recalibrated(root, question) for question in RECALIBRATED]
    return table(ANSWERS, [*rows, *_padding(root), *tested[:1], *_by_place(root), *tested[1:]])


def _padding(root: Path) -> list[list[str]]:
    """What it does to count padding, in the place of a baseline that does not."""
    name = "librispeech-mini-small-padding"
    file = root / "results/studies" / name / padding.FILE
    if not file.exists():
        return [["speech: counting padding", DASH, DASH, DASH, NOT_RUN, link(name, name)]]
    return [
        [
            f"speech: counting padding, {one.padding:.0%} of all frames, beside not counting it",
            DASH,
            values(one.found, 3),
            difference(one.found, 3),
            one.found.answer,
            link(name, several(len(one.found.seeds))),
        ]
        for one in padding.counted(json.loads(file.read_text(encoding="utf-8")))
        if one.statistics == "running"
    ]


def _answer(root: Path, question: Question) -> list[str]:
    for group, found in comparisons(root, question.runs, question.norm):
        best = found.figures.get("best_validation")
        if question.settings not in group.title or best is None:
            continue
        digits = found.measure.digits
        return [
            question.asks,
            saved(found, 1),
            values(best, digits),
            difference(best, digits),
            best.answer + how_far(found),
            seeds_of(question.runs, found),
        ]
    place = link(question.runs, name_of(question.runs))
    return [question.asks, DASH, DASH, DASH, NOT_RUN, place]


def _recalibrated(root: Path, question: Question) -> list[str]:
    for group, found in comparisons(root, question.runs, question.norm):
        names = [f"best_with_{kind}_statistics" for kind in ("running", "recalibrated")]
        # One of them is what the best model is saved with.
        if question.settings in group.title and any(name in found.figures for name in names):
            best = found.figures["best_validation"]
            running, recalibrated = (found.figures.get(name, best) for name in names)
            both = Difference(running.seeds, running.other, recalibrated.other)
            return _of_statistics(question.asks, both, question.runs, found)
    place = link(question.runs, name_of(question.runs))
    return [question.asks, DASH, DASH, DASH, NOT_RUN, place]


def _by_place(root: Path) -> list[list[str]]:
    """The same where a run was validated in the middle of its epochs too: all seeds read the text
    in one order, so that before a validation all have just read the same."""
    runs, rows = "ptb-small-authors", []
    for _, found in comparisons(root, runs, "frame"):
        for where, ends in (("ends", True), ("middles", False)):
            running, recalibrated = (
                tuple(_mean_of(other, kind, ends=ends) for _, other in found.pairs)
                for kind in ("running", "recalibrated")
            )
            both = Difference(tuple(found.seeds), running, recalibrated)
            asks = f"words: the same, mean over the {where} of epochs"
            rows.append(_of_statistics(asks, both, runs, found))
    return rows


def _mean_of(run: Run, kind: str, *, ends: bool) -> float:
    """Of the validations at the ends of epochs, or of those before."""
    rows = run.split("valid", kind)
    last = {row["epoch"]: row["updates"] for row in rows}
    return mean(
        perplexity(row["loss"]) for row in rows if (row["updates"] == last[row["epoch"]]) == ends
    )


def _of_statistics(asks: str, both: Difference, runs: str, found: Comparison) -> list[str]:
    digits = found.measure.digits
    shown = values(both, digits), difference(both, digits), both.answer + how_far(found)
    return [asks, DASH, *shown, seeds_of(runs, found)]
