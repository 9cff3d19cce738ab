"""Datasets like those of runs of each product, in memory: random values with the product's own dims and labels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

TIMES = 40
LABELS = {
    "output_step": [0, 3],
    "output": ["flow", "level"],
    "lag": [3, 2, 1, 0],
    "feature": ["rain", "heat", "wind"],
    "vector": ["sum", "first"],
    "direction": ["up", "wet", "old"],
    "source_step": [0, 1, 2],
    "unit": ["lstm_0", "lstm_1"],
    "weight": ["dense/kernel", "dense/bias"],
    "parameter": ["dense/kernel[0,0]", "dense/kernel[1,0]", "dense/bias[0]"],
}
STDS = np.array([1.0, 2.0, 0.5])
TARGET = ("output_step", "output")
SOURCES = {"input": ("lag", "feature"), "layer": ("source_step", "unit"), "weights": ("parameter",)}


def _second(dims: tuple[str, ...]) -> tuple[str, ...]:
    return (*dims, *(f"{dim}_2" for dim in dims))


DIMS: dict[tuple[str, str], tuple[str, ...]] = {
    **{("jacobian", by): (*TARGET, *source) for by, source in SOURCES.items()},
    **{("vjp", by): ("vector", *source) for by, source in SOURCES.items()},
    **{("hessian", by): (*TARGET, *_second(source)) for by, source in SOURCES.items()},
    **{("hvp", by): (*TARGET, "direction", *source) for by, source in SOURCES.items()},
    ("integrated_gradients", "input"): (*TARGET, *SOURCES["input"]),
    ("expected_gradients", "input"): (*TARGET, *SOURCES["input"]),
    ("smooth_gradients", "input"): (*TARGET, *SOURCES["input"]),
    ("jvp", "input"): (*TARGET, "direction"),
    ("gradient_norm", "input"): TARGET,
    ("gram", "input"): _second(TARGET),
    ("gradient_norm", "weights"): (*TARGET, "weight"),
}


def labels(dim: str) -> list:
    return LABELS[dim.removesuffix("_2")]


def produced(product: str, by: str = "input", times: int = TIMES, seed: int = 0) -> xr.Dataset:
    """Of every seventh window nothing is known; three blocks along time."""
    random = np.random.default_rng(seed)
    dims = DIMS[product, by]
    values = random.standard_normal((times, *(len(labels(dim)) for dim in dims))).astype("float32")
    if product == "gradient_norm":
        values = np.abs(values)
    values[::7] = np.nan
    prediction = random.standard_normal((times, 2, 2)).astype("float32") + 3
    coords: dict = {dim: np.array(labels(dim), object if isinstance(labels(dim)[0], str) else int) for dim in dims}
    coords |= {dim: np.array(labels(dim), object if dim == "output" else int) for dim in TARGET}
    if "feature" in dims:
        coords["input_std"] = ("feature", STDS)
    if "feature_2" in dims:
        coords["input_std_2"] = ("feature_2", STDS)
    found = xr.Dataset(
        {product: (("time", *dims), values), "prediction": (("time", *TARGET), prediction)},
        coords=coords
        | {
            "time": pd.date_range("2001-01-01", periods=times, freq="11D"),
            "committed": ("time", np.ones(times, bool)),
            "skipped": ("time", np.isnan(values.reshape(times, -1)[:, 0])),
        },
        attrs={} if product == "jacobian" else {"product": product},
    )
    if product == "integrated_gradients":
        found["completeness_error"] = (("time", *TARGET), np.full((times, 2, 2), 1e-3, "float32"))
        found["steps"] = ("time", np.full(times, 32.0))
    return found.chunk({"time": -(-times // 3)})


def scale(dataset: xr.Dataset, product: str) -> xr.DataArray | float:
    """What makes entries comparable, by hand."""
    if product in ("integrated_gradients", "expected_gradients") or "input_std" not in dataset.coords:
        return 1.0
    first = xr.DataArray(STDS, dims="feature")
    return first * xr.DataArray(STDS, dims="feature_2") if "feature_2" in dataset.dims else first
