from __future__ import annotations

import shutil
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from matplotlib.figure import Figure

from jobs.cli import PICTURES
from sensitivity import open_run, plots, query
from sensitivity.errors import Refused
from sensitivity.plots import KINDS, draw, plot, save, show, wanted
from sensitivity.query.conditions import Grouping
from tests.sensitivity.asking import dataset
from tests.sensitivity.test_query import half_done  # noqa: F401

STATISTICAL = [kind for kind in KINDS if kind not in ("window", "comparison")]


def in_memory(values: np.ndarray, chunks: Any) -> xr.Dataset:
    """Without times, predictions and inputs."""
    return dataset(values, chunks).drop_vars(["time", "prediction", "input"])


def series(values: np.ndarray, start: str = "2019-11-03", freq: str = "7h") -> xr.Dataset:
    """A run's dataset in memory, with times and predictions: `values` `(time, output_step, output, lag, feature)`."""
    made = in_memory(values, -(-len(values) // 3))
    times = pd.date_range(start, periods=len(values), freq=freq).to_numpy().astype("datetime64[us]")
    prediction = np.arange(values[:, :, :, 0, 0].size, dtype="float32").reshape(values.shape[:3])
    made["prediction"] = (made["jacobian"].dims[:3], prediction)
    made["prediction"].attrs["units"] = "mm/d"
    return made.assign_coords(time=("time", times, {"long_name": "time of the window's last step"}))


def random(times: int = 90, steps: int = 3, outputs: int = 2, lags: int = 5, features: int = 3) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((times, steps, outputs, lags, features)).astype("float32")
    values *= 1 + np.arange(features, dtype="float32")
    values[::7] = np.nan
    return values


def sizes(values: np.ndarray) -> np.ndarray:
    """Mean |J| × std by lag and feature, as `in_memory` has stds: `(output_step, output, lag, feature)`."""
    return np.nanmean(np.abs(values.astype("float64")), axis=0) * (1.0 + np.arange(values.shape[-1]))


def texts(figure: Figure) -> str:
    from matplotlib.text import Text

    return " | ".join(text.get_text() for text in figure.findobj(Text))


def pixels(figure: Figure, axes: int = 0) -> np.ndarray:
    return figure.axes[axes].images[0].get_array().filled(np.nan)


def options(kind: str, other: xr.Dataset) -> dict:
    return {"against": other} if kind == "comparison" else {}


def test_the_command_line_knows_every_kind():
    assert set(KINDS) == set(PICTURES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_of_memory_are_drawn_and_labelled(kind, suffix, tmp_path):
    source = series(random())
    file = tmp_path / f"picture.{suffix}"
    plot(source, kind, file, **options(kind, source))
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        text = content.decode()
        assert "lag" in text
        assert "90 windows" in text
        assert kind == "comparison" or "mm/d" in text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "step-lag"])
def test_pictures_of_a_run(half_done, kind, tmp_path):  # noqa: F811
    opened = open_run(half_done.place.path)
    file = tmp_path / "picture.svg"
    plot(opened, kind, file, **options(kind, opened))
    text = file.read_text()
    assert "55 windows" in text
    assert kind == "window" or "26 of 55 windows" in text
    assert ("rain" in text and "heat" in text) or "sum over 2 features" in text


def test_several_pictures_read_every_block_once():
    reads = []

    def counted(block):
        reads.append(len(block))
        return block

    source = series(random(30))
    lazy = source["jacobian"].data.map_blocks(counted, dtype="float32", meta=np.empty((0,) * 5, "float32"))
    source["jacobian"] = source["jacobian"].copy(data=lazy)
    asked = wanted(source, STATISTICAL)
    assert reads == []
    (found,) = dask.compute(asked)
    assert sorted(reads) == sorted(source["jacobian"].chunksizes["time"])
    for kind in STATISTICAL:
        draw(found[kind], kind)
    assert len(reads) == len(source["jacobian"].chunksizes["time"])


def test_lines_are_numpys_and_largest_first():
    values = random()
    axes = show(series(values), "lag-profile").axes[0]
    expected = sizes(values).mean(axis=(0, 1))
    assert [line.get_label() for line in axes.lines] == ["x_2", "x_1", "x_0"]
    for i, line in enumerate(axes.lines):
        np.testing.assert_allclose(line.get_ydata(), expected[:, 2 - i])
        assert line.get_xdata().tolist() == [4, 3, 2, 1, 0]
    assert axes.get_xlim()[0] > axes.get_xlim()[1]  # newest at the right


def test_an_interval_is_drawn_where_there_is_one():
    values = random(steps=1, outputs=1)
    found = query.mean_abs(series(values)).compute()
    found["mean_abs_low"], found["mean_abs_high"] = found["mean_abs"] * 0.5, found["mean_abs"] * 2
    figure = draw(found, "lag-profile")
    low = figure.axes[0].collections[0].get_datalim(figure.axes[0].transData).y0
    np.testing.assert_allclose(low, 0.5 * sizes(values)[0, 0, :, 2].min())
    assert "interval" in texts(figure)
    bars = query.importance(series(values)).compute()
    bars["importance_low"], bars["importance_high"] = bars["importance"] - 0.1, bars["importance"] + 0.2
    (line,) = draw(bars, "importance").axes[0].containers[0].lines[2]
    middle = bars["importance"].values[0, 0, ::-1]
    np.testing.assert_allclose([part[:, 0] for part in line.get_segments()], np.array([middle - 0.1, middle + 0.2]).T)


def test_a_band_holds_nine_windows_of_ten():
    values = random(401, steps=1, outputs=1)
    found = wanted(series(values), ["lag-band"])["lag-band"].compute()
    exact = np.nanquantile(np.abs(values[:, 0, 0]), plots.bands.BAND, axis=0, method="inverted_cdf")
    np.testing.assert_allclose(found["size_quantile"].transpose("at", "lag", "feature"), exact, rtol=0.017)
    panel = draw(found, "lag-band").axes[0]
    assert panel.get_title(loc="left") == "x_2"
    light = panel.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose(
        [light.min(), light.max()],
        3 * exact[[0, -1], :, 2][[0, 1], [exact[0, :, 2].argmin(), exact[-1, :, 2].argmax()]],
        rtol=0.017,
    )


def test_pixels_of_a_heatmap_and_of_steps():
    values = random()
    np.testing.assert_allclose(pixels(show(series(values), "heatmap")), sizes(values).mean(axis=(0, 1)).T[::-1])
    np.testing.assert_allclose(pixels(show(series(values), "step-lag")), sizes(values).mean(axis=1).sum(axis=-1))
    one = show(series(values), "step-lag", features=["x_1"], outputs=["out_1"])
    np.testing.assert_allclose(pixels(one), sizes(values)[:, 1, :, 1])
    assert "x_1" in texts(one)
    assert "out_1" in texts(one)


def test_months_are_rows_and_seasons_where_months_have_few_windows():
    values = random(400)
    source = series(values)
    figure = show(source, "month-lag")
    months = pd.DatetimeIndex(source["time"].values).month
    expected = [sizes(values[months == month]).mean(axis=(0, 1)).sum(axis=-1) for month in (1, 2, 11, 12)]
    np.testing.assert_allclose(pixels(figure), expected)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["Jan", "Feb", "Nov", "Dec"]
    assert "DJF" in texts(show(series(random(60), freq="5D"), "month-lag"))
    with pytest.raises(Refused, match="(?s)no dates.*time-lag"):
        show(in_memory(random(30), (30,)), "month-lag")


def test_bars_are_sorted_and_others_are_one_bar():
    values = random(features=4)
    importance = np.nanmean(np.abs(values.astype("float64")), axis=(0, 1, 2, 3)) * (1.0 + np.arange(4))
    axes = show(series(values), "importance").axes[0]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], importance[::-1])
    figure = show(series(values), "importance", top=2)
    np.testing.assert_allclose(
        [bar.get_width() for bar in figure.axes[0].patches], [*importance[:1:-1], importance[:2].sum()]
    )
    assert "2 others together" in texts(figure)
    assert f"{importance[3] / importance.sum():.0%}".replace("%", " %") in texts(figure)


def test_boxes_are_quantiles_over_windows_and_lags():
    values = random(steps=1, outputs=1)
    axes = show(series(values), "distribution").axes[0]
    flat = values[:, 0, 0, :, 2].ravel()
    low, high = np.nanquantile(flat, [0.05, 0.95], method="inverted_cdf") * 3
    box = axes.containers[1].patches[0]
    np.testing.assert_allclose([box.get_x(), box.get_x() + box.get_width()], [low, high], rtol=0.017)
    assert axes.get_yticklabels()[0].get_text() == "x_2"


def test_the_window_with_the_largest_derivative():
    values = random()
    values[61, 2, 1, 3, 0] = -50
    values[0, 0, 0, 0, 0] = np.inf
    source = series(values)
    found = wanted(source, ["window"])["window"].compute()
    np.testing.assert_array_equal(found["jacobian"], values[61])
    assert found["time"] == source["time"][61]
    figure = draw(found, "window")
    shown = figure.axes[0].patches[1].get_data()
    np.testing.assert_allclose(shown.values, values[61, 2, 1, ::-1, 0].clip(max=0))
    for said in (np.datetime_as_string(source["time"].values[61], "h").replace("T", " "), "output step 2", "out_1"):
        assert said in texts(figure)
    assert f"{61 * 6 + 5} mm/d" in texts(figure)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(
            wanted(source, ["window"], where="month == 1")["window"].compute()["jacobian"], values[61]
        )


def test_a_window_by_its_time(half_done):  # noqa: F811
    opened = open_run(half_done.place.path)
    found = wanted(opened, ["window"], time="2020-01-01T06:00")["window"].compute()
    np.testing.assert_array_equal(found["jacobian"], opened["jacobian"][1].compute())
    np.testing.assert_array_equal(found["input"], query.with_inputs(opened)["input"][1].compute())
    figure = draw(found, "window")
    np.testing.assert_array_equal(
        figure.axes[0].lines[0].get_ydata(), found["input"][:, 0 if figure.axes[0].get_title("left") == "rain" else 1]
    )
    for time, said in (("2020-01-01T05:30", "nearest is 2020-01-01T05"), ("noon", "2015-06-03T07:00")):
        with pytest.raises(Refused, match=said):
            show(opened, "window", time=time)
    assert "a value of the series is missing" in texts(show(opened, "window", time="2020-01-01T12:00"))
    assert "not computed yet" in texts(show(opened, "window", time="2020-01-03T06:00"))


def test_a_window_is_drawn_where_its_inputs_are_gone(half_done):  # noqa: F811
    opened = open_run(half_done.place.path)
    asked = wanted(opened, ["window"])
    shutil.rmtree(half_done.place.path / "series.zarr")
    (found,) = dask.compute(asked)
    assert "without inputs" in texts(draw(found["window"], "window"))


def test_two_runs_beside_each_other():
    first, second = random(), random(features=4)[:50]
    figure = show(series(first), "comparison", against=series(second), names=["old", "new"])
    bars, gap = figure.axes[0], pixels(figure, 1)
    np.testing.assert_allclose(gap[1], (sizes(first)[..., 2] - sizes(second)[..., 2]).mean(axis=(0, 1)))
    assert [label.get_text() for label in bars.get_yticklabels()] == ["x_3", "x_2", "x_1", "x_0"]
    assert bars.containers[0].patches[0].get_width() == 0  # the old one has no such feature
    assert np.isnan(gap[0]).all()
    np.testing.assert_allclose(bars.containers[1].patches[1].get_width(), sizes(second)[..., 2].mean())
    image = figure.axes[1].images[0]
    assert image.norm.vmin == -image.norm.vmax
    for said in ("old", "old − new", "77 of 90 windows", "42 of 50 windows"):
        assert said in texts(figure)
    with pytest.raises(Refused, match="against"):
        show(series(first), "comparison")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, 0.0])
@pytest.mark.parametrize("windows", [1, 9])
def test_nothing_at_all_is_drawn_without_a_murmur(kind, value, windows, tmp_path):
    source = series(np.full((windows, 2, 1, 1, 2), value, "float32"))
    for suffix in ("png", "svg"):
        plot(source, kind, tmp_path / f"x.{suffix}", **options(kind, source))
        assert (tmp_path / f"x.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_odd_feature_names_are_drawn_as_they_are(kind, tmp_path):
    names = ["$x_i^$", "_hidden", "two\nlines $"]
    source = series(random()).assign_coords(feature=names)
    plot(source, kind, tmp_path / "odd.svg", **options(kind, source))
    text = (tmp_path / "odd.svg").read_text()
    assert "sum over 3" in text or all(name in text for name in ("$x_i^$", "hidden", "two lines $"))


def test_long_names_lose_their_middle_but_never_what_tells_them_apart():
    long = "volumetric_soil_moisture_at_a_depth_of_10cm"
    figure = show(series(random()).assign_coords(feature=[long, long.replace("10", "40"), "x"]), "heatmap")
    assert "volumetric_soil_m…_of_40cm" in texts(figure)
    assert long not in texts(figure)
    alike = [f"mean_temperature_of_sensor_{i}_in_the_valley_above_the_river" for i in range(3)]
    figure = show(series(random()).assign_coords(feature=alike), "heatmap")
    assert len({label.get_text() for label in figure.axes[0].get_yticklabels()}) == 3


def test_what_is_said_fits_the_picture():
    for kind in ("lag-band", "importance", "window"):
        figure = show(series(random(features=40)), kind)
        figure.draw_without_rendering()
        (said,) = (artist for artist in figure.artists if "windows" in artist.get_text())
        assert said.get_window_extent().x1 <= figure.bbox.x1
        assert said.get_window_extent().y0 >= max(axes.get_window_extent().y1 for axes in figure.axes)


@pytest.mark.parametrize("kind", [kind for kind in STATISTICAL if kind not in ("time-lag", "month-lag", "step-lag")])
def test_features_that_are_not_drawn_are_told_of(kind):
    figure = show(series(random(features=40)), kind)
    assert "of 40 features" in texts(figure)
    assert "others" in texts(figure)


def test_more_features_than_colours_are_told_apart():
    axes = show(series(random(features=20)), "lag-profile", top=20).axes[0]
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == len({look[:2] for look in looks}) == 20


def test_lags_that_are_not_neighbours_stand_side_by_side():
    figure = show(series(random()), "heatmap", lags=[0, 1, 4])
    figure.draw_without_rendering()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels() if label.get_text()] == ["0", "1", "4"]


def test_a_statistic_is_drawn_in_one_call():
    source = series(random(60))
    assert "depends on" in texts(show(query.importance(source)))
    assert "listens, by hour" in texts(show(query.lag_profile(source, by="hour"), "month-lag"))
    assert show(query.lag_profile(source)).axes[0].lines
    assert show(source)._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(Refused, match="(?s)importance of a result without importance.*lag-profile"):
        show(query.lag_profile(source), "importance")
    with pytest.raises(Refused, match="(?s)of groups: hour"):
        show(query.lag_profile(source, by="hour"), "lag-profile")
    with pytest.raises(TypeError, match="where"):
        show(query.lag_profile(source), where="hour == 1")
    with pytest.raises(Refused, match="lag-profile, lag-band"):
        show(source, "pie")


def test_what_cannot_be_drawn_is_known_before():
    source = in_memory(random(steps=1), 30)
    assert plots.possible(source) == [
        *("lag-profile", "lag-band", "heatmap", "time-lag", "importance", "window", "distribution")
    ]
    assert "lag-band" not in plots.possible(source, memory="1MB")


def test_conditions_and_figures_of_others_are_left_alone(tmp_path):
    source = series(random())
    figure = show(source, "heatmap", where="hour < 12")
    early = pd.DatetimeIndex(source["time"].values).hour < 12
    np.testing.assert_allclose(pixels(figure), sizes(random()[early]).mean(axis=(0, 1)).T[::-1])
    save(figure, tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_groups_of_ones_own():
    values = random(30)
    own = Grouping("half", np.array(["even", "odd"], object), da.arange(30, chunks=7) % 2)
    found = query.mean_abs(series(values), by=own).compute()
    np.testing.assert_allclose(
        found["mean_abs"].sel(half="odd"), np.nanmean(np.abs(values[1::2].astype("float64")), axis=0)
    )
    both = query.mean_abs(series(values), by=[own, "hour"])
    assert both["mean_abs"].dims[:2] == ("half", "hour")
