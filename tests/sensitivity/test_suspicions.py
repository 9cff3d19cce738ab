"""What is told as suspicious, and what is not: false alarms are as bad as silence."""

from __future__ import annotations

from pathlib import Path

import dask.array as da
import keras
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from keras import layers

from sensitivity.layers import normalises
from sensitivity.moments import Extremes, Moments
from sensitivity.query.near_zero import near_zero
from sensitivity.sections import Scaling, SeriesSection
from sensitivity.survey import Survey, survey
from sensitivity.suspicions import (
    Suspicion,
    near_zero_share,
    of_derivatives,
    of_outputs,
    of_series,
    of_stored,
)
from tests.conftest import sequential

ROOT = Path(__file__).parents[2]
RANDOM = np.random.default_rng(0)


def told(path, columns: dict, known: bool | None = True, **section) -> list[Suspicion]:
    file = path / "series.csv"
    pd.DataFrame(columns).to_csv(file, index=False)
    made = SeriesSection(path=str(file), **section)
    return list(of_series(survey(made), made, known))


def with_codes(values: np.ndarray, code: float, count: int) -> np.ndarray:
    values = values.astype(float).copy()
    values[RANDOM.choice(len(values), count, replace=False)] = code
    return values


@pytest.mark.parametrize("code", [-999.0, -9999.0, -99.0, -999.9, 9999.0, 1e20, -1e30, -777777.0])
def test_codes_of_missing_values_are_found_with_their_number(tmp_path, code):
    (found,) = told(tmp_path, {"rain": with_codes(RANDOM.gamma(1.0, 5.0, 500), code, 17)})
    assert (found.what, found.where) == ("a value that may stand for a missing one", "column 'rain'")
    assert f"{code:g} in 17 of 500 values" in found.figure


@pytest.mark.parametrize(
    "values",
    [
        RANDOM.normal(990, 9, 500),  # pressure
        np.where(RANDOM.random(500) < 0.9, 0.0, RANDOM.gamma(1, 20, 500)),  # rain, mostly none
        RANDOM.integers(0, 2, 500),  # a flag
        RANDOM.integers(0, 2, 500) * 1000,
        with_codes(RANDOM.gamma(1, 5, 500), 2057.0, 1),  # one spike
        np.clip(RANDOM.normal(90, 20, 500), 0, 100),  # humidity, often 100
        np.clip(RANDOM.normal(995, 8, 500), None, 999.0),  # pressure that a sensor cuts off
        RANDOM.normal(-99, 5, 500).round(),
        RANDOM.standard_cauchy(500),
        np.repeat([0.0, 1.0, 2.0, 3.0, 95.0], 100),  # numbers of classes
    ],
)
def test_ordinary_columns_are_no_codes(tmp_path, values):
    assert told(tmp_path, {"column": values, "other": RANDOM.standard_normal(500)}) == []


def test_columns_that_never_change_are_named(tmp_path):
    (found,) = told(tmp_path, {"area": np.full(50, 12.1), "rain": RANDOM.standard_normal(50)})
    assert found.where == "column 'area'"
    assert "importance is 0" in found.what


RAW = {"pressure": RANDOM.normal(990, 9, 300), "heat": RANDOM.normal(8, 7, 300), "flag": RANDOM.integers(0, 2, 300)}


def test_raw_columns_before_a_model_that_does_not_normalise_are_told_together(tmp_path):
    (found,) = told(tmp_path, RAW, known=False)
    assert found.where == "columns 'pressure', 'heat'"
    assert found.figure.startswith("as the model takes them, mean ± std: pressure 9")
    assert "series.scaling" in found.remedy


@pytest.mark.parametrize("known", [True, None])
def test_raw_columns_are_right_before_a_model_that_normalises_or_may_do_so(tmp_path, known):
    assert told(tmp_path, RAW, known=known) == []


def test_scaling_is_judged_by_what_the_model_takes(tmp_path):
    right = Scaling(mean=[990.0, 8.0, 0.0], std=[9.0, 7.0, 1.0])
    assert told(tmp_path, RAW, known=False, scaling=right) == []
    wrong = Scaling(mean=[8.0, 990.0, 0.0], std=[7.0, 9.0, 1.0])
    (found,) = told(tmp_path, RAW, known=False, scaling=wrong)
    assert found.where == "columns 'pressure', 'heat'"


def test_numbers_of_classes_are_no_raw_columns(tmp_path):
    file = tmp_path / "series.csv"
    pd.DataFrame({"basin": RANDOM.integers(0, 500, 200)}).to_csv(file, index=False)
    section = SeriesSection(path=str(file))
    assert of_series(survey(section), section, False)
    assert not of_series(survey(section), section, False, ["basin"])


def test_the_bundled_record_is_quiet_before_the_demos_model():
    section = SeriesSection(path=str(ROOT / "jobs" / "data" / "schwingbach.csv.gz"), time="time")
    found = of_series(survey(section), section, True)
    assert [str(one) for one in found] == []


def test_layers_that_scale_are_found():
    shape = (4, 2)
    scaling = layers.Normalization(mean=0.0, variance=1.0)
    assert normalises(sequential(shape, scaling, layers.LSTM(2)))
    assert normalises(sequential(shape, layers.Dropout(0.1), layers.BatchNormalization(), layers.LSTM(2)))
    assert normalises(sequential(shape, layers.TimeDistributed(layers.LayerNormalization()), layers.LSTM(2)))
    assert normalises(sequential(shape, layers.LSTM(2, return_sequences=True), layers.BatchNormalization())) is False
    assert normalises(sequential(shape, layers.Flatten(), layers.Dense(1))) is False
    inputs = keras.Input(shape)
    by_hand = keras.Model(inputs, layers.Dense(1)((inputs - 3.0) / 2.0))
    assert normalises(by_hand) is None

    nested = keras.Model(inputs, layers.Dense(1)(sequential(shape, layers.BatchNormalization())(inputs)))
    assert normalises(nested)

    class Own(keras.Model):
        def call(self, windows):
            return windows[:, -1]

    assert normalises(Own()) is None


def test_saturated_models_have_derivatives_near_zero():
    windows = RANDOM.standard_normal((5, 6, 3))
    slope = np.array([1.0, -2.0, 0.5])
    linear = np.broadcast_to(slope, (5, 1, 6, 3))
    prediction = (windows * slope).sum(axis=(1, 2))[:, None]
    assert near_zero_share(prediction, linear, windows) == 0.0
    assert near_zero_share(prediction, linear * 1e-5, windows) == 1.0
    constant = np.ones((5, 1))
    assert near_zero_share(constant, linear * 1e-9, windows) == 1.0
    dead = np.where(np.arange(5)[:, None, None, None] < 4, 0.0, linear)  # a ReLU's
    share = near_zero_share(prediction, dead, windows)
    assert share == pytest.approx(0.8)
    assert "80 %" in of_derivatives(share, 5)[0].figure
    assert of_derivatives(0.4, 5) == of_derivatives(None, 5) == ()
    assert near_zero_share(prediction * np.nan, linear, windows) is None


def test_stored_derivatives_that_a_few_windows_make_are_told():
    assert of_stored("rain at lag 0", 1.0, 0.4) == of_stored("rain at lag 0", 0.0, 0.0) == ()
    assert of_stored("rain at lag 0", 1.0, 1e-5)[0].where == "derivatives by rain at lag 0"


def test_outputs_near_zero_are_told_where_they_are_more_than_of_a_normal_distribution():
    assert of_outputs(0.008) == of_outputs(float("nan")) == ()
    assert "in 12 % of windows" in of_outputs(0.12)[0].figure


@pytest.mark.parametrize("cuts", [[300], [1, 299], [100, 100, 100], [7] * 42 + [6]])
def test_extremes_do_not_depend_on_blocks(cuts):
    values = RANDOM.integers(-3, 4, (300, 3)).astype(float)
    values[:, 2] = 5.0
    values[RANDOM.random((300, 3)) < 0.1] = np.nan
    moments = Moments(3)
    for block in np.split(values, np.cumsum(cuts)[:-1]):
        moments.add(block)
    for column, found in zip(values.T, moments.extremes, strict=True):
        known = column[np.isfinite(column)]
        each, times = np.unique(known, return_counts=True)
        after, before = (each[1], each[-2]) if len(each) > 1 else (None, None)
        assert found == Extremes(len(known), each[0], times[0], after, each[-1], times[-1], before)


def test_a_survey_keeps_its_extremes_through_json(tmp_path):
    pd.DataFrame({"x": [1.0, 2.0, 2.0]}).to_csv(tmp_path / "s.csv", index=False)
    found = survey(SeriesSection(path=str(tmp_path / "s.csv")))
    assert Survey.from_json(found.to_json()).extremes == found.extremes == (Extremes(3, 1.0, 1, 2.0, 2.0, 2, 1.0),)


@pytest.mark.parametrize("blocks", [100, 7])
def test_outputs_near_zero_are_counted_block_by_block(blocks):
    values = RANDOM.standard_normal((100, 2, 1)) + [[0.0], [3.0]]
    values[3] = np.nan
    codes = np.where(np.arange(100) % 5, 0, -1)
    values[10:20, 0] = 1e-3
    stored = xr.Dataset({"prediction": (("time", "output_step", "output"), values)}).chunk(time=blocks)
    found = near_zero(stored, da.from_array(codes, blocks)).compute()
    counted = np.delete(values, [3], 0)[np.delete(codes, [3]) >= 0]
    expected = (np.abs(counted) < 0.01 * counted.std(0)).mean(0)
    np.testing.assert_allclose(found, expected)
    assert found[0, 0] > 0.1
    assert near_zero(stored, da.from_array(np.full(100, -1), blocks)).isnull().all()
