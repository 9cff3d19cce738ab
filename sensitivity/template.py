"""The store's template: every array of `results.zarr`, its labels and its metadata, written once by the driver.

Workers later fill disjoint regions of whole chunks; nothing is ever resized, created or consolidated again.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from .plan import Layout
from .survey import Survey
from .variables import Variable
from .windows import Gaps, Windows

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from .facts import ModelFacts
    from .products.product import Product

LABEL_BLOCK = 1 << 20
# Every codec chain ends with a checksum: what changed on the disk is never decoded, by whatever reads it.
CHECKED = (Crc32cCodec(),)
# Chosen by tests/benchmarks/codecs.py on real Jacobians.
CODEC = BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle")


def write_template(
    store: Store, survey: Survey, windows: Windows, facts: ModelFacts, layout: Layout, product: Product
) -> None:
    """Create `results.zarr` in `store`: labels filled in, `variables` all NaN and without chunks."""
    labels = _fixed_labels(survey, facts, product)
    labels = labels.assign(_constants(facts, product))
    encoding: Any = {name: {"compressors": (ZstdCodec(), *CHECKED)} for name in labels.variables}
    labels.to_zarr(store, zarr_format=3, consolidated=False, mode="w-", encoding=encoding)
    group = zarr.open_group(store, mode="r+")
    site = " site" if survey.sites else ""
    for number, variable in enumerate(facts.variables):
        size, steps = (
            (layout.shard_windows, variable.cut_size) if number else (layout.chunk_windows, layout.chunk_steps)
        )
        beside = [name for name, one in labels.coords.items() if not one.dims or {*one.dims} < {*variable.dim_names}]
        named = " ".join(["skipped", *(name for name in ("input_std", "step_lag") if name in beside)]) + site
        _create(group, variable, layout.windows, (size, *variable.chunk(steps)), facts.dtype, named)
    _write_labels(group, survey, windows, facts.missing(survey))
    with warnings.catch_warnings():  # outside the v3 specification, but a plain open_zarr warns without it
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(store)


def _fixed_labels(survey: Survey, facts: ModelFacts, product: Product) -> xr.Dataset:
    constants = product.constants(facts.target_dims, facts.source_dims)
    every: dict[str, int] = {}
    for dims in (*(variable.dims for variable in facts.variables), *(dims for dims, _ in constants.values())):
        every.update(dims)
    coords: dict[str, Any] = {name: _label(name, size, survey, facts, product) for name, size in every.items()}
    if "feature" in every:
        std = {"long_name": "standard deviation of the feature over the series"}
        coords["input_std"] = ("feature", np.array(survey.std)[facts.source_columns], std)
    if facts.step_lags and {"output_step", "lag"} <= {*facts.variables[0].dim_names}:
        coords["step_lag"] = ("output_step", np.array(facts.step_lags), _step_note(facts))
    return xr.Dataset(coords=coords)


def _step_note(facts: ModelFacts) -> dict[str, Any]:
    """What answers need to count lags from each output's own step."""
    return {
        "long_name": "lag of the output's own step, counted back from the window's last step",
        "steps": facts.source.shape[0],
        "sees": "earlier" if facts.at_steps == "causal" else "all",
        "lags_from": "output" if facts.by_output_step else "window",
    }


def _label(dim: str, size: int, survey: Survey, facts: ModelFacts, product: Product) -> tuple[Any, ...]:
    """The labels of a dim; `lag_2` has those of `lag`."""
    lagged = "the output's own step" if facts.by_output_step else "the window's last step"
    steps = np.arange(facts.output_steps) if facts.selection.steps is None else np.array(facts.selection.steps)
    known: dict[str, tuple[Any, ...]] = {
        "output_step": (steps, {"long_name": "step of the output"}),
        "output": (np.array(facts.outputs, object),),
        "lag": (np.arange(size)[::-1], {"long_name": f"steps back from {lagged}"}),
        "feature": (np.array(survey.features, object)[facts.source_columns],),
        "source_step": (np.arange(size), {"long_name": f"step of what layer {facts.source.name} gives"}),
        "unit": (np.array([f"{facts.source.name}_{unit}" for unit in range(size)], object),),
        "sample": (np.arange(size),),
        "parameter": (np.array(list(facts.source.parameters) if dim.startswith("parameter") else (), object),),
    }
    known.update({name: (np.array(labels, object),) for name, labels in product.labels().items()})
    return dim, *known[dim.removesuffix("_2")]


def _constants(facts: ModelFacts, product: Product) -> dict[str, Any]:
    note = {"long_name": "as the model takes it"}
    kept = product.constants(facts.target_dims, facts.source_dims)
    return {
        name: ([dim for dim, _ in dims], values.reshape([size for _, size in dims]), note)
        for name, (dims, values) in kept.items()
    }


def _create(
    group: zarr.Group, variable: Variable, windows: int, chunks: tuple[int, ...], dtype: str, coordinates: str
) -> None:
    group.create_array(
        variable.name,
        shape=(windows, *variable.shape),
        chunks=chunks,
        dtype=dtype,
        fill_value=np.nan,
        dimension_names=("time", *variable.dim_names),
        compressors=(CODEC, *CHECKED),
        chunk_key_encoding={"name": "default", "separator": "."},  # one directory: one fsync for its names
        attributes={"long_name": variable.long_name, "coordinates": coordinates},
    )


def _write_labels(group: zarr.Group, survey: Survey, windows: Windows, missing: Gaps) -> None:
    count = windows.count
    head = xr.conventions.encode_cf_variable(_time(survey, windows.heads()))
    head.attrs.pop("_FillValue", None)  # every window has a time
    encoding = {key: head.attrs[key] for key in ("units", "calendar") if key in head.attrs}
    options: dict[str, Any] = {"shape": (count,), "chunks": (min(count, LABEL_BLOCK),), "dimension_names": ("time",)}
    options["compressors"] = (ZstdCodec(), *CHECKED)
    time = group.create_array("time", dtype=head.dtype, attributes=dict(head.attrs), **options)
    note: dict[str, Any] = {"long_name": "window touches a missing value of the series and is not computed"}
    skipped = group.create_array("skipped", dtype="bool", attributes=note, **options)
    site = _site(group, options) if survey.sites else None
    for start in range(0, count, LABEL_BLOCK):
        stop = min(start + LABEL_BLOCK, count)
        steps = windows.last_steps(start, stop)
        labels = _time(survey, steps)
        labels.encoding = {**encoding, "dtype": head.dtype} if encoding else {}
        time[start:stop] = xr.conventions.encode_cf_variable(labels).values
        skipped[start:stop] = windows.skipped(missing, start, stop)
        if site is not None:
            site[start:stop] = survey.site_of(steps)


def _site(group: zarr.Group, options: dict[str, Any]) -> zarr.Array:
    return group.create_array("site", dtype="string", attributes={"long_name": "site of the window"}, **options)


def _time(survey: Survey, steps: np.ndarray) -> xr.Variable:
    note = {"long_name": "time of the window's last step"}
    return xr.Variable(("time",), survey.times(steps), note)
