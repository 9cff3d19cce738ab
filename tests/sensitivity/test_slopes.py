from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from sensitivity.query import slopes
from sensitivity.query.slopes import theil_sen
from tests.benchmarks.intervals import ar1

# Few numbers, so that there are ties, and NaN.
SERIES = st.integers(4, 14).flatmap(
    lambda periods: arrays.arrays(float, (periods,), elements=st.sampled_from([*range(-3, 4), 0.5, 0.25, np.nan]))
)


@settings(deadline=None)
@given(SERIES, st.integers(0, 9), st.sampled_from([0.5, 0.8, 0.95]))
def test_slopes_and_ends_are_scipys(values, seed, level):
    positions = np.cumsum(np.random.default_rng(seed).integers(1, 5, len(values))).astype(float)
    there = np.isfinite(values)
    found = theil_sen(values, positions, level, serial=False)
    assert found.periods == there.sum()
    if there.sum() < 4:
        return assert_nothing_told(found)
    wanted = stats.theilslopes(values[there], positions[there], alpha=level)
    assert found.slope == pytest.approx(wanted.slope)
    if np.isfinite(found.low) and np.isfinite(found.high):  # SciPy takes the outermost slope where none is enough
        assert (found.low, found.high) == pytest.approx((wanted.low_slope, wanted.high_slope))


@settings(deadline=None)
@given(SERIES)
def test_p_values_are_kendalls_but_for_continuity(values):
    there = np.isfinite(values)
    found = theil_sen(values, np.arange(len(values)), serial=False)
    if there.sum() < 4:
        return assert_nothing_told(found)
    if len(set(values[there])) == 1:
        return assert_constant(found)
    order, kept = np.arange(there.sum()), values[there]
    score = abs(np.triu(np.sign(kept - kept[:, None])).sum())
    far = stats.norm.isf(stats.kendalltau(order, kept, method="asymptotic").pvalue / 2)
    assert found.p_value == pytest.approx(2 * stats.norm.sf(far * max(score - 1, 0) / max(score, 1)))


def assert_nothing_told(found: slopes.Trend) -> None:
    assert np.isnan([found.slope, found.low, found.high, found.p_value]).all()


def assert_constant(found: slopes.Trend) -> None:
    assert (found.slope, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def noise(dependence: float, series: int, periods: int) -> np.ndarray:
    """`(period, series)`."""
    return ar1(dependence, (series, periods), np.random.default_rng(0)).T


@pytest.mark.parametrize(("dependence", "most"), [(0.0, 0.05), (0.3, 0.09), (0.5, 0.11), (0.7, 0.13)])
@pytest.mark.parametrize("periods", [20, 60])
def test_noise_rarely_has_a_trend(dependence, most, periods):
    """Of 1000 series, a share of 5 % is known to 1.4 points (two standard errors)."""
    values = noise(dependence, 1000, periods)
    found = theil_sen(values, np.arange(periods))
    share, plain = (
        np.mean(each.p_value < 0.05) for each in (found, theil_sen(values, np.arange(periods), serial=False))
    )
    assert 0.01 < share < most + 0.014
    assert np.mean((found.low > 0) | (found.high < 0)) == pytest.approx(share, abs=0.01)
    assert share < 0.6 * plain or dependence < 0.5


@pytest.mark.parametrize("dependence", [0.0, 0.5])
def test_seasons_that_resemble_each_other_make_no_trend(dependence):
    months = np.arange(12 * 15)
    values = noise(dependence, 500, len(months)) + 5 * np.sin(2 * np.pi * months / 12)[:, None]
    found = theil_sen(values, months / 12, seasons=months % 12)
    assert 0.02 < np.mean(found.p_value < 0.05) < 0.09


def test_a_trend_is_found_with_outliers_and_gaps():
    years, random = np.arange(1980, 2020), np.random.default_rng(0)
    values = 0.3 * years[:, None, None] + random.standard_normal((40, 2, 3))
    values[::7] += 100
    values[::5, 1] = np.nan
    found = theil_sen(values, years)
    assert found.slope.shape == (2, 3)
    np.testing.assert_allclose(found.slope, 0.3, atol=0.06)
    assert np.all((found.low < found.slope) & (found.slope < found.high) & (found.p_value < 1e-4))
    np.testing.assert_array_equal(found.periods, [[40] * 3, [32] * 3])


def test_slopes_are_taken_within_seasons():
    """Two seasons, of which one is measured in later years: between seasons there would be a steep slope."""
    values = np.array([0.0, np.nan, 1, np.nan, 2, 50, 3, 51, np.nan, 52, np.nan, 53])
    found = theil_sen(values, np.repeat(np.arange(6), 2), level=0.5, seasons=np.tile([3, 9], 6))
    assert (found.slope, found.low, found.high) == (1, 1, 1)
    assert found.p_value < 0.05
    assert theil_sen(values, np.arange(12)).slope > 2


def test_of_one_season_the_variance_is_kendalls():
    values = noise(0.3, 20, 30).round(1)
    alone = theil_sen(values, np.arange(30), seasons=np.zeros(30, int))
    plain = theil_sen(values, np.arange(30), serial=False)
    for field in fields(alone):
        np.testing.assert_array_equal(getattr(alone, field.name), getattr(plain, field.name))


def test_between_seasons_covariances_are_those_of_hirsch_and_slack():
    values = noise(0.5, 1, 24)[:, 0].round(1)
    values[[3, 10, 11]] = np.nan
    table = values.reshape(8, 3)
    signs = np.nan_to_num(np.sign(table[None] - table[:, None]))
    ranks = (np.isfinite(table).sum(axis=0) + 1 + signs.sum(axis=0)) / 2
    counts = np.isfinite(table).sum(axis=0)
    both = np.triu(np.moveaxis(signs, -1, 0))
    wanted = sum(
        ((both[g] * both[h]).sum() + 4 * (ranks[:, g] * ranks[:, h]).sum() - 8 * (counts[g] + 1) * (counts[h] + 1)) / 3
        for g in range(3)
        for h in range(3)
    )
    earlier, later = np.triu_indices(8, 1)
    pairs = np.nan_to_num(np.sign(table[later] - table[earlier])).sum(axis=1)[:, None]
    assert slopes._variance(pairs, table[..., None]) == pytest.approx(wanted)


def test_three_periods_are_too_few_and_so_are_seasons_seen_once():
    assert_nothing_told(theil_sen(np.array([1.0, 2, 3, np.nan]), np.arange(4)))
    assert_nothing_told(theil_sen(np.arange(6.0), np.arange(6), seasons=np.arange(6)))
    for periods in range(3):
        assert np.isnan(theil_sen(np.ones((periods, 2)), np.arange(periods)).slope).all()
    assert theil_sen(np.ones((9, 0, 2)), np.arange(9)).slope.shape == (0, 2)


def test_four_periods_have_a_slope_but_no_ends():
    found = theil_sen(np.array([1.0, 2, 3, 5]), np.arange(4))
    assert found.slope == pytest.approx((1 + 4 / 3) / 2)
    assert np.isnan([found.low, found.high]).all()
    assert 0.05 < found.p_value < 1


def test_a_constant_has_no_trend():
    assert_constant(theil_sen(np.full(20, 1 / 3), np.arange(20)))


def test_blocks_of_cells_change_nothing(monkeypatch):
    values = noise(0.5, 7, 25).round(1)
    values[4, 2] = np.nan
    whole = theil_sen(values, np.arange(25))
    monkeypatch.setattr(slopes, "BLOCK_SLOPES", 700)
    parts = theil_sen(values, np.arange(25))
    for field in fields(whole):
        np.testing.assert_array_equal(getattr(whole, field.name), getattr(parts, field.name))


def test_serial_correlation_with_gaps_is_corrected_for():
    values = noise(0.5, 1000, 60)
    values[np.random.default_rng(1).random(values.shape) < 0.3] = np.nan
    found, plain = (np.mean(theil_sen(values, np.arange(60), serial=serial).p_value < 0.05) for serial in (True, False))
    assert found < 0.12 < plain
