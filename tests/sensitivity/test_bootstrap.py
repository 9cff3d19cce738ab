from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensitivity.query import bootstrap
from sensitivity.query.bootstrap import Resampling, block_length, interval, resampling, spread, weights
from tests.benchmarks.intervals import GROUPS, ar1, coverage, group_coverage


def record(cells: int = 3, leaves: int = 100, dependence: float = 0.6) -> np.ndarray:
    """Leaf means `(leaf, cell)`."""
    return ar1(dependence, (cells, leaves), np.random.default_rng(0)).T


@pytest.mark.parametrize(("dependence", "length"), [(0.0, 200), (0.5, 500), (0.9, 500), (0.7, 2000), (0.9, 20000)])
def test_intervals_hold_the_truth_as_often_as_they_say(dependence, length):
    """Of 400 series, a share of 90 % is known to 3 points (two standard errors)."""
    found = coverage(dependence, length, series=400, resamples=300, seed=1, hears=lambda how: None)
    assert np.all((found >= 0.85) & (found <= 0.95)), found


@pytest.mark.parametrize("group", GROUPS)
def test_intervals_of_groups_hold_the_truth_as_often_as_they_say(group):
    """A group that is a fiftieth of the record, which remembers a hundredth of itself."""
    found = group_coverage(0.99, group, series=300, resamples=300, seed=1)
    assert np.all((found >= 0.85) & (found <= 0.95)), found


def test_sizes_that_depend_on_the_past_make_blocks_long_where_signs_do_not():
    random = np.random.default_rng(0)
    values = (np.exp(2 * ar1(0.95, (1, 500), random)) * random.standard_normal((1, 500))).T
    signs, both = (resampling(kinds, np.ones(500)).block for kinds in ([values], [values, abs(values)]))
    assert both > 2 * signs


@settings(deadline=None)
@given(leaves=st.integers(1, 40), block=st.integers(1, 45), resamples=st.integers(1, 5), seed=st.integers(0, 9))
def test_a_resample_takes_as_many_leaves_as_there_are_in_blocks_that_wrap_around(leaves, block, resamples, seed):
    found = weights(leaves, block, resamples, seed)
    assert found.shape == (resamples, leaves)
    assert found.dtype == np.int32
    assert np.all(found.sum(axis=1) == leaves)
    changes = (found != np.roll(found, 1, axis=1)).sum(axis=1)
    assert np.all(changes <= 2 * -(-leaves // block))  # every block begins once and ends once


def test_every_leaf_is_taken_equally_often_wherever_it_lies():
    found = weights(30, 7, 20_000, 0).mean(axis=0)
    np.testing.assert_allclose(found, 1, atol=0.07)


def test_a_seed_tells_everything():
    first, again, other = (resampling([record()], np.ones(100), 50, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.weights, again.weights)
    assert (first.block, first.inflation) == (again.block, again.inflation) == (other.block, other.inflation)
    assert not np.array_equal(first.weights, other.weights)


@pytest.mark.parametrize("dependence", [-0.5, 0.3, 0.6, 0.8])
def test_block_lengths_follow_the_formula(dependence):
    """An AR(1) of dependence φ wants (6 φ² / (1 − φ²)²)^⅓ n^⅓: G / g(0) is 2 φ / (1 − φ²)."""
    found = np.median(bootstrap._politis_white(record(400, 5000, dependence)))
    assert found == pytest.approx(np.cbrt(6 * dependence**2 / (1 - dependence**2) ** 2 * 5000), rel=0.1)


def test_what_is_lost_at_the_edges_of_blocks_is_made_up_for():
    influence = record(400, 5000, 0.8)
    influence -= influence.mean(axis=0)
    lags = np.arange(1, 10)
    share = (1 + 2 * ((1 - lags / 10) * 0.8**lags).sum()) / 9  # of the variance 9 of the mean, what blocks of 10 see
    assert bootstrap._inflation(influence, 10) == pytest.approx(share**-0.5, rel=0.03)


def test_empty_leaves_count_for_nothing():
    means, counts = record(), np.ones(100)
    counts[[0, *range(40, 60)]] = 0
    found = resampling([np.where(counts[:, None] > 0, means, np.nan)], counts)
    same = resampling([np.where(counts[:, None] > 0, means, 1e9)], np.repeat(counts[:, None], 3, axis=1))
    assert (found.block, found.inflation, found.leaves) == (same.block, same.inflation, 79)


@pytest.mark.parametrize("block", [1, 4, 20, 40])
def test_what_comes_all_along_a_record_is_worth_more_than_what_comes_at_once(block):
    every, one, none = np.full(40, 3), np.eye(40)[7], np.zeros(40)
    assert spread(every, block) == pytest.approx(40)
    assert spread(one, block) == pytest.approx(block)
    assert spread(none, block) == 0
    at_once, along = np.repeat([1, 0], [8, 32]), np.tile([1, 0, 0, 0, 0], 8)
    assert spread(at_once, block) <= spread(along, block) + 1e-9 <= 40 + 2e-9
    if block == 4:
        assert (spread(at_once, block), spread(along, block)) == (pytest.approx(1024 / 108), pytest.approx(32))


def test_constant_cells_say_nothing_of_blocks():
    means, constant = record(), np.full((100, 40), 1 / 3)
    assert block_length(np.hstack([means, constant]), np.ones(100)) == block_length(means, np.ones(100)) > 2
    assert block_length(constant, np.ones(100)) == block_length(constant[:, :0], np.ones(100)) == 1
    assert block_length(np.full((100, 2), np.nan), np.zeros(100)) == 1


def test_a_constant_has_an_interval_of_no_width():
    found = resampling([np.full((50, 1), 2.0)], np.ones(50), 100)
    assert interval(np.array([2.0]), np.full((100, 1), 2.0), found) == (2.0, 2.0)


@pytest.mark.parametrize("leaves", [6, 11, 12, 100])
def test_enough_blocks_remain(leaves):
    trend = np.arange(leaves, dtype=float)[:, None]
    assert resampling([trend], np.ones(leaves)).blocks >= 6


@pytest.mark.parametrize("filled", [0, 1, 2, 3])
def test_few_leaves_tell_no_interval(filled):
    counts = np.r_[np.ones(filled), np.zeros(5 if filled != 1 else 0)]
    means = np.where(counts > 0, np.arange(len(counts), dtype=float), np.nan)[:, None]
    found = resampling([means], counts, 200)
    with np.errstate(invalid="ignore"):
        replicates = found.weights @ np.nan_to_num(means) / (found.weights @ counts)[:, None]
    low, high = interval(np.nanmean(means[:filled], axis=0) if filled else np.array([np.nan]), replicates, found)
    assert np.isnan([low, high]).all()


def normal_replicates(how_many: int = 4000) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(how_many)


def plain(inflation: float = 1.0) -> Resampling:
    return Resampling(np.ones((1, 1), np.int32), 1, 10**9, inflation, 0)


def test_an_interval_is_that_of_percentiles_where_blocks_are_many():
    replicates = normal_replicates()
    ends = interval(np.median(replicates), replicates, plain(), 0.8)
    np.testing.assert_allclose(ends, np.quantile(replicates, [0.1, 0.9]), atol=0.01)
    np.testing.assert_allclose(
        interval(np.median(replicates), replicates, plain(1.5), 0.8), 1.5 * np.array(ends), atol=0.02
    )


def test_bias_is_corrected_against_its_direction():
    replicates = normal_replicates() - 0.3  # resamples fall short of the record: so does the record of the truth
    ends = interval(np.array(0.0), replicates, plain())
    np.testing.assert_allclose(ends, [0.3 - 1.645, 0.3 + 1.645], atol=0.08)


def test_replicates_without_data_are_left_out_unless_they_are_many():
    replicates = np.stack([normal_replicates(1000)] * 3, axis=1)
    replicates[:15, 1], replicates[:25, 2] = np.nan, np.inf
    low, high = interval(np.zeros(3), replicates, plain())
    alone = interval(np.zeros(1), replicates[15:, 1:2], plain())
    assert (low[1], high[1]) == alone
    assert np.isfinite(low).tolist() == np.isfinite(high).tolist() == [True, True, False]
    assert np.isnan(interval(np.array([np.nan, 0, 0]), replicates, plain())[0]).tolist() == [True, False, True]


def test_all_dims_are_kept():
    low, high = interval(np.zeros((2, 3)), np.random.default_rng(0).standard_normal((99, 2, 3)), plain())
    assert low.shape == high.shape == (2, 3)
    assert np.all(low < high)


def test_of_many_cells_some_say_how_long_blocks_are(monkeypatch):
    means = record(50)
    monkeypatch.setattr(bootstrap, "MOST_CELLS", 25)
    assert block_length(means, np.ones(100)) == block_length(means[:, ::2], np.ones(100))
