"""Shared by all tests: small models and series, one Ray session, one compiled run."""

from __future__ import annotations

import gc
import os
import re
from importlib.metadata import version

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("SENSITIVITY_PATIENCE", "30")  # seconds with a store that fails, on a busy machine
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve its workers beside the other tests

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pandas as pd
import pytest

hypothesis.settings.register_profile("unhurried", deadline=None)  # other processes may be in the way
hypothesis.settings.load_profile("unhurried")

FEATURES = ("rain", "heat")
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
)


def pytest_configure() -> None:
    """What is compiled by XLA runs a few times on small arrays: compiling fast is what counts.

    An XLA that does not know a flag ends the process, so others than these compile as always.
    """
    if version("tensorflow").startswith("2.21."):
        os.environ.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)


def pytest_collection_finish() -> None:
    """Garbage is looked for in what tests make, not in what is imported."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the two processes that tests run in, those that need a Ray session share one; others that run jobs stay
    together by file, for what the file's tests share.
    """
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif "jobs" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.fixture(autouse=True, scope="session")
def hasty():
    """Trials take no longer than the work is worth: the first setting that runs is taken, timed by two calls."""
    from sensitivity import tuning

    before, tuning.LEAST_SECONDS, tuning.TRIAL_SECONDS = (tuning.LEAST_SECONDS, tuning.TRIAL_SECONDS), 0.0, 0.0
    yield
    tuning.LEAST_SECONDS, tuning.TRIAL_SECONDS = before


@pytest.fixture(scope="session")
def ray_session(s3_server):
    """A local Ray with two logical GPUs that every test shares; runs started meanwhile use it and leave it open.

    Its workers know the S3 server.
    """
    import ray

    os.environ.update(s3_server.environment)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    often = {"metrics_report_interval_ms": 1000}
    ray.init(address="local", num_cpus=2, num_gpus=2, _system_config=often, **quiet)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server on loopback that every test of a process shares."""
    from tests.s3 import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch, request):
    """The server, known to the environment; `s3.home` is a URL of this test's own."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.home = f"s3://bucket/{re.sub(r'[^A-Za-z0-9]+', '-', request.node.name)}"
    return s3_server


@pytest.fixture(params=["folder", "s3"])
def home(request, tmp_path):
    """A place of each kind: what holds for one holds for the other."""
    from sensitivity.addresses import place_at

    return place_at(tmp_path / "home" if request.param == "folder" else request.getfixturevalue("s3").home)


def frame(steps: int, features: tuple[str, ...] = FEATURES, seed: int = 0) -> pd.DataFrame:
    """An hourly series of random values."""
    values = np.random.default_rng(seed).standard_normal((steps, len(features)))
    table = pd.DataFrame(values, columns=list(features))
    table.insert(0, "time", pd.date_range("2020-01-01", periods=steps, freq="h"))
    return table


def in_training(layer: Any):
    """A layer that calls another one in training, whatever mode it is called in itself."""
    import keras

    class InTraining(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def call(self, inputs):
            return self.inner(inputs, training=True)

        def compute_output_shape(self, shape):
            return self.inner.compute_output_shape(shape)

    return InTraining()


def sequential(input_shape: tuple[int | None, ...], *layers: Any):
    """A model with the same weights each time."""
    import keras

    model = keras.Sequential([keras.Input(input_shape), *layers])
    random = np.random.default_rng(1)
    model.set_weights([random.uniform(-0.5, 0.5, weight.shape) for weight in model.get_weights()])
    return model


def tape_jacobian(model, windows: np.ndarray) -> np.ndarray:
    """What people write today: the reference for every kernel, `(batch, *target, *source)`."""
    import tensorflow as tf

    source = tf.constant(windows)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(source)
        prediction = model(source)
        flat = tf.reshape(prediction, (len(windows), -1))
    rows = tape.batch_jacobian(flat, source, experimental_use_pfor=False)
    return rows.numpy().reshape(*prediction.shape, *windows.shape[1:])


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest entry expected."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def cut(values: np.ndarray, length: int, stride: int = 1) -> np.ndarray:
    """Windows `(window, lag, feature)` by plain slicing: independent of the product's own geometry."""
    starts = range(0, len(values) - length + 1, stride)
    return np.stack([values[start : start + length] for start in starts])


def missing(run) -> list:
    """Shards without a commit record that counts."""
    from sensitivity.commits import read_commits

    done = read_commits(run)
    return [shard for shard in run.layout.shards() if shard.index not in done]


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    return job_writer(tmp_path)


def job_writer(tmp_path: Path) -> Callable[..., Path]:
    """Write a job file with a small dense model and a CSV, or what is given instead; returns the job file's path."""

    def write(model: Any = None, series: Any = None, text: str = "", **sections: dict[str, Any]) -> Path:
        from keras import layers

        if isinstance(model, dict):
            sections["model"], model = model, None
        if isinstance(series, dict):
            sections["series"], series = series, None
        if model is None:
            model = sequential((6, len(FEATURES)), layers.Flatten(), layers.Dense(4, "tanh"), layers.Dense(1))
        model.save(tmp_path / "model.keras")
        (frame(60) if series is None else series).to_csv(tmp_path / "series.csv", index=False)
        content: dict[str, dict[str, Any]] = {
            "model": {"path": "model.keras"},
            "series": {"path": "series.csv", "time": "time"},
            "run": {"path": "run"},
        }
        for name, section in sections.items():
            content.setdefault(name, {}).update(section)
        file = tmp_path / "job.toml"
        file.write_text(toml(content) + text)
        return file

    return write


def toml(content: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, keys in content.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_value(value)}" for key, value in keys.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return repr(value) if isinstance(value, (int, float)) else f'"{value}"'
