"""Datasets like a run's, in memory, and what NumPy makes of them in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import xarray as xr
from hypothesis import strategies as st

CELL = ("output_step", "output", "lag", "feature")


def dataset(
    values: np.ndarray,
    chunks: tuple[int, ...] | None = None,
    *,
    start: str = "2001-01-01",
    freq: str = "D",
    seed: int = 7,
    steps: int | None = None,
) -> xr.Dataset:
    """A run's dataset: `values` `(time, output_step, output, lag, feature)`, cut into `chunks` along time, with random
    predictions and inputs.
    """
    times, _, _, lags, features = values.shape
    random = np.random.default_rng(seed)
    labels = {
        "time": pd.date_range(start, periods=times, freq=freq).to_numpy("datetime64[ns]"),
        "output_step": np.arange(values.shape[1]),
        "output": [f"out_{i}" for i in range(values.shape[2])],
        "lag": np.arange(lags)[::-1],
        "feature": [f"x_{i}" for i in range(features)],
        "input_std": ("feature", 1.0 + np.arange(features)),
        "committed": ("time", np.ones(times, bool)),
        "skipped": ("time", np.zeros(times, bool)),
    }
    prediction = random.standard_normal(values.shape[:3]).astype(values.dtype) + 3
    inputs = random.standard_normal((times, lags, features)).astype(values.dtype)
    found = xr.Dataset(
        {
            "jacobian": (("time", *CELL), values),
            "prediction": (("time", *CELL[:2]), prediction),
            "input": (("time", "lag", "feature"), inputs),
        },
        coords=labels,
    )
    return found.chunk({"time": chunks or (times,)} | ({} if steps is None else {"output_step": steps}))


def random_jacobian(times: int = 23, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """With windows that are missing, entries that are, and sizes that differ by feature."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((times, 2, 1, 4, 3)) * [1.0, 10.0, 0.1]
    values[random.random(values.shape) < 0.1] = 0
    values[random.random(times) < 0.2] = np.nan
    values[0, 1, 0, 2, 1] = np.inf
    return values.astype(dtype)


def cuts(total: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, total - 1), unique=True, max_size=6).map(
        lambda borders: tuple(np.diff([0, *sorted(borders), total]).tolist())
    )


def over_windows(values: np.ndarray, reduce: Callable[[np.ndarray], float]) -> np.ndarray:
    """`reduce` of the finite entries of each cell, in float64; NaN where there are none."""
    cells = values.reshape(len(values), -1).astype(float).T
    found = [reduce(cell[np.isfinite(cell)]) if np.isfinite(cell).any() else np.nan for cell in cells]
    return np.array(found).reshape(values.shape[1:])
