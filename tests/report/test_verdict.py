"""Verdicts: every setting an arm, pairs by seed, and no more said than the seeds allow."""

import json
import math
import random
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

import normrnn.report
from normrnn.report.curves import gap
from normrnn.report.groups import Group, groups
from normrnn.report.page import markdown, page
from normrnn.report.paired import Difference
from normrnn.report.pictures import figure
from normrnn.report.runs import Run, find
from normrnn.report.tables import differences_table, paper_table, target_table
from normrnn.report.verdict import verdict
from tests.report.made_runs import make_run, said, short_run

WORDS = {"level": "word"}


def test_arms_that_differ_in_any_setting_are_all_there_in_any_order() -> None:
    """γ alone, a setting of both arms, or both."""
    base = short_run("none", [5, 4, 3, 3], model={"gamma": 1.0})
    good = short_run("frame", [4, 3, 2, 2], model={"gamma": 0.1})
    bad = short_run("frame", [6, 5, 4, 4], model={"gamma": 1.0})
    answers = {tuple(verdict(list(order)).sentences) for order in permutations([base, good, bad])}
    ((first, second),) = answers
    assert "the frame-wise normalised network (model.gamma 0.1) needed 25% fewer updates" in first
    assert "(model.gamma 1.0) did not reach the baseline's best training loss of 3.000" in second
    names = [arm.name for arm in groups([bad, base, good])[0].arms]
    assert names == ["baseline", "frame (model.gamma 0.1)", "frame (model.gamma 1.0)"]

    own = short_run("frame", [5, 4, 3, 2], model={"gamma": None}, seed=2)
    recurrent = short_run("recurrent", [5, 4, 3, 2], model={"gamma": None})
    names = [arm.name for arm in groups([base, bad, own, recurrent])[0].arms]
    assert names == ["baseline", "frame", "recurrent"]  # 1.0 was frame's own all the time

    slow = [short_run(n, [6, 5, 4, x], recipe="mine", optimizer={"lr": 1.0}) for n, x in PAIR]
    fast = [short_run(n, [5, 4, 3, x], recipe="mine", optimizer={"lr": 2.0}) for n, x in PAIR]
    answers = {frozenset(verdict(list(o)).sentences) for o in permutations([*slow, *fast])}
    (sentences,) = answers
    first, second = sorted(sentences)
    for lr, sentence in (("1.0", first), ("2.0", second)):
        assert sentence.startswith(f"mine, optimizer.lr {lr}: One seed")
        assert "was 12.2 against the baseline's 33.1" in sentence


PAIR = (("none", 3.0), ("frame", 2.0))


def test_arms_tuned_apart_are_compared_and_named_by_what_differs() -> None:
    """A baseline at its best against a normalised network at its best."""
    runs = [short_run("none", [5, 4, 3, 3], seed, optimizer={"lr": 1.0}) for seed in (1, 2)]
    runs += [short_run("frame", [4, 3, 2, 2], seed, optimizer={"lr": 4.0}) for seed in (1, 2)]
    (comparison,) = verdict(runs[::-1]).comparisons
    assert comparison.baseline.name == "baseline (optimizer.lr 1.0)"
    assert comparison.other.name == "frame (optimizer.lr 4.0)"
    assert comparison.seeds == [1, 2]
    (other,) = verdict([*runs, short_run("none", [5, 4, 3, 3], 7, data_sha256="ab")]).comparisons
    assert other.seeds == [1, 2]  # other data stand alone


def test_one_arm_tuned_apart_stands_beside_the_others() -> None:
    """Two arms chose the same value, the third another one: the baseline is compared with both."""
    runs = [short_run("none", [5, 4, 3, 3], seed, optimizer={"lr": 1.0}) for seed in (1, 2)]
    runs += [short_run("frame", [4, 3, 2, 2], seed, optimizer={"lr": 1.0}) for seed in (1, 2)]
    runs += [short_run("layer", [4, 3, 2, 1], seed, optimizer={"lr": 4.0}) for seed in (1, 2)]
    for order in (runs, runs[::-1], runs[2:] + runs[:2]):
        found = verdict(order).comparisons
        names = [(one.baseline.name, one.other.name) for one in found]
        baseline = "baseline (optimizer.lr 1.0)"
        assert names == [
            (baseline, "frame (optimizer.lr 1.0)"),
            (baseline, "layer (optimizer.lr 4.0)"),
        ]
        assert [one.seeds for one in found] == [[1, 2], [1, 2]]
    # A second baseline makes it unclear with which it was to be compared.
    more = [short_run(n, [5, 4, 3, 3], optimizer={"lr": 2.0}) for n in ("none", "frame")]
    assert {one.other.norm for one in verdict([*runs, *more]).comparisons} == {"frame"}


def test_of_the_same_run_twice_the_one_that_got_further_counts() -> None:
    short, long = short_run("frame", [4, 3]), short_run("frame", [4, 3, 2, 2])
    base = short_run("none", [5, 4, 3, 3])
    assert said(base, short, long) == said(long, short, base) == said(base, long)


def test_savings_against_the_same_seed() -> None:
    baseline = short_run("none", [5, 4, 4, 3, 3, 2.5, 2.4, 2.4])
    quick = short_run("frame", [5, 3, 2.4, 2.2, 2, 2, 2, 2])
    found = verdict([baseline, quick, short_run("frame", [9] * 8, seed=2)])
    (comparison,) = found.comparisons
    assert comparison.seeds == [1]
    target = comparison.target
    assert target.losses == pytest.approx((2.4,))
    assert [(p.updates, p.seconds) for p in target.baseline if p] == [(40, 20.0)]
    assert [(p.updates, p.seconds) for p in target.other if p] == [(20, 10.0)]
    assert "needed 50% fewer updates: 20 instead of 40." in found.sentence


def test_one_seed_makes_no_general_claim() -> None:
    text = said(short_run("none", [5, 4, 3, 3]), short_run("frame", [4, 3, 2, 2]))
    assert text.startswith("One seed, which says nothing in general.")
    assert (
        "Its best perplexity on validation was 12.2 against the baseline's 33.1 (63.2% low" in text
    )
    for word in ("better", "worse", "interval", "probability"):
        assert word not in text


def test_several_seeds_are_answered_by_the_interval() -> None:
    runs = []
    for seed, (loss, other) in {1: (3.0, 2.0), 2: (3.1, 2.1), 3: (3.2, 2.21)}.items():
        runs += [short_run("none", [5, 4, 4, loss], seed)]
        runs += [short_run("frame", [5, 3, 2.5, other], seed)]
    found = verdict(runs)
    text = found.sentence
    assert text.startswith("3 paired seeds. No saving seen: to reach the baseline's best training")
    # One look apart in every seed: log ¾ ± 4.303 · √(¼² + ⅓²) / √12 / √3.
    assert (
        "25% fewer updates (95% t interval 44% fewer to 1% more, fewer in 3 of 3 seeds): 15 instead"
        " of 20." in text
    )
    assert (
        "Its best perplexity on validation was better: 13.6 ± 1.4 against the baseline's 36.7"
        in text
    )
    assert "lower in 3 of 3 seeds, probability of improvement 1.00)" in text
    figures = found.comparisons[0].figures
    assert figures["best_validation"].answer == "better"
    assert figures["updates_to_target"].interval is not None
    data = json.loads(json.dumps(found.to_dict()))
    assert data["sentence"] == text
    assert data["comparisons"][0]["figures"]["best_validation"]["answer"] == "better"
    assert data["comparisons"][0]["seeds"] == [1, 2, 3]

    runs = []
    for seed, (loss, other) in {1: (3.0, 2.9), 2: (3.1, 3.3), 3: (3.2, 3.1)}.items():
        runs += [short_run("none", [5, 4, 4, loss], seed)]
        runs += [short_run("frame", [5, 4, 4, other], seed)]
    text = said(*runs)
    assert ": no difference seen (+0.4, 95% t interval" in text
    assert "higher in 1 of 3 seeds" in text
    assert "more than 1,000 seeds are needed" in text
    assert "better:" not in text
    assert "worse:" not in text


def test_sentences_for_the_other_cases() -> None:
    baseline = short_run("none", [5, 4, 3, 3])
    assert "did not reach" in said(baseline, short_run("frame", [5] * 4))
    assert said(short_run("frame", [5] * 4)) == (
        "There is no baseline to compare the frame-wise normalised network with yet."
    )
    long = short_run("none", [5, 4, 3, 3, 3, 3])
    late = short_run("frame", [5, 4, 3.5, 3.1, 2.9, 2.9])
    assert "No saving: to reach" in said(long, late)
    assert "25% more updates" in said(long, late)
    assert "no normalised run here" in said(baseline)
    assert "No seed is common" in said(baseline, short_run("frame", [5] * 4, 2))


def test_an_early_lead_that_is_lost_is_said() -> None:
    baseline = short_run("none", [6, 5, 4, 3, 2, 1])
    # Averages over an epoch, from update 10 on: 5.5, 4.5, 3.5, 2.5, 1.5 and 4.5, 3.5, 3, 2.5, 2.
    text = said(baseline, short_run("frame", [5, 4, 3, 3, 2, 2]))
    assert "did not reach the baseline's best training loss of 1.500 nats. At the same" in text
    assert "its training loss was the lower one until update 20. Its best" in text
    never = said(baseline, short_run("frame", [7, 6, 5, 4, 3, 2]))
    assert "did not reach" in never
    assert "the lower one" not in never


def test_unfinished_runs_are_compared_as_far_as_both_got() -> None:
    """The baseline has gone on to losses that the other has not had time for."""
    baseline = short_run("none", [5, 4, 3, 3, 2, 2])
    other = short_run("frame", [4, 3, 2.5, 2.5])
    other.config["epochs"] = 3
    text = said(baseline, other)
    assert "best training loss of 3.000 nats" in text  # that of two epochs, not of three
    assert "25% fewer updates" in text  # 15 instead of 20
    assert "was 20.1 against the baseline's 33.1" in text  # e^3 and e^3.5
    assert "compared are the updates that both have" in text


def test_a_run_that_is_just_being_validated_is_compared_up_to_the_validation_before() -> None:
    """Both have trained for two epochs; only one has been validated after the second."""
    baseline, other = short_run("none", [5, 4, 3, 3]), short_run("frame", [4, 3, 2.5, 2.5])
    for run, seen in ((baseline, other), (other, baseline)):
        rows = [row for row in run.rows if row["split"] == "train" or row["epoch"] == 1]
        busy = Run(run.path, {**run.config, "epochs": 3}, rows)
        figures = verdict([busy, seen]).comparisons[0].figures
        assert figures["best_training"].baseline == pytest.approx([math.exp(4.5)])
        assert figures["best_training"].other == pytest.approx([math.exp(3.5)])
        assert figures["final_validation"].baseline == pytest.approx([math.exp(4.5)])
        assert figures["final_validation"].other == pytest.approx([math.exp(3.5)])


def test_finished_seeds_alone_are_averaged() -> None:
    runs = [short_run(norm, [5, 4, 3, 3], seed) for seed in (1, 2) for norm in ("none", "frame")]
    late = [short_run(norm, [9, 9], 3) for norm in ("none", "frame")]
    for run in late:
        run.config["epochs"] = 2
    text = said(*runs, *late)
    assert text.startswith("2 paired seeds.")
    assert "33.1 ± 0.0" in text
    assert "1 more seed had not finished." in text
    rows = paper_table(Group("mine", "", [*runs, *late])).rows
    assert rows[0][1:] == ["all 2 (2 of 3 seeds)", "20.1 ± 0.0", "33.1 ± 0.0"]


def test_the_training_loss_of_a_network_that_looks_ahead_is_no_measure() -> None:
    """In training it sees what it predicts: compared is validation, and nothing shows its train."""
    baseline = short_run("none", [5, 4, 3, 3], text=WORDS)
    ahead = short_run("sequence", [1, 3.5, 1, 2.9], text=WORDS)
    sentence = said(baseline, ahead)
    assert "best validation loss of 3.500 nats" in sentence
    assert "needed as many updates" in sentence  # at the same validation, not in training
    assert "Its training loss is not compared" in sentence
    assert "overfits" not in sentence
    assert gap(ahead) == []
    table = paper_table(Group("mine", "", [baseline, ahead]))
    assert [row[2] for row in table.rows] == ["20.1", "–"]
    assert "has no train figure" in table.note
    labels = [line.get_label() for line in figure([baseline, ahead]).axes[0].lines]
    assert labels == ["baseline, train", "baseline, valid", "sequence, valid"]
    # In speech nothing is given away: both directions are there anyway.
    baseline = short_run("none", [5, 4, 3, 3], recipe="wsj")
    ahead = short_run("sequence", [1, 3.5, 1, 2.9], recipe="wsj")
    sentence = said(baseline, ahead)
    assert "best training loss of 3.000 nats" in sentence
    assert "overfits more" in sentence


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ((0.5, 0.25), "It overfits more:"),
        ((0.25, 0.5), "It overfits less:"),
        ((-0.25, -0.5), "Neither overfits:"),
        ((-0.5, -0.25), "Neither overfits:"),
        ((0.25, -0.25), "It overfits, the baseline does not:"),
        ((-0.25, 0.25), "The baseline overfits, it does not:"),
        ((0.25, 0.25), "No difference in overfitting seen:"),
    ],
)
def test_overfitting_in_words_that_fit_the_sign(gaps: tuple[float, float], words: str) -> None:
    runs = []
    for norm, apart in zip(("frame", "none"), gaps, strict=True):
        run = short_run(norm, [3.0, 3.0])
        for row in run.rows:
            row["loss"] += apart - 0.5 if row["split"] == "valid" else 0
        runs.append(run)
    text = said(*runs)
    assert words in text
    side = "above" if gaps[0] > 0 else "below"
    assert f"its loss on validation was {abs(gaps[0]):.2f} nats {side} its training loss" in text


def test_seconds_only_where_runs_are_long_and_made_alike() -> None:
    def timed(seconds: float, *places: dict[str, str]) -> str:
        runs = [short_run(norm, [5, 4, 3, 3]) for norm in ("none", "frame")]
        runs = [
            Run(run.path, run.config, run.rows, [place])
            for run, place in zip(runs, places or ({}, {}), strict=True)
        ]
        for run in runs:
            for row in run.rows:
                row["seconds"] = row["updates"] / run.updates * seconds
        return said(*runs)

    assert "It took as much time: 40 instead of 40 seconds, which also depend on" in timed(40)
    assert "Seconds are not compared: the runs are too short to be timed." in timed(1)
    elsewhere = timed(4000, {"cpu": "one"}, {"cpu": "other"})
    assert "Seconds are not compared: the runs were made in different surroundings." in elsewhere
    assert "instead of 4" not in elsewhere


def test_updates_of_different_sizes_are_not_compared() -> None:
    """Tuned apart, with twice the batch: as many tokens in half the updates are no saving."""
    base = short_run("none", [5, 4, 3, 3], train={"batch": 8})
    big = short_run("frame", [5, 4, 3, 3], train={"batch": 16})
    for row in big.rows:
        row["updates"] //= 2
        row["updates"] += row["updates"] % 2
        row["seconds"] = row["updates"] * 10
    (found,) = verdict([base, big]).comparisons
    assert "updates_to_target" not in found.figures
    assert "best_validation" in found.figures
    text = said(base, big)
    assert "updates of the frame-wise normalised network" in text
    assert "and of the baseline are not compared: they are of different sizes. Seconds" in text


def test_a_target_on_validation() -> None:
    runs = []
    for seed in (1, 2, 3):
        runs.append(short_run("none", [5, 4, 3, 2, 2, 1 + seed / 100], seed))
        runs.append(short_run("frame", [5, 3, 2, 1.5, 1, 1], seed))
    text = said(*runs, target=12.2)  # e^2.5: the baseline's second validation, at update 20
    assert "To reach a perplexity of 12.2 on validation" not in text.split("To reach")[0]
    assert "as many updates (in every seed): 20 instead of 20." in text
    text = said(*runs, target=33.2)  # e^3.5 at update 10, e^2.5 at 20
    # The other was there when first looked at: how much sooner is not known.
    assert "o reach a perplexity of 33.2 on validation" in text
    # log ½ ± 4.303 · √(½² + 1²) / √12 / √3
    assert (
        "needed at least 50% fewer updates (95% t interval 78% fewer to 11% more, fewer in" in text
    )
    text = said(*runs, target=4.55)  # e^1.5 and more
    assert (
        "A perplexity of 4.55 on validation was reached by 3 of 3 runs of the frame-wise normalised"
        " network and by 1 of 3 of the baseline." in text
    )
    rows = target_table(Group("mine", "", runs), 4.55).rows
    first = ["baseline", "1 of 3", "30 at the earliest", "–"]
    assert rows == [first, ["frame", "3 of 3", "30 (23 to 37)", "–"]]


def test_with_the_mini_batchs_own_statistics() -> None:
    runs = [short_run(n, [5, 4, 3, 3], s, text=WORDS) for s in (1, 2) for n in ("none", "frame")]
    for run in runs:
        for row in run.rows:
            if row.get("statistics") == "batch":
                row["loss"] += 0.1
    found = verdict(runs)
    assert (
        "own statistics, as the authors' code had them, its best perplexity was worse: 36.6 ±"
        in (found.sentence)
    )
    batch = found.comparisons[0].figures["best_with_batch_statistics"]
    assert batch.differences == pytest.approx((3.48, 3.48), abs=0.01)


def test_under_every_kind_of_statistics() -> None:
    """Running statistics decide, with a regulariser or without; the others have their figures."""
    for dropout in (0.0, 0.3):
        settings = {"text": WORDS, "model": {"dropout": dropout}}
        runs = [short_run(norm, [5, 4, 3, 3], **settings) for norm in ("none", "frame", "layer")]
        runs[2].rows[:] = [r for r in runs[2].rows if r.get("statistics", "running") == "running"]
        for row in runs[1].rows:
            if row.get("statistics") == "recalibrated":
                row["loss"] += 0.2
        frame, layer = (comparison.figures for comparison in verdict(runs).comparisons)
        assert frame["best_validation"].differences == (0.0,)
        shifted = frame["best_with_recalibrated_statistics"].differences
        assert shifted == pytest.approx((math.exp(3.7) - math.exp(3.5),))
        assert "best_with_running_statistics" not in frame
        assert not any("statistics" in name for name in layer)


def test_what_was_not_validated_with_its_own_statistics() -> None:
    """Rows of the other kind are all there is."""
    run = short_run("frame", [5, 4, 3, 3])
    only = [row for row in run.rows if row.get("statistics") != "running"]
    assert (run.serving, replace(run, rows=only).serving) == ("running", "recalibrated")


def test_the_same_in_html_in_markdown_and_as_data(tmp_path: Path) -> None:
    for norm in ("none", "frame"):
        for seed in (1, 2, 3):
            make_run(tmp_path, "ptb-small", norm, seed)
    found = normrnn.report.verdict(list(tmp_path.iterdir()), target=60)
    assert isinstance(found, normrnn.report.Verdict)
    shown = markdown(find([tmp_path]), target=60)
    assert found.sentence in shown
    html = page(find([tmp_path]), target=60)
    for table in (differences_table(found.comparisons[0]), target_table(_group(tmp_path), 60)):
        assert table.markdown() in shown
        for row in table.rows:
            for cell in row:
                assert cell in html
    assert "lower in 3 of 3 seeds" in shown


def _group(path: Path) -> Group:
    (group,) = groups([one.run for one in find([path]) if one.run])
    return group


def _experiment(draw: random.Random, seeds: int, difference: float) -> list[Run]:
    """Runs whose validation differs by this much in the mean; noise common to a seed, and own."""
    runs = []
    for seed in range(seeds):
        common = draw.gauss(0, 0.05)
        for norm, loss in (("none", 4.0), ("frame", 4.0 + difference)):
            held_out = loss + common + draw.gauss(0, 0.02)
            row = {"updates": 10, "epoch": 1, "count": 10, "seconds": 1.0}
            rows = [{**row, "split": "train", "loss": 3.0}]
            rows.append({**row, "split": "valid", "statistics": "running", "loss": held_out})
            config = {"norm": norm, "seed": seed, "epochs": 1, "text": {"level": "char"}}
            runs.append(Run(Path(norm), config, rows))
    return runs


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, pytest.param(5, marks=SLOW), pytest.param(10, marks=SLOW)])
def test_intervals_cover_the_truth_and_nothing_is_seen_where_nothing_is(seeds: int) -> None:
    """2,000 experiments with a known difference, 2,000 with none, through the whole verdict."""
    draw, covered, better = random.Random(seeds), 0, 0
    for _ in range(2000):
        (found,) = verdict(_experiment(draw, seeds, -0.03)).comparisons
        low, high = found.figures["best_validation"].interval or (0, 0)
        covered += low <= -0.03 <= high
        (found,) = verdict(_experiment(draw, seeds, 0.0)).comparisons
        better += found.figures["best_validation"].answer == "better"
    assert 0.93 <= covered / 2000 <= 0.97
    assert better / 2000 <= 0.03


def test_finished_runs_of_different_lengths_are_compared_up_to_the_shorter() -> None:
    """A longer run would be better, or worse, for being longer."""
    short, long = short_run("none", [5, 4, 3.5, 3]), short_run("frame", [5, 4.5, 4, 3.5, 2, 1])
    text = said(short, long)
    assert "was 54.6 against the baseline's 33.1" in text  # e^4 and e^3.5
    assert "of different lengths: compared are the updates that both have." in text
    assert "different lengths" not in said(short, short_run("frame", [5, 4, 3, 2]))


def test_one_seed_that_is_further_than_the_others_is_one_seed() -> None:
    """Seed 1 has not trained for an epoch yet, seed 2 has."""
    runs = []
    for seed, many in ((1, 1), (2, 4)):
        for norm, losses in (("none", [5, 4, 3.5, 3]), ("frame", [4, 3, 2.5, 2])):
            whole = short_run(norm, losses, seed)
            settings = {**whole.config, "epochs": 9}
            runs.append(replace(whole, config=settings, rows=whole.rows[: 2 * many - 1]))
    found = verdict(runs)
    updates = found.to_dict()["comparisons"][0]["figures"]["updates_to_target"]
    assert updates["seeds"] == [2]
    assert found.sentence.startswith("One seed, which says nothing in general.")
    assert "1 more seed got less far: not compared." in found.sentence


@pytest.mark.parametrize(("fer", "told"), [(0.25, "higher"), (0.0, "the same")])
def test_perfection_is_compared(fer: float, told: str) -> None:
    """No share of nothing."""
    runs = [short_run(norm, [5, 4, 3, 3]) for norm in ("none", "frame")]
    for run, errors in zip(runs, (0.0, fer), strict=True):
        for row in run.rows:
            row["fer"] = errors
    assert f"rate was {fer:.3f} against the baseline's 0.000 ({told})." in said(*runs)


def test_no_interval_goes_beyond_nothing() -> None:
    found = Difference((1, 2), (100.0, 100.0), (10.0, 200.0), relative=True)
    assert found.interval is not None
    assert -1 <= found.interval[0] < -0.99
    assert found.answer == "no difference seen"


def test_shares_are_averaged_as_ratios() -> None:
    """Twice as many and half as many are no difference, and what is said is the ratio of the means
    beside it: the mean of these shares would be 25 % more."""
    found = Difference((1, 2), (100.0, 100.0), (200.0, 50.0), relative=True)
    assert found.mean == pytest.approx(0)
    assert found.seeds_needed is None or found.seeds_needed > 1000
    runs = []
    for seed, (a, b) in enumerate(((8, 20), (60, 38), (72, 60)), 1):
        for norm, when in (("none", a), ("frame", b)):
            losses = [5.0] * 2 * when + [1.0] * 2 * (80 - when)
            runs.append(short_run(norm, losses, seed, text=WORDS))
    text = said(*runs, target=50)
    ratio = (21 / 9 * 39 / 61 * 61 / 73) ** (1 / 3)  # validated one epoch later
    assert f"needed {ratio - 1:.0%} more updates" in text
    shown = re.search(r"seeds\): ([\d,]+) instead of ([\d,]+)\.", text)
    assert shown is not None
    other, baseline = (float(n.replace(",", "")) for n in shown.groups())
    assert other / baseline == pytest.approx(ratio, rel=0.01)


def test_runs_that_diverged_are_counted() -> None:
    pairs = [short_run(norm, [5, 4, 3, 3], seed) for seed in (1, 2) for norm in ("none", "frame")]
    pairs[-1] = replace(pairs[-1], rows=pairs[-1].rows[:1], diverged="the loss is nan at update 6")
    text = said(*pairs)
    assert "1 of 2 runs of the frame-wise normalised network diverged" in text
    assert "One seed" in text
    assert pairs[-1].progress == "diverged after 5 updates"
    broken = replace(pairs[1], rows=pairs[1].rows[:4], diverged="the loss is nan at update 11")
    text = said(pairs[0], replace(broken, config={**broken.config, "epochs": 2}))
    assert "have finished: compared are the updates that both have." in text
    assert "can still change" not in text
