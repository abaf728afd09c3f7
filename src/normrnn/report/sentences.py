"""A comparison in plain words: no more than the seeds allow."""

from statistics import geometric_mean, mean

from normrnn.report.comparison import NO_GAP, Comparison, ended
from normrnn.report.curves import rate, spread, trailing_average, validations
from normrnn.report.groups import Arm
from normrnn.report.paired import MOST_SEEDS, Difference


def no_baseline(arm: Arm) -> str:
    """Of an arm that stands alone."""
    return f"There is no baseline to compare the {arm.words} with yet."


def comparison(found: Comparison) -> str:
    """What the normalised arm saved, what that did to validation, and on how many seeds."""
    if not found.pairs:
        return f"No seed is common to the baseline and the {found.other.words}: no verdict."
    begun = bool(found.target.losses)
    parts = [
        _baseline(found),
        _seeds(found),
        _diverged(found),
        (_target(found) if found.asked is not None else _saving(found)) if begun else _begun(found),
    ]
    if begun and not found.target.reached:
        parts.append(_lead(found))
    parts += _validation(found) if begun else [_speeds(found)]
    same = "are the updates that both have" if found.same_updates else "is what both have read"
    if found.going and begun:
        parts.append(
            f"Not all of these runs have finished: compared {same}"
            f"{'' if _over(found) else ', and this can still change'}."
        )
    elif found.cut:
        parts.append(f"These runs are of different lengths: compared {same}.")
    if any(other.looks_ahead for _, other in found.pairs):
        parts.append(
            "Its training loss is not compared: while it trains, its statistics see the words that"
            " it is to predict."
        )
    if left := found.left_out:
        parts.append(f"{left} more seed{'s' if left > 1 else ''} had not finished.")
    if short := found.shorter:
        parts.append(f"{short} more seed{'s' if short > 1 else ''} got less far: not compared.")
    if alone := len(found.baseline.runs) + len(found.other.runs) - 2 * _common(found):
        several = alone > 1
        parts.append(
            f"{alone} run{'s have' if several else ' has'} no partner of the same seed, and"
            f" {'are' if several else 'is'} not compared."
        )
    return " ".join(part for part in parts if part)


def _over(found: Comparison) -> bool:
    """Whether no run will go on."""
    return all(ended(run) for run in (*found.baseline.runs, *found.other.runs))


def _common(found: Comparison) -> int:
    return len(found.pairs) + len(found.broken) + found.left_out + found.shorter


def _baseline(found: Comparison) -> str:
    """Which, where there may be several."""
    name = found.baseline.name
    return "" if name == "baseline" else f"Against the {name}:"


def _diverged(found: Comparison) -> str:
    """First of all, since a mean over the rest flatters."""
    counts = found.diverged
    if not any(counts.values()):
        return ""
    arms = (("other", found.other), ("baseline", found.baseline))
    said = [
        f"{counts[name]} of {len(arm.runs)} runs of the {arm.words}"
        for name, arm in arms
        if counts[name]
    ]
    what = "of the other seeds" if found.going else "of the seeds that trained to their end"
    if any(run.diverged for pair in found.pairs for run in pair):
        what = "of what came before that"
    return f"{' and '.join(said)} diverged, no finite loss any more; what follows is {what}."


def _seeds(found: Comparison) -> str:
    n = len(found.pairs)
    return "One seed, which says nothing in general." if n == 1 else f"{n} paired seeds."


def _begun(found: Comparison) -> str:
    if not _over(found):
        return f"The baseline and the {found.other.words} have not both trained for an epoch yet."
    arms = ((found.baseline, "baseline"), (found.other, found.other.words))
    ends = [
        f"{sum(run.finished for run in arm.runs)} of {len(arm.runs)} runs of the {words}"
        for arm, words in arms
    ]
    return (
        f"To the end trained {' and '.join(ends)}: no seed has an epoch of both, so there is"
        " nothing to compare."
    )


def _saving(found: Comparison) -> str:
    """Updates and time to the baseline's best loss."""
    target = found.target
    loss = f"best {target.where} loss of {mean(target.losses):.3f} nats"
    if target.reached:
        return _needed(found, f"o reach the baseline's {loss}")
    missed, n = sum(point is None for point in target.other), len(target.other)
    if target.sooner:
        fewer = f", with fewer updates in {target.sooner}" if found.same_updates else ""
        return (
            f"The {found.other.words} reached the baseline's {loss} in {n - missed} of {n}"
            f" seeds{fewer}: no mean of them, since not all did."
        )
    of = f" in {missed} of {n} seeds" if n > 1 else ""
    so_far = " so far" if found.going and not _over(found) else ""
    return f"No saving{so_far}: the {found.other.words} did not reach the baseline's {loss}{of}."


def _target(found: Comparison) -> str:
    """Updates and time to the figure that the user asked for."""
    target = found.target
    goal = f"{found.measure.name} of {target.asked:,g} on {place(found)}"
    if target.reached:
        return _needed(found, f"o reach a {goal}")
    others, baselines = (
        sum(point is not None for point in arm) for arm in (target.other, target.baseline)
    )
    n = len(target.losses)
    return (
        f"A {goal} was reached by {others} of {n} runs of the {found.other.words} and by"
        f" {baselines} of {n} of the baseline."
    )


def _needed(found: Comparison, goal: str) -> str:
    """Updates and time to a goal, which goes on after a T or t."""
    if found.target.too_early:
        at = max(p.updates for arm in (found.target.baseline, found.target.other) for p in arm if p)
        return (
            f"T{goal}, no saving can be seen: the baseline and the {found.other.words} were both"
            f" there when first looked at, after {at:,} updates."
        )
    updates = found.figures.get("updates_to_target")
    if updates is None:
        return (
            f"T{goal}, updates of the {found.other.words} and of the baseline are not compared:"
            f" they are of different sizes. {_time(found)}"
        )
    unclear = updates.answer == "no difference seen"
    saved = updates.mean < 0 and not unclear
    none = f"No saving{' seen' if unclear else ''}: t"
    text = (
        f"{'T' if saved else none}{goal}, the {found.other.words} needed"
        f" {_share(updates, 'fewer', 'as many')} updates{_evidence(updates, 'fewer')}:"
        f" {_instead(updates)}."
    )
    return f"{text} {_time(found)}"


def _time(found: Comparison) -> str:
    if "seconds_to_target" not in found.figures:
        return f"Seconds are not compared: {found.not_timed}."
    seconds = found.figures["seconds_to_target"]
    least, evidence = _share(seconds, "less", "as much"), _evidence(seconds, "less")
    unclear = seconds.answer == "no difference seen"
    said = f"No difference seen in time, {least}" if unclear else f"It took {least} time"
    doing = "which also depend on what else the machine was doing"
    return f"{said}{evidence}: {_instead(seconds)} seconds, {doing}."


def _instead(found: Difference) -> str:
    """Means whose ratio is the share that was said."""
    other, baseline = map(geometric_mean, (found.other, found.baseline))
    return f"{other:,.0f} instead of {baseline:,.0f}"


def _evidence(found: Difference, less: str) -> str:
    """Interval and seeds behind a share of the baseline's."""
    if found.interval is None:
        return ""
    if not any(found.differences):
        return " (in every seed)"
    low, high = found.interval
    one_side = low * high > 0
    ends = sorted(found.interval, key=abs) if one_side else found.interval
    sides = [f"{_percent(end)}{'' if one_side else _side(end, less)}" for end in ends]
    agree = f"{_side(found.mean, less).strip()} in {found.agreeing} of {found.compared} seeds"
    return f" (95% t interval {' to '.join(sides)}, {agree})"


def _percent(share: float) -> str:
    """What is wider than that says no more."""
    return f"{abs(share):.0%}" if share < 10 else "over 1,000%"


def _side(share: float, less: str) -> str:
    return f" {less if share < 0 else 'more'}"


def _share(found: Difference, less: str, equal: str) -> str:
    share = found.mean
    least = "at least " if found.at_least and share < 0 else ""
    return equal if abs(share) < 0.005 else f"{least}{_percent(share)}{_side(share, less)}"


def _lead(found: Comparison) -> str:
    """How long the arm was ahead from the start; empty if it was not, or is so in the end."""
    points = trailing_average if found.target.where == "training" else validations
    ends = []
    if not found.same_updates:
        return ""
    for pair in found.pairs:
        base, other = ({p.updates: p.loss for p in points(run)} for run in pair)
        common = sorted(base.keys() & other.keys())
        behind = next((i for i, at in enumerate(common) if other[at] >= base[at]), 0)
        if not behind or other[common[-1]] < base[common[-1]]:
            return ""
        ends.append(common[behind - 1])
    return (
        f"At the same number of updates its {found.target.where} loss was the lower one until"
        f" update {spread(ends, 0)}."
    )


def _speeds(found: Comparison) -> str:
    """How fast both arms train; empty before there is anything to time."""
    rates = [(a, b) for x, y in found.pairs if (a := rate(x)) and (b := rate(y))]
    if not rates or found.not_timed:
        return ""
    base, other = (mean(pair[i] for pair in rates) for i in (0, 1))
    return (
        f"In {min(run.updates for pair in found.pairs for run in pair):,} updates the normalised"
        f" network processed {other:,.0f} {found.measure.unit} a second, {other / base:.2f} times"
        f" the baseline's {base:,.0f} (which also depends on what else the machine was doing)."
    )


def place(found: Comparison) -> str:
    """Where networks are compared on what they have not seen."""
    return "the dev set" if found.measure.held_out == "dev" else "validation"


def _validation(found: Comparison) -> list[str]:
    """Best, final, frame errors, the gap to training, and what the statistics do to it."""
    figures, shown = found.figures, found.measure
    if "best_validation" not in figures:
        return []
    best, last, of = figures["best_validation"], figures["final_validation"], len(found.pairs)
    parts = [_figure(f"Its best {shown.name} on {place(found)}", best, shown.digits, of)]
    if (best.other, best.baseline) != (last.other, last.baseline):
        parts.append(_figure("At the last validation it", last, shown.digits, of))
    if "best_frame_error_rate" in figures:
        errors = figures["best_frame_error_rate"]
        parts.append(_figure("Its best frame error rate", errors, 3, of))
    parts += [_overfitting(found, figures["gap"])] if "gap" in figures else []
    if "best_with_batch_statistics" in figures and shown.name == "perplexity":
        what = "With the validation mini-batch's own statistics, as the authors' code had them, its"
        what += f" best {shown.name}"
        parts.append(_figure(what, figures["best_with_batch_statistics"], shown.digits, of))
    return parts


def _figure(what: str, found: Difference, digits: int, of: int = 1) -> str:
    """One figure of both arms, and whether they differ; `of` so many seeds some may have it."""
    alone = "; one seed alone has it" if len(found.seeds) < of else ""
    both = f"{spread(found.other, digits)} against the baseline's {spread(found.baseline, digits)}"
    if found.interval is None:
        return f"{what} was {both} ({_apart_by(mean(found.baseline), mean(found.other))}{alone})."
    low, high = found.interval
    side = "lower" if found.mean < 0 else "higher" if found.mean > 0 else "the same"
    evidence = (
        f"{found.mean:+.{digits}f}, 95% t interval {low:+.{digits}f} to {high:+.{digits}f},"
        f" {side} in {found.agreeing} of {found.compared} seeds,"
        f" probability of improvement {found.probability_of_improvement:.2f}"
    )
    if found.answer == "some diverged":
        return f"{what} was {both} ({evidence})."
    if found.answer != "no difference seen":
        return f"{what} was {found.answer}: {both} ({evidence})."
    return f"{what} was {both}: no difference seen ({evidence}{_needed_seeds(found)})."


def _apart_by(baseline: float, other: float) -> str:
    side = "lower" if other < baseline else "higher"
    if not baseline:
        return side if other else "the same"
    share = abs(other / baseline - 1)
    return f"{share:.1%} {side}" if share >= 0.0005 else "the same"


def _needed_seeds(found: Difference) -> str:
    n = found.seeds_needed
    if n is None:
        return ""
    many = f"more than {MOST_SEEDS:,}" if n > MOST_SEEDS else f"about {n:,}"
    return f"; to see a difference of that size, {many} seeds are needed"


def _overfitting(found: Comparison, gaps: Difference) -> str:
    """In words that fit the sign: a validation loss below the training loss is no overfitting."""
    ours, theirs = mean(gaps.other), mean(gaps.baseline)
    last = (
        f"hen both were last validated, its loss on {place(found)} was {_apart(ours)} its training"
        f" loss, the baseline's {_apart(theirs)}."
    )
    if gaps.answer == "some diverged":
        return f"W{last}"
    return f"{_who_overfits(gaps, ours > NO_GAP, theirs > NO_GAP)}: w{last}"


def _who_overfits(gaps: Difference, ours: bool, theirs: bool) -> str:
    if not ours and not theirs:
        return "Neither overfits"
    if abs(gaps.mean) <= NO_GAP or gaps.answer == "no difference seen":
        return "No difference in overfitting seen"
    if ours and theirs:
        return f"It overfits {'more' if gaps.mean > 0 else 'less'}"
    return "It overfits, the baseline does not" if ours else "The baseline overfits, it does not"


def _apart(nats: float) -> str:
    return f"{abs(nats):.2f} nats {'above' if nats > 0 else 'below'}"
