"""`recurrent` as people call it, against what the library tells of windows cut by hand."""

from __future__ import annotations

import csv
import importlib
import io
import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import xarray as xr
from keras import layers

import sensitivity
from sensitivity import plots, recurrent
from sensitivity.checksums import SEAL
from sensitivity.layers import as_graph
from sensitivity.recurrent import Decay, Part, RunLayer, draw_run_gradients, jacobians
from sensitivity.store import JOB, Run, job_seal
from tests.conftest import cut, frame, job_writer, sequential
from tests.jobs.conftest import call

STEPS, UNITS, WINDOWS = 6, 3, 40
MEAN, STD = [0.5, -0.2], [2.0, 0.4]
COLUMNS = ["layer", "direction", "windows", "rate", "half_life", "verdict", "alarms"]
GAP = 20
KNOBS = {"kernel": "batch_jacobian", "windows_per_call": 8}
PNG = b"\x89PNG\r\n"


def net() -> keras.Model:
    first = layers.LSTM(UNITS, return_sequences=True, name="memory")
    return sequential((STEPS, 2), first, layers.Bidirectional(layers.GRU(UNITS), name="both"), layers.Dense(2))


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """XLA takes seconds for each layer, here for forty windows."""
    monkeypatch.setattr(jacobians, "_compiled", as_graph)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """By its first layer, of scaled inputs, 40 windows and 6 that touch a gap; nothing but the run is left."""
    folder = tmp_path_factory.mktemp("recurrent")
    table = frame(WINDOWS + 2 * STEPS - 1)
    table.loc[GAP, "rain"] = np.nan
    file = job_writer(folder)(
        net(),
        table,
        text=f"[series.scaling]\nmean = {MEAN}\nstd = {STD}\n",
        sensitivity={"wrt": "memory", **KNOBS, "experimental_use_pfor": False},
    )
    result = call("run", file, "--serial")
    assert result.exit_code == 0, result.stderr
    for name in ("model.keras", "series.csv"):
        (folder / name).unlink()
    return folder / "run"


@pytest.fixture(scope="module")
def windows() -> np.ndarray:
    """Whole ones, in units of the series."""
    every = cut(frame(WINDOWS + 2 * STEPS - 1)[["rain", "heat"]].to_numpy(), STEPS)
    return np.delete(every, range(GAP - STEPS + 1, GAP + 1), 0)


def require_same(rows: list[dict], windows: np.ndarray, names: tuple[str, ...]) -> None:
    """Rows are those of the library, of windows in units of the series."""
    scaled = ((windows - MEAN) / STD).astype("float32")
    model = net()
    decays = [one for name in names for one in recurrent.jacobian_decay(model, scaled, name, most_windows=len(windows))]
    for row, decay in zip(rows, decays, strict=True):
        assert (row["layer"], row["direction"]) == (decay.layer, decay.direction)
        assert int(row["windows"]) == len(windows)
        assert float(row["rate"]) == pytest.approx(decay.fit.rate, rel=1e-6)
        assert float(row["half_life"]) == pytest.approx(decay.fit.half_life, rel=1e-6)
        assert row["verdict"] == decay.verdict
        assert not row["alarms"]


def test_every_layer_on_windows_cut_by_hand(run, windows):
    result = call("recurrent", run, "--format", "json", "--windows", 2 * WINDOWS)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [list(row) for row in rows] == [COLUMNS] * 3
    assert [row["direction"] for row in rows] == ["forward", "forward", "backward"]
    assert len(windows) == WINDOWS
    require_same(rows, windows, ("memory", "both"))
    assert "|∂(h, c) at the last step / ∂(h, c) at a lag|, spectral norm (memory)" in result.stderr
    assert "|∂h at the last step / ∂h at a lag|, spectral norm (both)" in result.stderr


def test_one_layer_on_a_few_windows_and_its_pictures(run, windows, tmp_path):
    how = ("--layer", "memory", "--windows", 5, "--format", "csv", "-o", tmp_path / "seen")
    result = call("recurrent", run, *how)
    assert result.exit_code == 0, result.stderr
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [list(row) for row in rows] == [COLUMNS]
    require_same(rows, windows[np.linspace(0, WINDOWS - 1, 5).round().astype(int)], ("memory",))
    files = sorted((tmp_path / "seen").iterdir())
    each = ["decay", "heatmap-of-output_0", "histograms", "lines-of-output_0", "matrices"]
    assert [file.name for file in files] == [f"memory-{name}.png" for name in each]
    assert all(file.read_bytes().startswith(PNG) for file in files)
    assert sorted(line for line in result.stderr.splitlines() if "written" in line) == [f"written: {f}" for f in files]


def test_a_run_by_a_layer_draws_its_own_gradients(run):
    layer = RunLayer("memory", (), (), False)
    dataset = sensitivity.open_run(run)
    lines, heatmap = (picture for _, picture in draw_run_gradients(dataset, layer))
    stored = dataset["jacobian"].sel(output="output_0").squeeze("output_step").values[~dataset["skipped"].values]
    assert stored.shape == (WINDOWS, STEPS, UNITS)
    for unit in range(UNITS):
        np.testing.assert_array_equal(lines.axes[unit].lines[0].get_ydata(), stored[0, :, unit])
    np.testing.assert_allclose(heatmap.axes[0].images[0].get_array(), np.abs(stored).mean(0).T, rtol=1e-6)
    assert "∂ output_0" in heatmap.axes[1].get_ylabel()
    assert "∂ output_0" in lines.get_supylabel()


def test_a_layer_that_gives_its_last_step_has_points_of_the_last_output_step():
    values = np.random.default_rng(0).standard_normal((4, 2, 2, 1, 2 * UNITS))
    dims = ("time", "output_step", "output", "source_step", "unit")
    known = {"committed": ("time", np.ones(4, bool)), "skipped": ("time", np.zeros(4, bool))}
    labels = {"output_step": [3, 7], "output": ["flow", "level"], **known}
    dataset = xr.Dataset({"jacobian": (dims, values)}, labels)
    ((what, picture),) = draw_run_gradients(dataset, RunLayer("both", (), (), True))
    assert what == "points of flow, step 7"
    np.testing.assert_array_equal(picture.axes[1].lines[2].get_ydata(), values[2, 1, 0, 0, UNITS:])


def test_what_is_not_computed_yet_is_not_drawn(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    for record in (tmp_path / "run" / "commits").iterdir():
        record.unlink()
    monkeypatch.setattr(plots, "save", lambda picture, file: file.touch())
    result = call("recurrent", tmp_path / "run", "--layer", "memory", "-o", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "gradients by memory are not drawn" in result.stderr
    assert sorted(file.name for file in tmp_path.glob("*.png")) == [
        f"memory-{name}.png" for name in ("decay", "histograms", "matrices")
    ]
    assert "vanishing" in result.stdout


def test_what_is_not_finite_is_alarming(run, monkeypatch):
    logs = np.array([[0.0, -1.0], [np.nan, 0.0]])
    decay = Decay("memory", "forward", "|J|", "norm", logs, 2)
    spoiled = Part("memory", "forward", "kernel", "f", np.array([[1.0, np.nan], [np.inf, 2.0]]))
    sound = Part("memory", "forward", "kernel", "i", np.ones((2, 2)))
    layer = RunLayer("memory", (decay,), (sound, spoiled), False)
    monkeypatch.setattr(recurrent, "of_run", lambda *_, **__: (layer,))
    result = call("recurrent", run, "--format", "json")
    (row,) = json.loads(result.stdout)
    assert "in 1 of 2 windows" in row["alarms"]
    assert "1 NaN and 1 infinite of 8 numbers, weights of gate f" in row["alarms"]
    assert "NOT FINITE: 1 NaN and 1 infinite of 4 numbers: weight of memory, kernel, gate f" in result.stderr
    lost = RunLayer("memory", (Decay("memory", "forward", "|J|", "norm", logs[1:], 1),), (sound,), False)
    assert (lost.rows[0]["rate"], lost.rows[0]["half_life"]) == (None, None)


def refused(*arguments: object) -> str:
    result = call("recurrent", *arguments)
    assert result.exit_code == 2, result.output
    assert all(f"\n  {word} " in result.stderr for word in ("given", "allowed", "do"))
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layer", "dense"], "memory, both"),
        (["--layer", "memory", "--layer", "nowhere"], "given    nowhere"),
        (["--windows", 0], "windows is refused"),
        (["--windows", -3], "1 or more"),
        (["-o", "{file}"], "choose another name"),
        (["-o", "{file}/no/where"], "make the directory"),
        (["-o", "/proc/pictures"], "that can be written to"),
    ],
)
def test_what_cannot_be_told_is_refused(run, arguments, said):
    assert said in refused(run, *(str(one).format(file=run / JOB) for one in arguments))


def test_a_run_with_nothing_whole_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    content = Run.open(run).content
    content["survey"]["missing"] = [[0, content["survey"]["steps"]]]
    (tmp_path / "run" / JOB).write_text(json.dumps({**content, SEAL: job_seal(content)}))
    assert "of whose 46 windows none is without a missing value" in refused(tmp_path / "run")


def test_a_layer_that_cannot_be_told_of_costs_no_other(write_job, tmp_path):
    source, again = keras.Input((STEPS, 2)), layers.GRU(UNITS, return_sequences=True, name="twice")
    model = keras.Model(source, layers.Dense(1)(layers.LSTM(UNITS, name="once")(again(layers.Dense(2)(again(source))))))
    assert call("run", write_job(model, frame(20), sensitivity=KNOBS), "--serial").exit_code == 0
    result = call("recurrent", tmp_path / "run", "--format", "json", "-o", tmp_path / "seen")
    assert result.exit_code == 0, result.stderr
    twice, once = json.loads(result.stdout)
    assert (twice["layer"], once["layer"]) == ("twice", "once")
    assert "not told: twice, with 2 calls" in twice["alarms"]
    assert twice["verdict"] is None
    assert once["verdict"]
    assert {file.name for file in (tmp_path / "seen").iterdir()} >= {"twice-matrices.png", "once-decay.png"}
    assert "2 calls" in refused(tmp_path / "run", "--layer", "twice")


def test_gradients_that_are_drawn_are_bounded(run, monkeypatch):
    module = importlib.import_module("sensitivity.recurrent.of_run")  # whose name is that of its function
    monkeypatch.setattr(module, "DRAWN_BYTES", 7 * STEPS * UNITS * 4)
    seen, stored = [], module.stored
    monkeypatch.setattr(module, "stored", lambda *given, **how: seen.append(stored(*given, **how)) or seen[-1])
    list(draw_run_gradients(sensitivity.open_run(run), RunLayer("memory", (), (), False)))
    assert seen[0].shape == (7, STEPS, UNITS)


def test_a_changed_series_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    copied = next(file for file in (tmp_path / "run/series.zarr/series").rglob("c/**/*") if file.is_file())
    copied.write_bytes(copied.read_bytes()[:-1] + b"?")
    assert "copy of the series is damaged" in refused(tmp_path / "run")


def test_a_model_without_recurrent_layers_or_with_code_is_refused(write_job, tmp_path):
    coded = layers.Lambda(lambda inputs: 2 * inputs, output_shape=(12,))
    model = sequential((STEPS, 2), layers.Flatten(), coded, layers.Dense(1))
    assert call("run", write_job(model, frame(20), sensitivity=KNOBS), "--serial", "--trust-model").exit_code == 0
    assert "--trust-model" in refused(tmp_path / "run")
    assert "no recurrent layer" in refused(tmp_path / "run", "--trust-model")


def test_a_saved_model_is_refused(write_job, tmp_path):
    sequential((STEPS, 2), layers.Flatten(), layers.Dense(1)).export(tmp_path / "saved", verbose=False)
    assert call("run", write_job({"path": "saved"}, frame(20), sensitivity=KNOBS), "--serial").exit_code == 0
    assert "has no layers" in refused(tmp_path / "run")
