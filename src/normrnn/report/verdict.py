"""Whether normalisation helped: the sentence that people act on, and the numbers it rests on."""

import math
from dataclasses import dataclass
from typing import Any

from normrnn.errors import UsageError
from normrnn.report import sentences
from normrnn.report.comparison import Comparison, compared
from normrnn.report.groups import Group, groups
from normrnn.report.runs import Runs, loaded


@dataclass(frozen=True)
class Verdict:
    """Every normalised arm against its baseline; `sentences` also say what cannot be compared."""

    comparisons: list[Comparison]
    sentences: list[str]

    @property
    def sentence(self) -> str:
        """All of them."""
        return " ".join(self.sentences)

    def __str__(self) -> str:
        return self.sentence

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        comparisons = [comparison.to_dict() for comparison in self.comparisons]
        return {"comparisons": comparisons, "sentence": self.sentence}


def verdict(runs: Runs, target: float | None = None) -> Verdict:
    """Normalised arms against their baselines, with 95 % intervals over the seeds both have.

    `runs`: run directories or what `load` gave, one or several, in any order. Every distinct
    setting is an arm. `target`: a figure to reach on validation, perplexity for words, nats per
    character, FCE; without one, the baseline's best training loss is. `print` it for the sentence;
    `comparisons` have the numbers, `to_dict()` all of it as plain values.
    """
    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"a target is a number above 0, not {target}")
    parts = groups(loaded(runs))
    found = [group_verdict(group, target) for group in parts]
    said = [
        f"{group.title}: {sentence}" if len(parts) > 1 else sentence
        for group, one in zip(parts, found, strict=True)
        for sentence in one.sentences
    ]
    return Verdict([comparison for one in found for comparison in one.comparisons], said)


def group_verdict(group: Group, target: float | None = None) -> Verdict:
    """Of runs that can be compared."""
    arms = group.arms
    baselines = [arm for arm in arms if not arm.runs[0].normalisation.normalises]
    others = [arm for arm in arms if arm not in baselines]
    if not baselines:
        return Verdict([], [sentences.no_baseline(arm) for arm in others])
    if not others:
        return Verdict([], ["There is no normalised run here to compare the baseline with."])
    found = [compared(a, b, target) for b in others for a in baselines]
    return Verdict(found, [sentences.comparison(one) for one in found])
