"""A run as a dataset of lazy Dask arrays, and the windows of one of its sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
import zarr

from ..errors import Refused, suggested
from ..machine import cores
from ..site_index import SiteIndex
from ..standing import stand
from ..store import Run
from .roles import JACOBIAN

BLOCK_BYTES = 32 << 20  # of J; a thread holds one, and as much again while it is decoded
LABEL_BLOCK = 1 << 20
DECODERS = "threading.max_workers"


def open_run(path: str | Path) -> xr.Dataset:
    """A run as lazy Dask arrays.

    `jacobian` `(time, output_step, output, lag, feature)` and `prediction` `(time, output_step, output)`, in the
    run's dtype, with coordinates along time and feature beside their labels: `committed` (bool: the window's shard is
    done), `skipped` (bool: the window touches a missing value, so its Jacobian stays NaN), `window` (int64, lazy: its
    number in the run) and `input_std` (the feature's standard deviation over the series). A window that is not
    committed reads as NaN. `step_lag` along output_step is there where outputs stand at steps of the window: the lag of
    the output's own step, by which answers count lags; the dataset itself has them as they are stored.

    Of another product the variable has that product's name, which `attrs["product"]` says, and its dims; what else the
    store has along time stands beside it.

    The windows of a panel stand site by site, each site's in order of time; `site` (text) along time is an index like
    `time`: `.sel(site="A").sel(time=slice("2001", "2003"))`, one after the other. `input_std` is over all sites.

    As many chunks are decoded at once as there are cores, unless Zarr's `threading.max_workers` says otherwise: that is
    set, for the process. Raises `Refused` (a ValueError) where there is no run.
    """
    run = Run.open(path)
    return dataset_of(run, stand(run).done)


def dataset_of(run: Run, done: np.ndarray) -> xr.Dataset:
    """A run as `open_run` has it, of which these shards are done: bool `(shard)`."""
    layout = run.layout
    committed = np.repeat(done, layout.shard_windows)[: layout.windows]
    if done.all():
        committed = np.broadcast_to(np.True_, layout.windows)  # which takes no memory
    # A block per shard where some are missing: then a block is read either whole or not at all.
    dataset = opened(run.results).assign_coords(committed=("time", committed))
    dataset = dataset.assign_coords(window=("time", da.arange(layout.windows, chunks=LABEL_BLOCK)))
    if run.survey.sites:
        names, counts = np.array([site.name for site in run.survey.sites], object), run.windows.per_site
        index = SiteIndex("site", "time", names[counts > 0], np.cumsum([0, *counts[counts > 0]]))
        dataset = dataset.drop_vars("site").assign_coords(xr.Coordinates.from_xindex(index))
    product = run.content.get("product", JACOBIAN)
    shard_bytes = max(1, dataset[product].nbytes // layout.shard_count)
    shards = max(1, BLOCK_BYTES // shard_bytes) if committed.all() else 1
    blocks = {"time": layout.shard_windows * shards, "output_step": layout.chunk_steps}
    for name in [name for name, one in dataset.data_vars.items() if one.dims[:1] == ("time",)]:
        own = {dim: size for dim, size in blocks.items() if dim in dataset[name].dims}
        variable = dataset[name].variable.chunk(own)
        data = variable.data if committed.all() else _masked(variable.data, committed)
        dataset[name] = xr.Variable(variable.dims, data, variable.attrs, variable.encoding)
    if "feature_2" in dataset.dims and "input_std" in dataset.coords:
        dataset = dataset.assign_coords(input_std_2=("feature_2", dataset["input_std"].values))
    known = {"run": str(run.place), "length": run.windows.length, "stride": run.windows.stride}
    return dataset.assign_attrs(known | ({} if product == JACOBIAN else {"product": product}))


def opened(results: Any) -> xr.Dataset:
    """A store as it is, lazy but for labels. Times are decoded in blocks: at once, they would take four times the
    memory that they have then.
    """
    if zarr.config.get(DECODERS) is None:  # each holds on to memory of its own, and no more than cores can be at work
        zarr.config.set({DECODERS: cores()})
    dataset = xr.open_zarr(results, chunks=None, create_default_indexes=False)
    times = dataset["time"].variable
    values = np.empty(times.shape, times.dtype)
    for start in range(0, len(values), LABEL_BLOCK):
        values[start : start + LABEL_BLOCK] = times[start : start + LABEL_BLOCK].values
    labels = xr.CFTimeIndex(values) if values.dtype == object else pd.Index(values, copy=False)
    index = xr.indexes.PandasIndex(labels, "time")
    made = xr.Coordinates(index.create_variables({"time": times}), {"time": index})
    dataset = dataset.drop_vars("time").assign_coords(made)
    for dim in [dim for dim in dataset.dims if dim in dataset.coords and dim != "time"]:
        dataset = dataset.set_xindex(dim)
    return dataset


def _masked(array: da.Array, served: np.ndarray) -> da.Array:
    """`array` with NaN for what is not served, which is not even read: it may be there in part, or torn."""
    dtype = np.result_type(array.dtype, np.float16)  # of whole numbers too
    borders = [0, *(np.flatnonzero(np.diff(served)) + 1).tolist(), len(served)]
    spans = [array[start:stop] for start, stop in zip(borders, borders[1:], strict=False)]
    parts = [
        span if served[start] else da.full(span.shape, np.nan, dtype=dtype, chunks=span.chunks)
        for start, span in zip(borders, spans, strict=False)
    ]
    return da.concatenate(parts)


def of_site(dataset: xr.Dataset, site: str) -> xr.Dataset:
    """The windows of one site of a panel. Raises `Refused` where there is no such site, or none at all."""
    if "site" in dataset.coords and "site" not in dataset.xindexes:
        dataset = dataset.set_xindex("site", SiteIndex)
    index = dataset.xindexes.get("site")
    known = index.names if isinstance(index, SiteIndex) else []
    if site not in known:
        raise Refused(
            "site",
            given=site,
            allowed=", ".join([*known[:10], *(["…"] if len(known) > 10 else [])]) or "none: the series has no sites",
            remedy=suggested(site, known, "name one of the run's sites that have windows" if known else "leave it out"),
        )
    return dataset.sel(site=site)


def of_sites(statistic: Callable[[xr.Dataset], xr.Dataset], dataset: xr.Dataset, sites: Sequence[str]) -> xr.Dataset:
    """A statistic of some sites of a panel, each by itself: lazy, with a dimension `site` in front."""
    found = [statistic(of_site(dataset, site)) for site in sites]
    return xr.concat(found, xr.Variable("site", np.array(sites, object)), coords="minimal", compat="override")
