"""Gradients by a layer's steps and units, out of a run's store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import Refused

if TYPE_CHECKING:
    import xarray as xr

WINDOWS = 4096


def stored(
    dataset: xr.Dataset,
    output: str | None = None,
    output_step: int | None = None,
    *,
    most_windows: int = WINDOWS,
) -> np.ndarray:
    """`(window, step, unit)` of a run with `wrt` a layer, for `gradient_decay` and the pictures here; `(window, unit)`
    where the layer gives its last step alone.

    dataset: as `sensitivity.open_run` gives it, or a selection of its times. output, output_step: of which, where there
        are several. most_windows: of those computed, evenly chosen, in the order of time.

    Raises `Refused` for a run by anything else, and where no window is computed.
    """
    product = dataset.attrs.get("product", "jacobian")
    if product != "jacobian" or not {"source_step", "unit"} <= {*dataset[product].dims}:
        raise Refused(
            "dataset",
            given=f"a run of {product} along {', '.join(map(str, dataset[product].dims))}",
            allowed="a run of jacobian along source_step and unit",
            remedy='run a job with wrt = "LAYER", of = "loss" or an output',
        )
    part = dataset[product]
    for dim, label in (("output", output), ("output_step", output_step)):
        part = part.isel({dim: _place(dataset, dim, label)})
    whole = np.flatnonzero((dataset["committed"] & ~dataset["skipped"]).values)
    if not len(whole) or most_windows < 1:
        raise Refused(
            "dataset" if not len(whole) else "most_windows",
            given="none of its windows is computed" if not len(whole) else most_windows,
            allowed="one window or more",
            remedy="finish the run first, or select other times" if not len(whole) else "give more",
        )
    chosen = whole[np.linspace(0, len(whole) - 1, min(most_windows, len(whole))).astype(int)]
    found = part.isel(time=chosen).transpose("time", "source_step", "unit").values
    return found if found.shape[1] > 1 else found[:, 0]


def _place(dataset: xr.Dataset, dim: str, label: str | int | None) -> int:
    """The number of the label along a dim; of the only one, where none is given."""
    labels = np.atleast_1d(dataset[dim].values).tolist()
    if label is None and len(labels) == 1:
        return 0
    if label not in labels:
        raise Refused(
            dim,
            given="nothing" if label is None else label,
            allowed=", ".join(map(str, labels)),
            remedy="name one of these",
        )
    return labels.index(label)
