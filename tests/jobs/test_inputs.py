"""Jobs of models with several inputs, and of losses: every window of a panel with gaps against float64 tapes."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import xarray as xr
from keras import layers

import sensitivity
from jobs.describe import described
from jobs.driver import How, resume, run_job
from jobs.prepare import prepare
from sensitivity import query, recurrent
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.loading import cast
from sensitivity.store import Run
from tests.conftest import worst
from tests.jobs.conftest import call

STEPS, LENGTH, LEAD = 40, 5, 2
MEAN, STD = np.array([0.5, -1.0, 2.0]), np.array([2.0, 0.5, 4.0])
AREA = {"north": 3.0, "south": 1.0, "tiny": 5.0}
CLOSE = 1e-5


def net() -> keras.Model:
    weather, site = keras.Input((LENGTH, 2), name="weather"), keras.Input((1,), name="site")
    states = layers.LSTM(3, return_sequences=True)(weather)
    both = layers.Concatenate()([states, layers.RepeatVector(LENGTH)(site)])
    model = keras.Model([weather, site], layers.Dense(2)(layers.GRU(3)(both)))
    random = np.random.default_rng(1)
    model.set_weights([random.uniform(-0.5, 0.5, weight.shape) for weight in model.get_weights()])
    return model


@pytest.fixture(scope="module")
def panel() -> xr.Dataset:
    """Three sites, one of them without any label; `area` once a site."""
    random = np.random.default_rng(2)
    names = ["rain", "heat", "flow", "level", "trust"]
    values = {name: (("site", "time"), random.standard_normal((3, STEPS))) for name in names}
    values["rain"][1][0, 7] = np.nan
    values["flow"][1][1, 20:23] = np.nan
    values["level"][1][2] = np.nan
    values["trust"] = (("site", "time"), random.random((3, STEPS)))
    values["trust"][1][0, 30] = np.nan
    values["area"] = (("site",), np.array(list(AREA.values())))
    labels = {"site": list(AREA), "time": pd.date_range("2020-01-01", periods=STEPS)}
    return xr.Dataset(values, labels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, panel) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    net().save(folder / "model.keras")
    panel.to_netcdf(folder / "panel.nc")
    table = panel.to_dataframe().reset_index().sort_values(["site", "time"])
    table.to_csv(folder / "panel.csv", index=False)
    return folder


def job(folder: Path, path: str, series: str = "panel.nc", of_loss: dict | None = None, **asked) -> Job:
    """of_loss: what of the series a loss takes."""
    content = {
        "model": {"path": "model.keras", "inputs": {"weather": ["rain", "heat"], "site": ["area"]}},
        "series": {
            "path": series,
            "time": "time",
            "scaling": {"mean": MEAN.tolist(), "std": STD.tolist()},
            **(of_loss or {}),
        },
        "sensitivity": asked,
        "run": {"path": path, "shard_windows": 40},
    }
    return Job.parse(content, folder)


LOSS = {
    "labels": ["flow", "level"],
    "weights": "trust",
    "label_scaling": {"mean": [0.1, 0.2], "std": [2.0, 3.0]},
}


Expected = dict[tuple[str, np.datetime64], tuple[np.ndarray, np.ndarray, float]]


@pytest.fixture(scope="module")
def of_outputs(panel) -> Expected:
    return by_hand(panel, of_loss=False)


@pytest.fixture(scope="module")
def of_loss(panel) -> Expected:
    return by_hand(panel, of_loss=True)


def by_hand(panel: xr.Dataset, of_loss: bool) -> Expected:
    """Of each window that is whole, by site and time: derivatives by the weather and by the site, and the loss."""
    stamps, rows = [], []
    for site in AREA:
        own = panel.sel(site=site)
        weather = np.stack([own[name].values for name in ("rain", "heat")], 1)
        labels = (np.stack([own[name].values for name in ("flow", "level")], 1) - [0.1, 0.2]) / [2.0, 3.0]
        for last in range(LENGTH - 1, STEPS):
            window, at = weather[last - LENGTH + 1 : last + 1], last + LEAD
            known = at < STEPS and np.isfinite([*labels[at], own["trust"].values[at]]).all()
            if not np.isfinite(window).all() or (of_loss and not known):
                continue
            stamps.append((site, own["time"].values[last]))
            beside = (labels[at], own["trust"].values[at]) if known else (np.zeros(2), 0.0)
            rows.append((window, [float(own["area"])], *beside))
    weather, area, labels, trust = (tf.constant(np.array(part, "float64")) for part in zip(*rows, strict=True))
    model = cast(net(), "float64")
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([weather, area])
        outputs = model([(weather - MEAN[:2]) / STD[:2], (area - MEAN[2]) / STD[2]])
        if of_loss:
            outputs = trust[:, None] * tf.reduce_mean((outputs - labels) ** 2, 1, keepdims=True)
    found = [tape.batch_jacobian(outputs, each, experimental_use_pfor=False).numpy() for each in (weather, area)]
    return {stamp: (found[0][i], found[1][i], float(outputs[i, 0])) for i, stamp in enumerate(stamps)}


def require_all(dataset: xr.Dataset, expected: dict, which: int) -> None:
    """Those windows were computed that could be, and each as expected."""
    stamps = list(zip(map(str, dataset["site"].values), dataset["time"].values, strict=True))
    assert {stamp for stamp, skipped in zip(stamps, dataset["skipped"].values, strict=True) if not skipped} == set(
        expected
    )
    places = [number for number, stamp in enumerate(stamps) if stamp in expected]
    found = dataset["jacobian"].values[places, 0]
    known = np.stack([expected[stamps[number]][which] for number in places]).reshape(found.shape)
    assert worst(found, known) < CLOSE
    predicted = dataset["prediction"].values[places, 0, 0]
    assert worst(predicted, np.array([expected[stamps[number]][2] for number in places])) < CLOSE


@pytest.mark.parametrize(
    ("wrt", "series", "which", "lags"),
    [("weather", "panel.nc", 0, [4, 3, 2, 1, 0]), ("site", "panel.csv", 1, [0])],
)
def test_by_one_input(folder, of_outputs, wrt, series, which, lags):
    run = run_job(job(folder, f"runs/{wrt}", series, wrt=wrt), How(serial=True)).run
    found = sensitivity.open_run(run.place)
    assert found["feature"].values.tolist() == [["rain", "heat"], ["area"]][which]
    assert found["lag"].values.tolist() == lags
    require_all(found, of_outputs, which)


def test_by_all_inputs(folder, of_outputs):
    """What is read at the last step alone has no derivative before."""
    run = run_job(job(folder, "runs/all"), How(serial=True)).run
    found = sensitivity.open_run(run.place)
    expected = {
        stamp: (np.concatenate([weather, np.pad(site[:, None], ((0, 0), (LENGTH - 1, 0), (0, 0)))], -1), site, value)
        for stamp, (weather, site, value) in of_outputs.items()
    }
    require_all(found, expected, 0)


def test_a_loss_by_what_a_site_is(folder, of_loss):
    mine = job(folder, "runs/site-loss", of_loss=LOSS, of="loss", loss="mean_squared_error", lead=LEAD, wrt="site")
    prepared = prepare(mine)
    assert "mean_squared_error of flow, level, weighted by trust" in described(prepared)
    assert prepared.audit is not None
    assert prepared.audit.difference_error is not None
    assert prepared.audit.difference_error < 1e-4
    found = sensitivity.open_run(run_job(mine, How(serial=True)).run.place)
    assert found["output"].values.tolist() == ["loss"]
    require_all(found, of_loss, 1)
    answer = query.importance(found).compute()
    assert np.isfinite(answer["importance"]).all()


ASKED = {"of": "loss", "loss": "mse", "wrt": "weather"}


@pytest.fixture(scope="module")
def by_weather(folder) -> Run:
    """A loss's run, of a series that is copied into it."""
    return run_job(job(folder, "runs/mine", "panel.csv", LOSS, lead=LEAD, **ASKED), How(serial=True)).run


def test_a_loss_by_the_weather(by_weather, of_loss):
    require_all(sensitivity.open_run(by_weather.place), of_loss, 0)


def test_its_report_has_the_features_alone(by_weather, tmp_path):
    found = call("report", str(by_weather.place), "-o", str(tmp_path / "report.html"))
    assert found.exit_code == 0, found.stderr
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", (tmp_path / "report.html").read_text())
    assert "rain" in cells
    assert "flow" not in cells


def test_recurrent_layers_are_given_every_input(by_weather, panel, of_loss):
    weather = np.stack([panel[name].values for name in ("rain", "heat")], -1)
    sites, times = list(AREA), list(panel["time"].values)
    found = [(sites.index(site), times.index(time)) for site, time in of_loss]
    windows = np.stack([weather[site, last - LENGTH + 1 : last + 1] for site, last in found])
    area = np.array([[AREA[sites[site]]] for site, _ in found])
    given = {"weather": (windows - MEAN[:2]) / STD[:2], "site": (area - MEAN[2]) / STD[2]}
    model = cast(net(), "float64")
    for layer, name in zip(recurrent.of_run(by_weather, windows=len(found)), recurrent.layers(model), strict=True):
        (expected,) = recurrent.jacobian_decay(model, given, name, most_windows=len(found))
        np.testing.assert_allclose(layer.decays[0].log_norms, expected.log_norms, atol=1e-4)


def test_a_lost_shard_of_a_loss_is_computed_again(folder, by_weather):
    before = {file: file.read_bytes() for file in chunks(folder / "runs/mine")}
    (folder / "runs/mine/commits/00000001.json").unlink()
    assert resume(folder / "runs/mine", How(serial=True)).computed > 0
    assert before == {file: file.read_bytes() for file in chunks(folder / "runs/mine")}


def chunks(path: Path) -> list[Path]:
    return sorted(file for file in (path / "results.zarr/jacobian").iterdir() if file.name.startswith("c."))


@pytest.mark.parametrize(
    ("beside", "asked", "said"),
    [
        (LOSS, {"lead": 1, **ASKED}, r"sensitivity\.lead"),
        ({**LOSS, "weights": None}, {"lead": LEAD, **ASKED}, r"series\.weights"),
        ({**LOSS, "labels": ["level", "flow"]}, {"lead": LEAD, **ASKED}, r"series\.labels"),
        (LOSS, {"lead": LEAD, **ASKED, "loss": "mae"}, r"sensitivity\.loss"),
        ({**LOSS, "labels": ["flow"], "label_scaling": None}, {**ASKED, "outputs": [1]}, r"sensitivity\.outputs"),
        (None, {"wrt": "weather"}, r"sensitivity\.of"),
    ],
)
def test_other_labels_are_another_job(folder, by_weather, beside, asked, said):
    with pytest.raises(Refused, match=said):
        run_job(job(folder, "runs/mine", "panel.csv", beside, **asked), How(serial=True))


def test_attributions_by_one_input(folder, panel):
    """From the mean: the other input, and its scaling, stay."""
    asked = {"product": "integrated_gradients", "baseline": "mean", "wrt": "site"}
    run = run_job(job(folder, "runs/attributed", **asked), How(serial=True)).run
    found = sensitivity.open_run(run.place)
    model, whole = cast(net(), "float64"), ~found["skipped"].values
    assert float(found["completeness_error"].max()) <= 0.01
    added = found["integrated_gradients"].sum(("lag", "feature"), min_count=1).values[whole, 0]
    for number in np.flatnonzero(whole)[::9]:
        own = panel.sel(site=str(found["site"].values[number]))
        last = int(np.flatnonzero(own["time"].values == found["time"].values[number])[0])
        names = ("rain", "heat", "area")
        window = np.stack([np.broadcast_to(own[name].values, STEPS)[last - LENGTH + 1 : last + 1] for name in names], 1)
        base = window.copy()
        base[:, 2] = np.mean(list(AREA.values()))
        there, from_base = ((each - MEAN) / STD for each in (window, base))
        change = [model([each[None, :, :2], each[None, -1, 2:]]).numpy()[0] for each in (there, from_base)]
        place = int(whole[:number].sum())
        np.testing.assert_allclose(added[place], change[0] - change[1], atol=0.011 * np.abs(change).max())


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"weather": ["rain", "heat"]}, "model.inputs"),
        ({"weather": ["rain", "heat"], "site": ["rain"]}, "more than once"),
        ({"weather": ["rain"], "site": ["area"]}, "weather"),
        ({"weather": ["rain", "heat"], "site": ["nowhere"]}, r"model\.inputs[\s\S]*nowhere"),
        ({"weather": ["rain", "heat"], "site": ["time"]}, r"model\.inputs"),
        ({"weather": ["rain", "heat"], "place": ["area"]}, "place"),
        (None, "model.inputs"),
    ],
)
def test_columns_that_do_not_fit_are_refused(folder, inputs, said):
    content = {
        "model": {"path": "model.keras", "inputs": inputs},
        "series": {"path": "panel.nc", "time": "time"},
        "run": {"path": "refused"},
    }
    with pytest.raises(Refused, match=said):
        prepare(Job.parse(content, folder))
    assert not (folder / "refused").exists()


@pytest.mark.parametrize(("column", "scaled"), [("area", False), ("rain", False), ("kind", True)])
def test_an_input_of_whole_numbers_is_not_rounded(folder, panel, column, scaled):
    """`area` is whole at every site here, so it is the only one that may be taken, unscaled."""
    weather, kind = keras.Input((LENGTH, 1), name="weather"), keras.Input((1,), dtype="int32", name="kind")
    embedded = layers.Flatten()(layers.Embedding(6, 2)(kind))
    keras.Model([weather, kind], layers.Dense(1)(layers.Concatenate()([layers.Flatten()(weather), embedded]))).save(
        folder / "kinds.keras"
    )
    panel.assign(kind=panel["area"]).to_netcdf(folder / "kinds.nc")
    series = {"path": "kinds.nc", "time": "time"}
    content = {
        "model": {"path": "kinds.keras", "inputs": {"weather": ["heat"], "kind": [column]}},
        "series": {**series, **({"scaling": {"mean": [0.0, 1.0], "std": [1.0, 1.0]}} if scaled else {})},
        "sensitivity": {"wrt": "weather"},
        "run": {"path": "kinds"},
    }
    mine = Job.parse(content, folder)
    if column == "area":
        assert prepare(mine).plan.layout.windows == 3 * (STEPS - LENGTH + 1)
        return
    with pytest.raises(Refused, match=r"model\.inputs\.kind"):
        prepare(mine)


BASINS = '''
import keras
from keras import layers


class Basins(keras.Model):
    """It declares no inputs, and no file can hold it."""

    def __init__(self, lock):
        super().__init__()
        self.states, self.read = layers.LSTM(3), layers.Dense(1)

    def call(self, inputs):
        return self.read(keras.ops.concatenate([self.states(inputs["weather"]), inputs["site"][:, -1]], -1))


def make():
    keras.utils.set_random_seed(3)
    return Basins(object())
'''


def test_a_model_of_a_function_that_declares_no_inputs(folder, panel):
    (folder / "basins.py").write_text(BASINS)
    content = {
        "model": {"path": "basins:make", "inputs": {"weather": ["rain", "heat"], "site": ["area"]}},
        "series": {"path": "panel.nc", "time": "time", "labels": ["trust"]},
        "windows": {"length": LENGTH},
        "sensitivity": {"of": "loss", "loss": "mse", "wrt": "site"},
        "run": {"path": "runs/function"},
    }
    run = run_job(Job.parse(content, folder), How(serial=True)).run
    assert (folder / "runs/function/model.weights.h5").exists()
    found = sensitivity.open_run(run.place)
    whole = ~found["skipped"].values
    places = np.flatnonzero(whole)
    rows, labels = [], []
    for number in places:
        own = panel.sel(site=str(found["site"].values[number]))
        last = int(np.flatnonzero(own["time"].values == found["time"].values[number])[0])
        weather = np.stack([own["rain"].values, own["heat"].values], 1)[last - LENGTH + 1 : last + 1]
        rows.append((weather, np.full((LENGTH, 1), float(own["area"]))))
        labels.append(own["trust"].values[last])
    given = dict(zip(("weather", "site"), map(np.stack, zip(*rows, strict=True)), strict=True))
    import basins

    beside = {"of": "loss", "labels": np.array(labels), "loss": "mse"}
    expected = sensitivity.jacobian(basins.make(), given, wrt="site", **beside)
    assert worst(found["jacobian"].values[places, 0, 0], expected) < CLOSE
