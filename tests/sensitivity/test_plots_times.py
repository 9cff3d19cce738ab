from __future__ import annotations

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr

from sensitivity.plots import show
from sensitivity.plots.times import time_bins
from tests.sensitivity.test_plots import in_memory, pixels, random, series, sizes, texts


def test_time_is_cut_into_bins_of_windows():
    values = random()
    source = series(values)
    figure = show(source, "time-lag")
    expected = np.array(
        [sizes(values[i : i + 1]).mean(axis=(0, 1)).sum(axis=-1) if i % 7 else [np.nan] * 5 for i in range(90)]
    )
    np.testing.assert_allclose(pixels(figure), expected.T)
    left, right, bottom, top = figure.axes[0].images[0].get_extent()
    days = (source["time"].values - np.datetime64("1970-01-01")) / np.timedelta64(1, "D")
    np.testing.assert_allclose([left, right], [days[0], days[-1] + 7 / 24])
    assert (bottom, top) == (-0.5, 4.5)
    assert "time of the window's last step" in texts(figure)


@pytest.mark.parametrize(
    ("freq", "count", "most", "width"),
    [
        ("h", 100, 800, "1h"),
        ("min", 100_000, 800, "3h"),
        ("D", 30_000, 800, "56D"),
        ("7h", 1000, 300, "28h"),
        ("MS", 50, 60, "31D"),
    ],
)
def test_bins_are_round_and_few_and_hold_all_windows(freq, count, most, width):
    source = series(np.zeros((count, 1, 1, 1, 1), "float32"), freq=freq, start="1950-01-03T01:00")
    bins = time_bins(source, most)
    codes, times = bins.codes.compute(), source["time"].values
    assert bins.codes.chunks == source["jacobian"].data.chunks[:1]
    assert len(bins.labels) <= most
    assert codes.min() == 0
    assert codes.max() == len(bins.labels) - 1
    steps = np.diff(bins.labels)
    assert (steps == pd.Timedelta(width).to_timedelta64()).all()
    assert (bins.labels[codes] <= times).all()
    assert (times < bins.labels[codes] + steps[0]).all()


def test_sites_one_after_the_other_share_bins_of_time():
    source = xr.concat([series(random(40)), series(random(40))], "time")
    source["jacobian"] = source["jacobian"].chunk({"time": 80})
    bins = time_bins(source)
    assert len(bins.labels) == 40
    np.testing.assert_array_equal(bins.codes.compute(), np.tile(np.arange(40), 2))


def test_times_that_are_no_dates():
    values = random(20)
    numbered = in_memory(values, (20,)).assign_coords(time=np.arange(20) * 4 + 3)
    np.testing.assert_array_equal(time_bins(numbered, 10).labels, 3 + 8 * np.arange(10) - 3)
    decimal = numbered.assign_coords(time=np.arange(20) / 8)
    assert time_bins(decimal, 10).name == "window"
    assert "number of the window" in texts(show(decimal, "time-lag"))


def test_a_long_record_is_drawn_from_few_pixels():
    values = da.random.default_rng(0).standard_normal(
        (100_000, 1, 1, 2, 2), chunks=(25_000, 1, 1, 2, 2), dtype="float32"
    )
    source = series(np.zeros((100_000, 1, 1, 2, 2), "float32"), freq="min")
    source["jacobian"] = source["jacobian"].copy(data=values)
    lags, columns = pixels(show(source, "time-lag")).shape
    assert lags == 2
    assert 300 < columns <= 800
    assert pixels(show(source, "time-lag", memory=200_000)).shape[1] < 300  # as many as there is room for
