"""Every product as a job: its numbers in units of the series, its labels, and that kills lose nothing of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import xarray as xr
from keras import layers

import sensitivity
from jobs.driver import How, resume, run_job
from jobs.prepare import prepare
from sensitivity import query, recurrent
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.loading import cast
from sensitivity.store import Run
from tests.chaos.harness import HOOKS, ROOT, records, store
from tests.conftest import cut, frame, sequential, worst
from tests.jobs.conftest import PATIENCE

STEPS, LENGTH = 69, 6  # 64 windows
MEAN, STD = np.array([0.5, -1.0]), np.array([2.0, 0.5])
ASKED = {
    "jacobian": {"wrt": "inner"},
    "vjp": {"vectors": ["sum", "mean", "last"]},
    "jvp": {"directions": ["heat", "rain"]},
    "hessian": {},
    "hvp": {},
    "gradient_norm": {},
    "gram": {},
    "integrated_gradients": {"baseline": "mean"},
    "smooth_gradients": {"samples": 4, "seed": 3},
    "expected_gradients": {"samples": 5},
}
KILLED = {
    **ASKED,
    "vjp": {"wrt": "depth", "vectors": ["sum", "mean"]},
    "hessian": {"of": "loss", "loss": "mean_squared_error"},
    "gradient_norm": {"wrt": "weights:inner"},
}
POINTS = ["before data", "mid chunk", "amid data", "after data", "after sync", "before record", "mid record"]


def net() -> keras.Model:
    return sequential(
        (LENGTH, 2), layers.LSTM(3, return_sequences=True, name="inner"), layers.Flatten(), layers.Dense(2, "tanh")
    )


def two_inputs() -> keras.Model:
    rain, depth = keras.Input((LENGTH, 1), name="rain"), keras.Input((1,), name="depth")
    return keras.Model([rain, depth], layers.Dense(2)(layers.Concatenate()([layers.GRU(3)(rain), depth])))


def series():
    table = frame(STEPS)
    table.loc[20, "rain"] = np.nan
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("products")


@pytest.fixture
def make(write_job):
    def made(product: str, path: str = "", **more) -> Path:
        return write_job(
            net(),
            series(),
            text=f"[series.scaling]\nmean = {MEAN.tolist()}\nstd = {STD.tolist()}\n",
            sensitivity={"product": product, **ASKED[product], **more},
            run={"path": f"runs/{path or product}", "shard_windows": 16},
        )

    return made


class Exact:
    """The model in units of the series, by float64 tapes."""

    def __init__(self) -> None:
        self.model = cast(net(), "float64")
        windows = cut(series()[["rain", "heat"]].to_numpy(), LENGTH)
        self.whole = np.isfinite(windows).all((1, 2))
        self.windows = windows[self.whole]

    def call(self, windows: tf.Tensor) -> tf.Tensor:
        return self.model((windows - MEAN) / STD)

    def jacobian(self, windows: np.ndarray) -> np.ndarray:
        source = tf.constant(windows)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(source)
            found = self.call(source)
        return tape.batch_jacobian(found, source, experimental_use_pfor=False).numpy()

    def by_inner(self, windows: np.ndarray) -> np.ndarray:
        given = tf.constant((windows - MEAN) / STD)
        with tf.GradientTape(persistent=True) as tape:
            inner = self.model.layers[0](given)
            tape.watch(inner)
            found = self.model.layers[2](self.model.layers[1](inner))
        return tape.batch_jacobian(found, inner, experimental_use_pfor=False).numpy()

    def hessian(self, windows: np.ndarray) -> np.ndarray:
        steps = 1e-5 * np.eye(12).reshape(12, 1, LENGTH, 2)
        ahead, behind = (
            self.jacobian((windows + sign * steps).reshape(-1, LENGTH, 2)).reshape(12, len(windows), -1)
            for sign in (1, -1)
        )
        rows = ((ahead - behind) / 2e-5).reshape(LENGTH, 2, len(windows), 2, LENGTH, 2)
        return np.einsum("lfnomg->nolfmg", rows)


@pytest.fixture(scope="module")
def exact() -> Exact:
    return Exact()


def expected(exact: Exact, product: str, found: xr.Dataset) -> np.ndarray | None:
    """`(window, …)` of the whole windows, as stored; None where there is no closed form."""
    windows = exact.windows
    if product == "jacobian":
        return exact.by_inner(windows)[:, None]
    rows = exact.jacobian(windows)
    if product == "hessian":
        return exact.hessian(windows)[:, None]
    if product == "hvp":
        return np.einsum("nolfmg->noglf", exact.hessian(windows))[:, None]
    if product == "vjp":
        return np.stack([rows.sum(1), rows.mean(1), rows.sum(1)], 1)
    if product == "jvp":
        return rows.sum(2)[:, None, :, ::-1]
    if product == "gradient_norm":
        return np.sqrt((rows**2).sum((-1, -2)))[:, None]
    if product == "gram":
        return np.einsum("nolf,nplf->nop", rows, rows)[:, None, :, None]
    if product == "smooth_gradients":
        noise = found["noise"].values * STD
        return np.mean([exact.jacobian(windows + one) for one in noise], 0)[:, None]
    return None


@pytest.mark.parametrize("product", ASKED)
def test_a_store_has_the_products_numbers_and_labels(make, product, exact):
    summary = run_job(Job.load(make(product)), How(serial=True))
    assert summary.complete
    found = xr.open_zarr(Path(str(summary.run.place)) / "results.zarr").load()
    values = found[product].values
    assert np.isnan(values[~exact.whole]).all()
    values = values[exact.whole]
    reference = expected(exact, product, found)
    if reference is not None:
        assert values.shape == reference.shape
        assert worst(values, reference) < 1e-5
    else:
        sums = values.sum((-1, -2))[:, 0]
        base = np.broadcast_to(np.nanmean(series()[["rain", "heat"]].to_numpy(), 0), exact.windows.shape)
        if product == "expected_gradients":
            base = found["baselines"].values * STD + MEAN
        change = exact.call(exact.windows).numpy() - exact.call(base).numpy().mean(0)
        near = 0.01 if product == "integrated_gradients" else 0.5  # five baselines are few
        assert np.abs(sums - change).max() < near * np.abs(change).max()
    assert worst(found["prediction"].values[exact.whole][:, 0], exact.call(exact.windows).numpy()) < 1e-5
    for dim in found[product].dims:
        assert dim in found.coords
    opened = sensitivity.open_run(str(summary.run.place))
    assert opened.attrs.get("product", "jacobian") == product
    mean = query.ask(opened, ["mean"])["mean"]["mean"]
    inside = [dim for dim in found[product].dims if dim != "time"]
    assert worst(mean.transpose(*inside).values.astype(float), values.mean(0, dtype="float64")) < 1e-5


GO_ON = "import sys; from jobs.driver import How, resume\nfor run in sys.argv[1:]:\n    resume(run, How(serial=True))"


@pytest.fixture
def killed(make, write_job):
    """The job of a product, some of them of a loss, by weights or by one of two inputs."""

    def job(product: str) -> Path:
        run = {"path": f"runs/{product}", "shard_windows": 16}
        if KILLED[product].get("wrt") == "depth":
            text = '[model.inputs]\nrain = ["rain"]\ndepth = ["heat"]\n'
            return write_job(two_inputs(), series(), text, sensitivity={"product": product, **KILLED[product]}, run=run)
        if KILLED[product].get("of") == "loss":
            labels = {"features": ["rain", "heat"], "labels": ["rain", "heat"]}
            return write_job(net(), labels, sensitivity={"product": product, **KILLED[product]}, run=run)
        return make(product, **KILLED[product])

    return job


def test_every_product_ends_as_if_undisturbed_however_often_it_is_killed(killed, tmp_path):
    """In each run one process dies once; the next goes on, and dies in the next run."""
    runs = []
    for product in KILLED:
        run = Path(str(prepare(Job.load(killed(product))).open_or_create().place))
        shutil.copytree(run, tmp_path / "undisturbed" / product)
        assert resume(tmp_path / "undisturbed" / product, How(serial=True)).complete
        runs.append(run)
    plan = tmp_path / "plan"
    plan.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOOKS), str(ROOT)]), "CHAOS_DIR": str(plan)}
    seen: dict[Path, dict[str, bytes]] = {run: {} for run in runs}
    for number, run in enumerate([*runs, None]):
        if run is not None:
            (plan / f"{number:03d} {POINTS[number % len(POINTS)]}").touch()
        at_work = runs[max(0, number - 1) : number + 1] if run is not None else runs
        ended = subprocess.run(
            [sys.executable, "-c", GO_ON, *map(str, at_work)], env=environment, timeout=PATIENCE, capture_output=True
        )
        assert ended.returncode == (0 if run is None else -signal.SIGKILL), ended.stderr.decode()
        for one in runs:
            after = records(one)
            assert {name: after.get(name) for name in seen[one]} == seen[one], "a committed shard was computed again"
            seen[one] = after
    for run in runs:
        assert store(run) == store(tmp_path / "undisturbed" / run.name), run.name


def test_what_a_run_keeps_of_its_product_is_watched(make):
    summary = run_job(Job.load(make("vjp")), How(serial=True))
    home = Path(str(summary.run.place))
    content = (home / "product.npz").read_bytes()
    for spoil in ((home / "product.npz").unlink, lambda: (home / "product.npz").write_bytes(content[:-9])):
        spoil()
        with pytest.raises(Refused, match=r"product\.npz"):
            _ = Run.open(home).product
    (home / "product.npz").write_bytes(content)
    again = run_job(Job.load(make("vjp")), How(serial=True))
    assert again.complete
    with pytest.raises(Refused, match="arrays"):
        run_job(Job.load(make("vjp", vectors=["last"])), How(serial=True))
    with pytest.raises(Refused, match="the job none"):
        run_job(Job.load(make("jacobian", wrt="input", path="vjp")), How(serial=True))


@pytest.mark.parametrize(
    ("product", "more", "what"),
    [
        ("jvp", {"directions": ["snow"]}, r"directions[\s\S]*snow[\s\S]*rain, heat"),
        ("hvp", {"wrt": "inner"}, r"directions[\s\S]*npy"),
        ("vjp", {"vectors": "nowhere.npy"}, r"vectors[\s\S]*nowhere"),
        ("integrated_gradients", {"baseline": 10_000}, r"baseline[\s\S]*10,000"),
        ("integrated_gradients", {"baseline": 20}, "baseline"),
        ("smooth_gradients", {"wrt": "inner"}, "wrt"),
        ("jacobian", {"wrt": "outer"}, r"wrt[\s\S]*inner"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_written(make, tmp_path, product, more, what):
    with pytest.raises(Refused, match=what):
        run_job(Job.load(make(product, **more)), How(serial=True))
    assert not list((tmp_path / "runs").glob("*/job.json"))


def test_a_window_of_the_series_is_a_baseline_the_first_one_too(make, exact):
    prepared = prepare(Job.load(make("integrated_gradients", baseline=0)))
    assert worst(prepared.product.baseline * STD + MEAN, exact.windows[0]) < 1e-6


@pytest.mark.parametrize("product", ["integrated_gradients", "smooth_gradients", "expected_gradients"])
def test_of_a_model_with_flat_windows_attributions_are_those_of_lagged_ones(write_job, tmp_path, product):
    found = []
    for shape in ((LENGTH, 1), (LENGTH,)):
        model = sequential(shape, layers.Flatten(), layers.Dense(LENGTH, "tanh"))
        file = write_job(
            model,
            frame(20, ("rain",)),
            sensitivity={"product": product},
            windows={"length": LENGTH},
            run={"path": f"runs/{len(shape)}"},
        )
        summary = run_job(Job.load(file), How(serial=True))
        found.append(xr.open_zarr(Path(str(summary.run.place)) / "results.zarr")[product].values)
    assert worst(found[1], found[0]) < 1e-5


def test_arrays_come_from_files_in_units_of_the_series(make, tmp_path, exact):
    directions = np.random.default_rng(0).standard_normal((3, LENGTH, 2))
    np.save(tmp_path / "directions.npy", directions)
    summary = run_job(Job.load(make("jvp", directions="directions.npy")), How(serial=True))
    found = xr.open_zarr(Path(str(summary.run.place)) / "results.zarr")["jvp"].values[exact.whole][:, 0]
    assert worst(found, np.einsum("nolf,klf->nok", exact.jacobian(exact.windows), directions)) < 1e-5


def test_gradients_of_a_run_by_a_layer_are_drawn(make, exact):
    """Of the windows that are computed, by step and unit."""
    run = run_job(Job.load(make("jacobian", "drawn")), How(serial=True)).run
    dataset = sensitivity.open_run(str(run.place))
    gradients = recurrent.stored(dataset, output="output_1")
    assert worst(gradients, exact.by_inner(exact.windows)[:, 1]) < 1e-5
    assert len(recurrent.stored(dataset, output="output_0", most_windows=7)) == 7
    (decay,) = recurrent.gradient_decay(gradients, layer="inner")
    assert decay.lost == 0
    assert recurrent.draw_heatmap(gradients)._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(Refused, match="output_0, output_1"):
        recurrent.stored(dataset)
    with pytest.raises(Refused, match="wrt"):
        recurrent.stored(dataset.rename(unit="feature"))
