"""The active subspace: directions in the space of all inputs of a window along which the output moves most.

Eigenvectors of E[∇f ∇fᵀ] with f's inputs divided by their standard deviations (Constantine 2015, "Active Subspaces");
activity scores are those of Constantine & Diaz (2017, arXiv 1510.04542).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import xarray as xr

from ..errors import Refused
from .blas import one_thread
from .naming import COUNT, Words
from .statistics import COMPONENTS, Statistic

SOURCE = ("lag", "feature")
OTHER = ("lag_2", "feature_2")

_WORDS: Words = COUNT | {
    "eigenvalue": ("eigenvalue of the mean outer product of gradients", "({scaled})²"),
    "share": ("share of the sum of all eigenvalues", "1"),
    "gap": ("eigenvalue less the next one", "({scaled})²"),
    "eigenvector": ("direction, of length 1, along which the output moves, by falling eigenvalue", "1"),
    "activity": ("activity score: sum of eigenvalue × eigenvector² over components", "({scaled})²"),
}


def active_subspace(components: int = COMPONENTS) -> Statistic:
    """Of each target `(output_step, output)`, over windows that have all its derivatives (`count`):

    `eigenvalue` `(…, component)`, falling, in squared units of the output; `share` of their sum; `gap` to the next one;
    `eigenvector` `(…, component, lag, feature)` of length 1, its largest entry positive, in standard deviations of the
    features; `activity` `(…, lag, feature)`: Σ eigenvalue · eigenvector² over these components. By weights, whose
    E[∇f ∇fᵀ] is the empirical Fisher matrix of f, and by layers, of theirs, as they are.
    """
    if components < 1:
        raise Refused("components", given=components, allowed="1 or more", remedy="leave it out for 10")
    return Statistic(
        "active-subspace",
        ("products", "complete"),
        partial(_finish, components=components),
        ("count", "eigenvector"),
        only="rows",
        words=_WORDS,
    )


def _finish(sums: xr.Dataset, components: int) -> xr.Dataset:
    matrix, count = sums["products"], sums["complete"]
    front = tuple(dim for dim in matrix.dims if dim not in (*SOURCE, *OTHER))
    lags, features = sums.sizes["lag"], sums.sizes["feature"]
    scale = np.ones(lags * features)
    if "input_std" in sums:
        std = sums["input_std"].broadcast_like(sums["products"].isel(dict.fromkeys(OTHER, 0)), exclude=front)
        scale = std.transpose(..., *SOURCE).values.reshape(-1)
    values = matrix.transpose(*front, *SOURCE, *OTHER).values.reshape(*count.shape, lags * features, lags * features)
    values = values * scale[:, None] * scale
    kept = min(components, lags * features)
    found, vectors = _eigen(values, count.transpose(*front).values, kept)
    dims, source = (*front, "component"), (lags, features)
    eigenvalue = xr.DataArray(found[..., :kept], dims=dims, coords={"component": np.arange(1, kept + 1)})
    trace = np.trace(values, axis1=-2, axis2=-1) / np.maximum(count.values, 1)
    shaped = vectors.reshape(*vectors.shape[:-1], *source)
    eigenvector = xr.DataArray(shaped, dims=(*dims, *SOURCE), coords={dim: sums[dim] for dim in SOURCE})
    total = xr.DataArray(trace, dims=front)
    return xr.Dataset(
        {
            "count": count,
            "eigenvalue": eigenvalue,
            "share": eigenvalue / total.where(total > 0),
            "gap": eigenvalue - eigenvalue.copy(data=found[..., 1 : kept + 1]),
            "eigenvector": eigenvector,
            "activity": (eigenvalue * np.square(eigenvector)).sum("component", skipna=False),
        }
    )


def _eigen(matrices: np.ndarray, counts: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues `(…, kept + 1)`, 0 beyond the last, and vectors `(…, kept, source)`; NaN where nothing counts."""
    size = matrices.shape[-1]
    values = np.full((*counts.shape, kept + 1), np.nan)
    vectors = np.full((*counts.shape, kept, size), np.nan)
    with one_thread():
        for place in zip(*np.nonzero(counts), strict=True):
            found, columns = np.linalg.eigh(matrices[place] / counts[place])
            falling = np.append(np.maximum(found[::-1], 0), 0)
            values[place] = falling[: kept + 1]
            rows = columns[:, ::-1][:, :kept].T
            largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
            vectors[place] = rows * np.where(largest < 0, -1, 1)
    return values, vectors
