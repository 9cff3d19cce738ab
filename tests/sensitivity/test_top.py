"""The top windows are exactly the greedy ones, whatever the blocks, and few candidates are ever kept."""

from __future__ import annotations

import tracemalloc
from datetime import timedelta

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from sensitivity import query
from sensitivity.errors import Refused
from sensitivity.query.picking import Candidates, Rule, merged, picked, thinned
from sensitivity.site_index import SiteIndex

LAGS = 3
HIGH = [0.0, 1.0, 1.5, 2.0, 7.0]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def greedy(scores, sites, places, count: int, separation) -> list[int]:
    """The windows picked, one by one, from all of them: what is meant."""
    order = [i for i in np.lexsort((np.arange(len(scores)), -np.asarray(scores))) if np.isfinite(scores[i])]
    picks: list[int] = []
    for i in order:
        if len(picks) < count and all(sites[i] != sites[p] or abs(places[i] - places[p]) >= separation for p in picks):
            picks.append(int(i))
    return picks


def of_scores(scores, chunks, sites=None, times=None) -> xr.Dataset:
    """A dataset whose windows have these scores, by one derivative each; `sites` is a run length by site."""
    scores = np.asarray(scores, "float32")
    values = np.zeros((len(scores), 1, 1, LAGS, 1), "float32")
    values[np.arange(len(scores)), 0, 0, np.arange(len(scores)) % LAGS, 0] = scores * (-1) ** np.arange(len(scores))
    dims = ("time", "output_step", "output", "lag", "feature")
    labels = {"lag": np.arange(LAGS)[::-1], "feature": ["rain"], "output": ["flow"], "output_step": [0]}
    labels["time"] = np.arange(len(scores)) if times is None else times
    found = xr.Dataset({"jacobian": (dims, values)}, coords=labels).chunk({"time": chunks})
    if sites is not None:
        index = SiteIndex("site", "time", np.array(list(sites), object), np.cumsum([0, *sites.values()]))
        found = found.assign_coords(xr.Coordinates.from_xindex(index))
    return found


@st.composite
def records(draw, most: int = 40):
    """Scores with ties and gaps, cut into blocks and into sites."""
    scores = draw(st.lists(st.sampled_from([*HIGH, np.nan, np.inf]), min_size=1, max_size=most))
    chunks, runs = draw(cuts(len(scores))), draw(cuts(len(scores)))
    return np.array(scores), chunks, {f"site {i}": run for i, run in enumerate(runs)}


def cuts(total: int):
    borders = st.lists(st.integers(1, total - 1), unique=True, max_size=6) if total > 1 else st.just([])
    return borders.map(lambda found: tuple(np.diff([0, *sorted(found), total]).tolist()))


@settings(deadline=None)
@given(records(), st.integers(1, 6), st.none() | st.integers(0, 12), st.booleans())
def test_any_blocks_give_the_greedy_windows(record, count, separation, panel):
    scores, chunks, sites = record
    dataset = of_scores(scores, chunks, sites if panel else None)
    names = np.repeat(list(sites), list(sites.values())) if panel else np.zeros(len(scores))
    expected = greedy(scores, names, np.arange(len(scores)), count, max(1, LAGS if separation is None else separation))
    found = query.top(dataset, count, separation=separation)
    assert found["time"].values.tolist() == expected
    assert found["rank"].values.tolist() == list(range(1, len(expected) + 1))
    np.testing.assert_array_equal(found["score"], scores[expected])
    np.testing.assert_array_equal(abs(found["peak"]), scores[expected])
    if panel:
        assert found["site"].values.tolist() == names[expected].tolist()


@settings(deadline=None)
@given(
    records(),
    st.integers(1, 6),
    st.sampled_from(["0s", "3s", "90min", timedelta(seconds=1), timedelta(0), "1D", np.timedelta64(1500, "ms")]),
    st.sampled_from(["s", "ms", "us", "ns"]),
    st.randoms(use_true_random=False),
)
def test_a_separation_in_time_counts_time(record, count, separation, unit, random):
    scores, chunks, sites = record
    steps = {run: np.cumsum([random.choice([1, 2, 3, 3600]) for _ in range(run)]) for run in sites.values()}
    seconds = np.concatenate([steps[run] - 7000 for run in sites.values()])  # on both sides of 1970
    times = seconds.astype("datetime64[s]").astype(f"datetime64[{unit}]")
    names = np.repeat(list(sites), list(sites.values()))
    found = query.top(of_scores(scores, chunks, sites, times), count, separation=separation)
    apart = pd.Timedelta(separation).total_seconds()
    distinct = apart if apart else 1e-9  # a window is picked once, whatever the separation
    expected = greedy(scores, names, seconds if apart else np.arange(len(scores)), count, distinct)
    np.testing.assert_array_equal(found["time"], times[expected])
    assert found["site"].values.tolist() == names[expected].tolist()


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_parts_merge_in_any_order_to_the_same_picks(data):
    total = data.draw(st.integers(1, 120))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rule = Rule(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)))
    noise = random.integers(0, data.draw(st.sampled_from([1, 3, 50])), total).astype(float)
    peaks = random.integers(0, total, random.integers(1, 9))
    bumps = 200 + 5 * np.arange(len(peaks)) - abs(np.arange(total)[:, None] - peaks)
    every = Candidates(
        np.arange(total),
        bumps.max(axis=1) + noise / 100 if data.draw(st.booleans()) else noise,
        random.integers(0, 3, total) if data.draw(st.booleans()) else np.zeros(total, int),
        random.integers(-total, total, total) if data.draw(st.booleans()) else np.arange(total) - total // 2,
    )
    parts = [thinned(every.at(part), rule) for part in np.array_split(random.permutation(total), random.integers(1, 9))]
    while len(parts) > 1:
        first, second, *others = parts
        parts = [*others, merged([first, second], rule)]
    expected = greedy(every.score, every.site, every.place, rule.count, rule.separation)
    assert picked(parts[0], rule).window.tolist() == expected


def test_places_at_the_ends_of_time_do_not_overflow():
    limits = np.iinfo(np.int64)
    places = np.array([limits.min + 1, 1, limits.max])
    rule = Rule(3, limits.max)
    found = thinned(Candidates(np.arange(3), np.array([3.0, 1.0, 2.0]), np.zeros(3, int), places), rule)
    assert picked(found, rule).window.tolist() == [0, 2]


def test_a_pick_rules_out_the_best_of_three_cells():
    """Cells are 4 long: of 5 and its neighbours 3 and 8, only 5 is picked, then what is lower than all of them."""
    scores = np.zeros(40)
    scores[[5, 3, 8, 20]] = [4.0, 3.0, 2.0, 1.0]
    found = query.top(of_scores(scores, (9, 31)), 2, separation=4)
    assert found["time"].values.tolist() == [5, 20]


def test_a_separation_finer_than_times_is_rounded_up():
    times = np.arange(5).astype("datetime64[s]")
    found = query.top(of_scores([5.0, 4.0, 3.0, 2.0, 1.0], (5,), times=times), separation="1500ms")
    assert found["score"].values.tolist() == [5.0, 3.0, 1.0]
    assert found["time"].dtype == "datetime64[s]"


SHAPES = {
    "random": lambda i: np.random.default_rng(0).random(len(i)),
    "slow": lambda i: np.sin(i / 3000.0) + np.sin(i / 170.0),
    "rising": lambda i: i / 1e6,
    "all alike": lambda i: np.ones(len(i)),
    "every second cell high": lambda i: i // 20 % 2 + np.random.default_rng(0).random(len(i)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_stay_few_on_a_long_record(shape):
    windows, rule = np.arange(200_000), Rule(10, 20)
    scores = SHAPES[shape](windows)
    every = Candidates(windows, scores, np.zeros(len(windows), int), windows)
    most = (3 * rule.count - 2) * rule.separation
    kept = thinned(Candidates(*(np.empty(0, kind) for kind in (int, float, int, int))), rule)
    for part in np.array_split(windows, 40):
        own = thinned(every.at(part), rule)
        kept = merged([kept, own], rule)
        assert len(own) <= most
        assert len(kept) <= most
        assert kept.window.base is None
    assert picked(kept, rule).window.tolist() == greedy(scores, windows * 0, windows, rule.count, rule.separation)


def test_a_long_record_takes_a_few_blocks_of_memory():
    windows, block = 200_000, 4000

    def made(block_info):
        start, stop = block_info[None]["array-location"][0]
        return np.random.default_rng(start).random((stop - start, 1, 1, 20, 5), "float32")

    cut = (block,) * (windows // block), (1,), (1,), (20,), (5,)
    jacobian = da.map_blocks(made, chunks=cut, dtype="float32", meta=np.empty((0,) * 5, "float32"))
    dims = ("time", "output_step", "output", "lag", "feature")
    record = xr.Dataset({"jacobian": (dims, jacobian)}, coords={"lag": np.arange(20)[::-1]})
    query.top(record.isel(time=slice(0, block)))
    tracemalloc.start()
    found = query.top(record)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.sizes["rank"] == 10
    assert peak < 10 * 2**20 < record["jacobian"].nbytes / 7


def counted(dataset: xr.Dataset) -> tuple[xr.Dataset, list[tuple[int, ...]]]:
    reads: list[tuple[int, ...]] = []

    def read(block, block_info):
        reads.append(tuple(block_info[0]["chunk-location"]))
        return block

    blocks = dataset["jacobian"].data
    lazy = da.map_blocks(read, blocks, dtype=blocks.dtype, meta=np.empty((0,) * 5, blocks.dtype))
    return dataset.assign(jacobian=dataset["jacobian"].copy(data=lazy)), reads


def test_every_block_is_read_once_then_those_of_picks():
    dataset, reads = counted(forecast().chunk({"time": 7, "output_step": 2}))
    blocks = dataset["jacobian"].data.numblocks
    found = query.top(dataset, 2, by="sum", separation=30)
    scored, others = reads[: np.prod(blocks)], reads[np.prod(blocks) :]
    assert sorted(scored) == sorted(np.ndindex(blocks))
    assert {time for time, *_ in others} == {int(window) // 7 for window in found["time"]}


def forecast(times: int = 50) -> xr.Dataset:
    """Four steps of two outputs by five lags of three features, with predictions and inputs."""
    random = np.random.default_rng(1)
    dims = ("time", "output_step", "output", "lag", "feature")
    values = random.standard_normal((times, 4, 2, 5, 3)).astype("float32")
    values[20:23] = np.nan
    data = {
        "jacobian": (dims, values, {"units": "m"}),
        "prediction": (dims[:3], random.random((times, 4, 2), "float32")),
        "input": (("time", "lag", "feature"), random.random((times, 5, 3), "float32")),
    }
    labels = {
        "time": np.arange(times),
        "output_step": np.arange(1, 5),
        "output": ["flow", "level"],
        "lag": np.arange(5)[::-1],
        "feature": ["rain", "heat", "snow"],
        "input_std": ("feature", [1.0, 50.0, 0.2]),
        "skipped": ("time", np.isnan(values[:, 0, 0, 0, 0])),
    }
    return xr.Dataset(data, coords=labels)


@pytest.mark.parametrize("by", ["max", "sum"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("selection", "labels"),
    [
        ({}, {}),
        ({"features": "heat", "outputs": "level"}, {"feature": ["heat"], "output": ["level"]}),
        ({"features": ["snow", "rain"], "lags": "1:3"}, {"feature": ["rain", "snow"], "lag": [3, 2, 1]}),
        ({"output_steps": [4, 1], "lags": 0}, {"output_step": [1, 4], "lag": [0]}),
    ],
)
def test_scores_and_windows_are_of_the_selection(selection, labels, by, scaled):
    dataset = forecast()
    chosen = dataset.sel(labels)
    sizes = abs(chosen["jacobian"].astype("float64")) * (chosen["input_std"] if scaled else 1)
    scores = getattr(sizes, by)(["output_step", "output", "lag", "feature"], skipna=False)
    expected = greedy(scores.values, np.zeros(50), np.arange(50), 4, 5)
    blocks = {"time": (20, 1, 29), "output_step": 3, "output": 1, "lag": 2, "feature": 2}
    found = query.top(dataset.chunk(blocks), 4, by=by, scaled=scaled, **selection)
    assert found["time"].values.tolist() == expected
    np.testing.assert_allclose(found["score"], scores[expected], rtol=1e-12)
    for name in ("jacobian", "prediction", "input"):
        picks = chosen[name].isel(time=expected)
        np.testing.assert_array_equal(found[name], picks)
        assert found[name].dims == ("rank", *picks.dims[1:])
        assert found[name].dtype == "float32"
        assert found[name].attrs.items() >= picks.attrs.items()
        assert not dask.is_dask_collection(found[name])
    for pick, window in zip(np.arange(4), expected, strict=True):
        one = found.isel(rank=pick)
        at = {dim: one[f"at_{dim}"].item() for dim in ("output_step", "output", "lag", "feature")}
        assert one["peak"] == chosen["jacobian"].isel(time=window).sel(at)
        assert sizes.isel(time=window).sel(at) == sizes.isel(time=window).max()
    assert set(found.coords) == {
        *("rank", "time", "output_step", "output", "lag", "feature", "input_std"),
        *(f"at_{dim}" for dim in ("output_step", "output", "lag", "feature")),
    }


def test_what_is_not_selected_rules_no_window_out():
    dataset = forecast()
    dataset["jacobian"].loc[{"feature": "rain"}] = np.nan
    assert query.top(dataset, features="rain").sizes["rank"] == 0
    assert query.top(dataset, 3, features="heat").sizes["rank"] == 3


def test_where_nothing_is_found_there_are_no_ranks():
    for dataset in (of_scores([np.nan, np.inf], (1, 1), {"a": 2}), forecast(0)):
        found = query.top(dataset)
        assert found["jacobian"].shape[0] == 0
        assert found["jacobian"].ndim == 5
        assert found["score"].shape == found["at_lag"].shape == found["time"].shape == (0,)


def test_a_site_may_stand_in_several_parts_and_without_its_index():
    scores = [5.0, 4.0, 3.0, 5.0, 4.5]
    dataset = of_scores(scores, (2, 3), {"a": 2, "b": 2, "c": 1}, times=pd.date_range("2001", periods=5))
    mixed = dataset.drop_vars("site").assign_coords(site=("time", np.array(["a", "a", "b", "a", "b"], object)))
    found = query.top(mixed, separation=timedelta(days=3))
    assert found["time"].dt.day.values.tolist() == [1, 4, 5]
    assert found["site"].values.tolist() == ["a", "a", "b"]


def test_a_later_pick_may_be_a_shoulder_of_the_same_rise():
    found = query.top(of_scores([1.0, 2.0, 3.0, 9.0, 8.0, 7.0, 6.0, 0.5], (3, 5)), 3, separation=3)
    assert found["score"].values.tolist() == [9.0, 6.0, 1.0]


DAYS = pd.date_range("2001", periods=50)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"count": 0}, "count is refused\n  given    0\n"),
        ({"count": 2.0}, "count is refused\n  given    2.0\n"),
        ({"count": True}, "count is refused"),
        ({"by": "mean"}, "allowed  max, sum"),
        ({"features": ["rain", "hail"]}, "features is refused\n  given    hail\n  allowed  rain, heat, snow\n"),
        ({"features": []}, "features is refused\n  given    none"),
        ({"outputs": "rain"}, "allowed  flow, level"),
        ({"output_steps": 0}, "allowed  1, 2, 3, 4\n"),
        ({"lags": 5}, "lags is refused\n  given    5\n  allowed  4, 3, 2, 1, 0"),
        ({"lags": "3:1"}, "lags is refused\n  given    none"),
        ({"lags": "all"}, "lags is refused"),
        ({"separation": -1}, "separation is refused\n  given    -1"),
        ({"separation": 1.5}, "separation is refused"),
        ({"separation": "3D"}, "a whole number of windows from 0: times here are int64"),
        ({"separation": timedelta(days=-1), "time": DAYS}, 'such as "3D"'),
        ({"separation": "3", "time": DAYS}, "given    '3'"),
        ({"separation": "soon", "time": DAYS}, "given    'soon'"),
        ({"separation": "NaT", "time": DAYS}, "given    'NaT'"),
        ({"separation": "400000D", "time": DAYS}, "292 years"),
        ({"scaled": True, "without": "input_std"}, "the dataset has no input_std"),
    ],
)
def test_what_cannot_be_is_refused(asked, said):
    dataset = forecast()
    asked = dict(asked)
    if "time" in asked:
        dataset = dataset.assign_coords(time=asked.pop("time"))
    if "without" in asked:
        dataset = dataset.drop_vars(asked.pop("without"))
    with pytest.raises(Refused, match=said):
        query.top(dataset, **asked)
