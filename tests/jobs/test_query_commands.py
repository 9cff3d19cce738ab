"""`query`, `top` and `compare` as people call them."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from jobs.tables import render
from tests.conftest import frame, job_writer
from tests.jobs.conftest import KNOBS, call

WINDOWS = 995


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 995 hours, six lags and two features, one shard of which is not committed."""
    folder = tmp_path_factory.mktemp("asked")
    file = job_writer(folder)(series=frame(1000), sensitivity=KNOBS, run={"shard_windows": 100})
    assert call("run", file, "--serial").exit_code == 0
    return folder / "run"


def asked(*arguments: object) -> list[dict]:
    result = call(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_statistic_is_answered_from_the_command_line(finished):
    from jobs.questions import STATISTICS
    from sensitivity import query

    assert set(STATISTICS) == {*query.FACTORIES, "trend"}
    for statistic in STATISTICS:
        rows = asked("query", finished, statistic, "--lags", "0:2")
        assert rows, statistic
        assert all(row["count"] == WINDOWS for row in rows), statistic
        text = call("query", finished, statistic).stdout
        assert all(len(line) <= 200 for line in text.splitlines()), statistic


def test_labels_stand_first_and_intervals_beside_their_variable(finished):
    rows = asked("query", finished, "importance", "--by", "weekday", "--by", "rain:2", "--ci", 0.9)
    assert len(rows) == 7 * 2 * 2
    names = list(rows[0])
    assert names[:6] == ["weekday", "rain", "output_step", "output", "feature", "count"]
    assert names.index("importance_low") == names.index("importance") + 1
    assert sum(row["count"] for row in rows) == 2 * WINDOWS
    table = call("query", finished, "importance", "--ci", 0.9).stdout
    assert "importance_low" not in table
    assert " … " in table
    assert "output_step" not in table


def test_conditions_meet_the_store(finished):
    rows = asked(
        "query", finished, "mean", "--where", "rain > 0 and hour in (0, 1)", "--features", "heat", "--lags", "0"
    )
    series = pd.read_csv(finished.parent / "series.csv", parse_dates=["time"])
    held = (series["rain"].astype("float32") > 0) & series["time"].dt.hour.isin([0, 1])
    windows = held[5:].to_numpy()
    opened = xr.open_zarr(finished / "results.zarr")["jacobian"].values[:, 0, 0, -1, 1]
    (row,) = rows
    assert row["count"] == windows.sum()
    assert row["mean"] == pytest.approx(opened[windows].astype(float).mean())


def test_a_series_that_is_not_the_runs_is_not_multiplied_with(finished):
    from sensitivity.query import inputs

    copied = next(file for file in (finished / "series.zarr" / "series").rglob("c/**/*") if file.is_file())
    kept = copied.read_bytes()
    assert asked("query", finished, "gradient-input")[0]["mean_abs"] > 0
    inputs._proved.cache_clear()
    copied.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        result = call("query", finished, "gradient-input")
    finally:
        copied.write_bytes(kept)
    assert result.exit_code == 2
    assert "copy of the series is damaged" in result.stderr


def test_differences_and_columns_of_ones_own(finished, tmp_path):
    times = pd.date_range("2020-01-01", periods=1000, freq="h")
    pd.DataFrame({"time": times, "state": np.where(np.arange(1000) % 3, "wet", "dry")}).to_csv(
        tmp_path / "state.csv", index=False
    )
    both = ("--by", "state", "--columns", tmp_path / "state.csv")
    rows = asked("query", finished, "mean-abs", *both, "--between", "wet", "dry", "--ci", 0.8)
    apart = asked("query", finished, "mean-abs", *both)
    wet = [row["mean_abs"] for row in apart if row["state"] == "wet"]
    dry = [row["mean_abs"] for row in apart if row["state"] == "dry"]
    np.testing.assert_allclose([row["mean_abs_difference"] for row in rows], np.subtract(wet, dry))
    assert all(row["mean_abs_difference_low"] < row["mean_abs_difference_high"] for row in rows)
    refused = call("query", finished, "mean", *both, "--between", "wet", "damp")
    assert refused.exit_code == 2
    assert "two of dry, wet" in refused.stderr


def test_top_windows_have_times_values_and_inputs(finished):
    rows = asked("top", finished, "--count", 4, "--features", "heat", "--lags", "0:1", "--separation", "2D")
    assert [row["rank"] for row in rows] == [1, 2, 3, 4]
    times = np.array([row["time"] for row in rows], "datetime64[s]")
    assert (np.diff(np.sort(times)) >= np.timedelta64(2, "D")).all()
    series = pd.read_csv(finished.parent / "series.csv", parse_dates=["time"]).set_index("time")
    first = rows[0]
    window = series.loc[: first["time"], "heat"].to_numpy()[-2:]
    np.testing.assert_allclose(np.ravel(first["input"]["values"]), window, rtol=1e-6)
    assert abs(first["peak"]) == first["score"] == np.abs(first["jacobian"]["values"]).max()
    assert "T" in call("top", finished, "--count", 2).stdout


def test_runs_are_compared(finished, tmp_path):
    rows = asked("compare", finished, finished, "importance", "--ci", 0.9)
    assert [row["importance_difference"] for row in rows] == [0, 0]
    file = job_writer(tmp_path)(series=frame(100, ("rain", "snow")), sensitivity=KNOBS)
    assert call("run", file, "--serial").exit_code == 0
    refused = call("compare", finished, tmp_path / "run", "importance")
    assert refused.exit_code == 2
    assert "feature: rain, heat against rain, snow" in refused.stderr
    assert call("compare", finished, tmp_path / "run", "importance", "--features", "rain").exit_code == 0


@pytest.mark.parametrize("ending", ["csv", "json", "parquet", "nc", "zarr"])
def test_answers_are_written_to_files(finished, tmp_path, ending):
    file = tmp_path / f"answer.{ending}"
    result = call("query", finished, "lag-profile", "--by", "hour:0,12", "-o", file)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(file)
    readers = {
        "csv": pd.read_csv,
        "json": pd.read_json,
        "parquet": pd.read_parquet,
        "nc": lambda path: xr.open_dataset(path, engine="h5netcdf").to_dataframe(),
        "zarr": lambda path: xr.open_zarr(path, consolidated=False).to_dataframe(),
    }
    found = readers[ending](file)
    assert len(found) == 3 * 6 * 2
    rows = asked("query", finished, "lag-profile", "--by", "hour:0,12")
    np.testing.assert_allclose(found["mean_abs"].sum(), sum(row["mean_abs"] for row in rows))
    again = call("query", finished, "lag-profile", "-o", file)
    assert again.exit_code == (2 if ending == "zarr" else 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mean", "--format", "parquet"], "add -o FILE"),
        (["mean", "-o", "x.bmp"], "a file ending in"),
        (["mean", "-o", "no/where.csv"], "existing directory"),
        (["mean", "--at", "0.5"], "only quantiles"),
        (["quantiles", "--at", "half"], "0.05,0.5,0.95"),
        (["trend", "--every", "decade"], "year, month"),
        (["mean", "--features", "snow"], "rain, heat"),
        (["mean", "--by", "snow"], "season, month"),
        (["mean", "--site", "A"], "none"),
        (["dgsm", "--distribution", "rain=even"], "normal, uniform"),
    ],
)
def test_what_cannot_be_answered_is_refused_at_once(finished, arguments, said):
    result = call("query", finished, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_an_incomplete_run_answers_and_says_so(finished):
    record = finished / "commits" / "00000003.json"
    kept = record.read_bytes()
    record.unlink()
    try:
        result = call("query", finished, "importance", "--format", "csv")
    finally:
        record.write_bytes(kept)
    assert "895 of 995 windows are committed" in result.stderr
    assert [row["count"] for row in csv.DictReader(io.StringIO(result.stdout))] == ["895", "895"]


def test_tables_that_are_too_wide_go_on_below():
    row = {"feature": "rain", "count": 3} | {f"variable_{i}": 0.1234 for i in range(30)}
    lines = render([row], "table").splitlines()
    assert all(len(line) <= 200 for line in lines)
    assert sum("feature" in line for line in lines) > 1
    assert sum("variable_29" in line for line in lines) == 1
