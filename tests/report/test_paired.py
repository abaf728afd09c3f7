"""Student's t against printed tables, and paired differences with known answers."""

import math

import pytest

from normrnn.report.paired import MOST_SEEDS, Difference, mean_interval, t_central, t_quantile

# Fisher and Yates, table III: two-sided 5 %, one-sided 20 % and two-sided 1 %.
TABLE = {
    1: (12.706, 1.376, 63.657),
    2: (4.303, 1.061, 9.925),
    3: (3.182, 0.978, 5.841),
    4: (2.776, 0.941, 4.604),
    5: (2.571, 0.920, 4.032),
    9: (2.262, 0.883, 3.250),
    10: (2.228, 0.879, 3.169),
    30: (2.042, 0.854, 2.750),
    120: (1.980, 0.845, 2.617),
}


@pytest.mark.parametrize("degrees", TABLE)
def test_quantiles_are_those_of_printed_tables(degrees: int) -> None:
    found = [t_quantile(p, degrees) for p in (0.975, 0.8, 0.995)]
    assert [round(t, 3) for t in found] == list(TABLE[degrees])
    for p, t in zip((0.975, 0.8, 0.995), found, strict=True):
        assert t_central(t, degrees) == pytest.approx(2 * p - 1, abs=1e-12)


def test_what_is_no_quantile() -> None:
    assert t_quantile(0.5, 3) == pytest.approx(0, abs=1e-12)
    assert t_quantile(0.975, 10**5) == pytest.approx(1.959964, abs=1e-4)
    for probability, degrees in ((0.4, 3), (1.0, 3), (0.9, 0)):
        with pytest.raises(ValueError, match="no quantile"):
            t_quantile(probability, degrees)


def test_a_difference_worked_by_hand() -> None:
    found = Difference((1, 2, 3), (10.0, 11.0, 12.0), (9.0, 9.0, 9.0))
    assert found.differences == (-1.0, -2.0, -3.0)
    assert found.mean == -2
    half = 4.302653 / math.sqrt(3)  # standard deviation 1
    assert found.interval == pytest.approx((-2 - half, -2 + half), abs=1e-5)
    assert found.answer == "no difference seen"  # -4.48 to +0.48
    assert found.agreeing == 3
    assert found.probability_of_improvement == 1
    # (t(0.975, n−1) + t(0.8, n−1)) / √n ≤ 2: 2.66 at 3, 2.08 at 4... 3.182 + 0.978 = 4.16 / 2.
    assert found.seeds_needed == 5
    assert found.to_dict()["interval"] == list(found.interval or ())


def test_ties_count_half_and_only_the_seeds_of_the_means_sign_agree() -> None:
    found = Difference((1, 2), (2.0, 2.0), (2.0, 1.0))
    assert found.probability_of_improvement == 0.75
    assert found.agreeing == 1
    same = Difference((1, 2), (2.0, 3.0), (2.0, 3.0))
    assert (same.answer, same.agreeing, same.seeds_needed) == ("no difference seen", 2, None)


def test_shares_of_the_baselines() -> None:
    found = Difference((1, 2), (100, 200), (50, 100), relative=True)
    assert found.differences == (-0.5, -0.5)
    assert found.answer == "better"
    assert found.seeds_needed == 2


def test_one_seed_has_no_interval() -> None:
    found = Difference((1,), (2.0,), (1.0,))
    assert (found.interval, found.answer, found.seeds_needed) == (None, "one seed", None)
    assert mean_interval([1.0]) is None


def test_more_seeds_than_anybody_runs() -> None:
    found = Difference((1, 2, 3), (0.0, 0.0, 0.0), (1.0, -1.0, 0.001))
    assert found.seeds_needed == MOST_SEEDS + 1
