"""What a verdict does not claim: of runs that diverged, of times that were rounded, of what is not
known or not comparable."""

import io
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from normrnn.errors import UsageError
from normrnn.report.groups import groups
from normrnn.report.paired import Difference
from normrnn.report.tables import differences_table, target_table
from normrnn.report.verdict import verdict
from tests.report.made_runs import make_run, said, short_run


def test_nothing_is_better_for_the_seeds_that_did_not_diverge() -> None:
    """Two of five trained, and look better: the three that diverged are lost, not left out."""
    runs = []
    for seed in range(1, 6):
        runs.append(short_run("none", [5, 4, 3, 3 + seed / 100], seed))
        good = short_run("frame", [4, 3, 2, 2 + seed / 100], seed)
        lost = replace(good, rows=good.rows[:1], diverged="the loss is nan at update 6")
        runs.append(good if seed < 3 else lost)
    found = verdict(runs)
    (comparison,) = found.comparisons
    best = comparison.figures["best_validation"]
    assert (best.seeds, best.compared, best.agreeing) == ((1, 2), 5, 2)
    assert best.answer == "some diverged"
    assert best.probability_of_improvement == pytest.approx(2 / 5)
    assert found.to_dict()["comparisons"][0]["diverged"] == {"baseline": 0, "other": 3}
    text = found.sentence
    assert text.startswith(
        "2 paired seeds. 3 of 5 runs of the frame-wise normalised network diverged, no finite loss"
        " any more; what follows is of the seeds that trained to their end."
    )
    assert "lower in 2 of 5 seeds, probability of improvement 0.40" in text
    for words in ("better", "had not finished"):
        assert words not in text
    assert "some diverged" in {row[-2] for row in differences_table(comparison).rows}
    # The other way round: a baseline that diverged makes nothing worse.
    turned = [replace(r, config={**r.config, "norm": OTHER[r.norm]}) for r in runs]
    (comparison,) = verdict(turned).comparisons
    best = comparison.figures["best_validation"]
    assert (best.answer, best.agreeing) == ("some diverged", 2)
    assert best.probability_of_improvement == pytest.approx(3 / 5)


OTHER = {"none": "frame", "frame": "none"}


def test_an_arm_that_diverged_in_every_seed_is_not_better() -> None:
    runs = []
    for seed in (1, 2, 3):
        runs.append(short_run("none", [5, 4, 4, 4, 3 + seed / 100, 3], seed))
        good = short_run("frame", [4, 3, 2, 2], seed, epochs=3)
        runs.append(replace(good, diverged="the loss is nan at update 25"))
    text = said(*runs)
    assert "3 of 3 runs of the frame-wise normalised network diverged" in text
    assert "what follows is of what came before that" in text
    assert "better" not in text


def test_a_saving_in_most_seeds_is_told() -> None:
    """One of four did not reach the target: no mean, and no "no saving"."""
    runs = [short_run("none", [5, 4, 3, 3], seed) for seed in range(1, 5)]
    runs += [short_run("frame", [4, 3, 2, 2], seed) for seed in range(1, 4)]
    runs.append(short_run("frame", [6, 6, 6, 6], 4))
    text = said(*runs)
    assert "reached the baseline's best training loss of 3.000 nats in 3 of 4 seeds, with" in text
    assert "fewer updates in 3: no mean of them" in text
    assert "No saving" not in text


def test_a_target_met_when_first_looked_at() -> None:
    """After the first epoch, by both: no saving can be seen, which is not the same as none."""
    both = [short_run("none", [5, 4]), short_run("frame", [4, 2])]
    (found,) = verdict(both).comparisons
    assert found.target.too_early
    assert "updates_to_target" not in found.figures
    text = said(*both)
    assert "no saving can be seen: the baseline and the frame-wise normalised network" in text
    assert "after 10 updates" in text
    quick = short_run("frame", [4, 2, 2, 2])
    text = said(short_run("none", [5, 4, 4, 3]), quick)
    assert "needed at least 50% fewer updates: 10 instead of 20." in text


def test_rounded_times_are_not_certain() -> None:
    """Targets reached at a second or third look, alike in both arms: Student's t over whole looks
    alone would answer in one of eight of such pairs of seeds."""
    seeds = (1, 2)
    same = Difference(seeds, (30.0, 30.0), (20.0, 20.0), True)
    assert same.answer == "better"
    assert replace(same, resolution=1 / 3).answer == "no difference seen"
    draw, wrong = random.Random(1), 0
    for _ in range(2000):
        times = [tuple(draw.choice((20.0, 30.0)) for _ in range(5)) for _ in range(2)]
        found = Difference(tuple(range(5)), times[0], times[1], True, resolution=0.4)
        wrong += found.answer != "no difference seen"
    assert wrong <= 0.05 * 2000


def test_seconds_of_another_device_are_not_compared() -> None:
    place = [{"cpu": "one"}]
    runs = [
        replace(short_run(norm, losses, device=device), environments=place)
        for norm, device, losses in (("none", "cpu", LONG[0]), ("frame", "cuda", LONG[1]))
    ]
    assert "Seconds are not compared: the runs were made in different surroundings." in said(*runs)
    runs[1] = replace(runs[1], config=runs[1].config | {"device": "cpu"})
    assert "% less time: " in said(*runs)
    runs = [replace(run, environments=[]) for run in runs]
    assert "Seconds are not compared: where the runs ran is not recorded." in said(*runs)


LONG = ([5.0] * 7 + [4.0] * 7 + [3.0], [5.0] * 7 + [4.0] * 3 + [2.9] * 5)


@pytest.mark.parametrize("setting", [{"max_vocab": 1000}, {"level": "char"}])
def test_runs_of_another_measure_are_not_compared(setting: dict[str, object]) -> None:
    """Without a baseline of its own a network stands beside others, but not beside other words."""
    base = short_run("none", [5, 4, 3, 3], text={"level": "word", "max_vocab": 10000})
    other = short_run("frame", [4, 3, 2, 2], text={"level": "word", "max_vocab": 10000} | setting)
    assert verdict([base, other]).comparisons == []


def test_which_baseline_is_said() -> None:
    runs = [short_run("none", [5, 4, 3, x], optimizer={"lr": x}) for x in (1.0, 2.0)]
    runs.append(short_run("frame", [5, 4, 3, 2], optimizer={"lr": 4.0}))
    first, second = verdict(runs).sentences
    assert first.startswith("Against the baseline (optimizer.lr 1.0):")
    assert second.startswith("Against the baseline (optimizer.lr 2.0):")


def test_gaps_that_are_alike_are_no_difference() -> None:
    """To the last bits, in every seed: nobody overfits more."""
    runs = []
    for seed in (1, 2, 3):
        runs.append(short_run("none", [5, 4, 3, 3], seed))
        other = short_run("layer", [5, 4, 3, 3], seed)
        for row in other.rows:
            row["loss"] += 1e-15 * seed if row["split"] == "valid" else 0
        runs.append(other)
    assert "No difference in overfitting seen" in said(*runs)


def test_arms_that_are_alike_are_the_same() -> None:
    runs = [short_run(n, [5, 4, 3, 3], s) for s in (1, 2, 3) for n in ("none", "frame")]
    assert "the same in 3 of 3 seeds, probability of improvement 0.50" in said(*runs)


def test_a_lead_that_comes_back_was_not_lost() -> None:
    base = short_run("none", [5, 4, 3, 3, 2, 2, 1, 1])
    back = short_run("frame", [5, 3, 2.9, 3.1, 1.9, 1.9, 0.95, 1.04])
    assert "was the lower one until" not in said(base, back)


def test_runs_without_a_partner_are_counted() -> None:
    runs = [short_run("none", [5, 4, 3, 3], seed) for seed in range(1, 6)]
    runs += [short_run("frame", [4, 3, 2, 2], seed) for seed in range(4, 8)]
    assert "5 runs have no partner of the same seed, and are not compared." in said(*runs)


def test_seeds_that_got_differently_far_are_not_averaged() -> None:
    """Two of four epochs are no draw from the same as four: left out, and said."""
    runs = [short_run("none", [5, 4, 3, 3, 3, 2.9, 2.8, 2.7 + s / 100], s) for s in (1, 2)]
    runs += [short_run("frame", [5, 3, 2, 2, 2, 1.9, 1.8, 1.7], s) for s in (1, 2)]
    runs += [short_run("none", [9, 8], 3), short_run("frame", [1, 1], 3)]
    found = verdict(runs)
    (comparison,) = found.comparisons
    assert (comparison.seeds, comparison.shorter, comparison.left_out) == ([1, 2], 1, 0)
    assert found.sentence.startswith("2 paired seeds. ")
    assert "1 more seed got less far: not compared." in found.sentence
    assert "no partner" not in found.sentence
    # The same of runs that are still going on.
    going = [replace(run, config={**run.config, "epochs": 9}) for run in runs]
    (comparison,) = verdict(going).comparisons
    assert (comparison.seeds, comparison.shorter, comparison.going) == ([1, 2], 1, True)


def test_one_seed_that_was_extended_leaves_the_others_in_the_verdict() -> None:
    """Seed 1 has an epoch more: all are compared after two."""
    runs = []
    for seed, more in ((1, [1, 1]), (2, []), (3, [])):
        runs.append(short_run("none", [5, 4, 3.5, 3 + seed / 100, *more], seed))
        runs.append(short_run("frame", [4, 3, 2.5, 2, *more], seed))
    (comparison,) = verdict(runs).comparisons
    assert (comparison.seeds, comparison.shorter, comparison.cut) == ([1, 2, 3], 0, True)
    best = comparison.figures["best_validation"]
    assert best.other == pytest.approx([math.exp(2.5)] * 3)


def test_a_run_that_diverged_without_a_partner_counts() -> None:
    """Seeds 3 and 4 diverged, and there is no baseline of them."""
    runs = [short_run("none", [5, 4, 3, 3 + s / 100], s) for s in (1, 2)]
    runs += [short_run("frame", [4, 3, 2, 2 + s / 50], s) for s in (1, 2, 3, 4)]
    runs[4:] = [replace(run, rows=run.rows[:1], diverged="nan") for run in runs[4:]]
    found = verdict(runs)
    assert "2 of 4 runs of the frame-wise normalised network diverged" in found.sentence
    assert {figure.answer for figure in found.comparisons[0].figures.values()} == {"some diverged"}
    for words in ("better", "overfits"):
        assert words not in found.sentence
    assert "When both were last validated, its loss on validation was 0.5" in (found.sentence)


def test_the_gap_of_updates_of_different_sizes() -> None:
    """Twice as many updates an epoch: the last validations of both, not those at one update."""
    small = short_run("none", [5, 4, 3, 3, 2, 2])
    for row in small.rows:
        row["updates"] *= 2
        row["loss"] += 0.3 * (row["epoch"] - 1) * (row["split"] == "valid")
    large = short_run("frame", [5, 4, 3, 3, 2, 2])
    (found,) = verdict([small, large]).comparisons
    assert not found.same_updates
    assert found.figures["gap"].baseline == pytest.approx((1.1,))
    assert found.figures["gap"].other == pytest.approx((0.5,))


def test_updates_of_different_sizes_are_not_fewer() -> None:
    runs = [short_run("none", [5, 4, 3, 3], s) for s in (1, 2)]
    for row in (row for run in runs for row in run.rows):
        row["updates"] *= 2
    runs += [short_run("frame", [4, 3, 2, 2], 1), short_run("frame", [6, 6, 6, 6], 2)]
    text = said(*runs)
    assert "reached the baseline's best training loss of 3.000 nats in 1 of 2 seeds: no" in text
    assert "fewer updates" not in text
    assert "same number of updates" not in text


def test_both_there_at_once_is_no_at_least() -> None:
    """In seed 2 the baseline may have been the first; in seed 1 the other was 10 updates sooner."""
    runs = [short_run("none", [5, 4, 4, 3], 1), short_run("frame", [4, 2, 2, 2], 1)]
    runs += [short_run("none", [2, 2, 3, 3], 2), short_run("frame", [2, 2, 2, 2], 2)]
    (found,) = verdict(runs).comparisons
    assert found.target.at_once == ((False, True), (True, True))
    assert not found.figures["updates_to_target"].at_least


def test_times_to_a_target_are_as_exact_as_the_looks() -> None:
    """All at the second look, ten updates after the first: ± 4.303 · 10/√12/√3, not ± 0."""
    runs = [short_run(norm, [5, 4, 3, 3], s) for s in (1, 2, 3) for norm in ("none", "frame")]
    (group,) = groups(runs)
    rows = target_table(group, 40.0).rows
    assert [row[2] for row in rows] == ["20 (13 to 27)"] * 2
    rows = target_table(group, 100.0).rows
    assert [row[2] for row in rows] == ["10 or fewer (3 to 17)"] * 2


def test_no_saving_so_far_is_said_of_what_goes_on_alone() -> None:
    base = short_run("none", [5, 4, 3, 3])
    other = short_run("frame", [6, 6, 6, 6], epochs=4)
    assert "No saving so far: " in said(base, other)
    assert "No saving: " in said(base, replace(other, diverged="nan"))


def test_gaps_that_hardly_differ_in_every_seed() -> None:
    """Certain and too small to speak of: the table does not call it larger."""
    runs = [short_run(norm, [5, 4, 3, 3], s) for s in (1, 2, 3) for norm in ("none", "frame")]
    for run in runs[1::2]:
        for row in run.rows:
            row["loss"] += (0.01 + run.seed / 1e4) * (row["split"] == "valid")
    (found,) = verdict(runs).comparisons
    assert found.figures["gap"].answer == "worse"
    (row,) = (row for row in differences_table(found).rows if row[0].startswith("gap"))
    assert row[-2] == "hardly any"
    assert "No difference in overfitting seen" in said(*runs)


def test_what_a_verdict_takes(tmp_path: Path) -> None:
    make_run(tmp_path, norm="none")
    make_run(tmp_path, norm="frame")
    several = list(tmp_path.iterdir())
    assert verdict(tmp_path.iterdir()).sentence == verdict(several).sentence
    assert verdict(set(several)).comparisons[0].seeds == [1]
    for target in (float("nan"), -3.0, 0.0):
        with pytest.raises(UsageError, match="a target is a number above 0"):
            verdict(several, target=target)


def test_numbers_stay_whole_in_a_narrow_terminal() -> None:
    runs = [short_run(n, [5, 4, 3, 3], s) for s in (1, 2, 3) for n in ("none", "frame")]
    for row in (row for run in runs for row in run.rows):
        row["updates"] *= 1234
    (found,) = verdict(runs).comparisons
    table = differences_table(found)
    numbers = {word for row in table.rows for cell in row[1:-1] for word in cell.split()} - {"–"}
    heads = {word for head in table.head[1:-1] for word in head.split()} - {"difference"}
    for width in (40, 60, 80, 100, 200):
        console = Console(width=width, file=io.StringIO())
        console.print(table)
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, printed.splitlines())) <= width
        assert numbers | heads <= set(printed.replace(";", " ").split()), width


def test_what_is_left_over_of_a_sweep_comes_last() -> None:
    """Pairs of equal rates first; then the baseline at 0.3 beside the normalised network at 10,
    both by their rates."""
    rates = {"none": (0.3, 1.0, 3.0), "frame": (1.0, 3.0, 10.0)}
    runs = [
        short_run(norm, [5, 4, 3, 3], recipe="ptb-small", optimizer={"lr": rate})
        for norm, some in rates.items()
        for rate in some
    ]
    found = verdict(runs)
    lr = "optimizer.lr"
    both = [[a.runs[0].settings[lr] for a in (c.baseline, c.other)] for c in found.comparisons]
    assert both == [[1.0, 1.0], [3.0, 3.0], [0.3, 10.0]]
    assert found.sentence.index("lr 3.0: ") < found.sentence.index("baseline (optimizer.lr 0.3)")
    assert "network (optimizer.lr 10.0)" in found.sentence


def test_baselines_that_all_diverged_at_once() -> None:
    """Nothing will go on, and the other arm did train."""
    runs = []
    for seed in (1, 2):
        lost = short_run("none", [5, 4, 3, 3], seed)
        runs.append(replace(lost, rows=lost.rows[:1], diverged="the loss is nan at update 6"))
        runs.append(short_run("frame", [5, 4, 3, 3], seed))
    text = said(*runs)
    assert "2 of 2 runs of the baseline diverged" in text
    assert (
        "To the end trained 0 of 2 runs of the baseline and 2 of 2 runs of the frame-wise"
        " normalised network: no seed has an epoch of both, so there is nothing to compare." in text
    )
    assert "yet" not in text


def test_at_least_only_where_no_baseline_was_there_at_once() -> None:
    """In the first seed the baseline may have been there sooner than it was looked at."""
    early, late = [1.0, 1.0, 1.0, 1.0], [5.0, 5.0, 1.0, 1.0]
    pairs = [(early, late), (late, early), (late, early)]
    runs = [
        short_run(norm, losses, seed, text={"level": "word"})
        for seed, pair in enumerate(pairs, 1)
        for norm, losses in zip(("none", "frame"), pair, strict=True)
    ]
    assert "at least" not in said(*runs, target=50)
    assert "at least" in said(*runs[2:], target=50)


def test_seeds_that_go_on_have_not_trained_to_their_end() -> None:
    runs = []
    for seed in (1, 2, 3):
        runs += [short_run(norm, [5, 4, 3, 3], seed, epochs=9) for norm in ("none", "frame")]
    runs[0] = replace(runs[0], rows=runs[0].rows[:1], diverged="the loss is nan at update 6")
    text = said(*runs)
    assert "what follows is of what came before that" in text or "of the other seeds" in text
    assert "trained to their end" not in text


def test_epochs_of_other_lengths_are_other_lengths() -> None:
    """As many epochs, each of half the text: compared is what both have read."""
    base = short_run("none", [5, 4, 3, 2, 2, 1])
    half = short_run("frame", [5, 4, 3, 2, 2, 1])
    half = replace(half, rows=[{**row, "count": 5} for row in half.rows])
    found = verdict([base, half])
    assert found.comparisons[0].cut
    assert "These runs are of different lengths" in found.sentence


def test_an_epoch_of_one_update_has_one_segment() -> None:
    """Two were asked for; where the first epoch had one, so have the others."""
    run = short_run("none", [5, 4, 3, 3, 2, 2], train={"segments": 2})
    assert (run.epochs_done, run.finished) == (3, True)
    cut = replace(run, rows=run.rows[:-1])
    assert (cut.epochs_done, cut.finished) == (2, False)


def test_numbers_that_nobody_measured() -> None:
    """No time at all at the target; losses whose squares overflow."""
    runs = [short_run(n, [5, 4, 3, 3], s) for n in ("none", "frame") for s in (1, 2)]
    timeless = [
        replace(run, rows=[{**row, "seconds": 0.0} for row in run.rows], environments=[{}])
        for run in runs
    ]
    assert "seconds_to_target" not in verdict(timeless).comparisons[0].figures
    huge = [
        replace(run, rows=[{**row, "loss": row["loss"] * 1e200 * run.seed} for row in run.rows])
        for run in runs
    ]
    assert "2 paired seeds" in said(*huge)
