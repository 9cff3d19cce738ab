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
from .windows import Windows

if TYPE_CHECKING:
    from zarr.abc.store import Store

    from .model import ModelFacts

JACOBIAN_DIMS = ("time", "output_step", "output", "lag", "feature")
PREDICTION_DIMS = JACOBIAN_DIMS[:3]
LABEL_BLOCK = 1 << 20
# Every codec chain ends with a checksum: what changed on the disk is never decoded, by whatever reads it.
CHECKED = (Crc32cCodec(),)
# Chosen by tests/benchmarks/codecs.py on real Jacobians.
CODEC = BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle")


def write_template(store: Store, survey: Survey, windows: Windows, facts: ModelFacts, layout: Layout) -> None:
    """Create `results.zarr` in `store`: labels filled in, `jacobian` and `prediction` all NaN and without chunks."""
    labels = _fixed_labels(survey, facts)
    encoding: Any = {name: {"compressors": (ZstdCodec(), *CHECKED)} for name in labels.coords}
    labels.to_zarr(store, zarr_format=3, consolidated=False, mode="w-", encoding=encoding)
    group = zarr.open_group(store, mode="r+")
    sizes = (len(facts.outputs), facts.lags, facts.features)
    site = " site" if survey.sites else ""
    _create(
        group,
        "jacobian",
        JACOBIAN_DIMS,
        (layout.windows, facts.output_steps, *sizes),
        (layout.chunk_windows, layout.chunk_steps, *sizes),
        facts.dtype,
        {"long_name": "derivative of the output with respect to the input, per unit of the series' features"},
        coordinates=f"skipped input_std{site}",
    )
    _create(
        group,
        "prediction",
        PREDICTION_DIMS,
        (layout.windows, facts.output_steps, len(facts.outputs)),
        (layout.shard_windows, facts.output_steps, len(facts.outputs)),
        facts.dtype,
        {"long_name": "output of the model"},
        coordinates=f"skipped{site}",
    )
    _write_labels(group, survey, windows)
    with warnings.catch_warnings():  # outside the v3 specification, but a plain open_zarr warns without it
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(store)


def _fixed_labels(survey: Survey, facts: ModelFacts) -> xr.Dataset:
    lagged = "the output's own step" if facts.by_output_step else "the window's last step"
    steps = np.arange(facts.output_steps) if facts.selection.steps is None else np.array(facts.selection.steps)
    std = {"long_name": "standard deviation of the feature over the series"}
    return xr.Dataset(
        coords={
            "output_step": ("output_step", steps, {"long_name": "step of the output"}),
            "output": ("output", np.array(facts.outputs, object)),
            "lag": ("lag", np.arange(facts.lags)[::-1], {"long_name": f"steps back from {lagged}"}),
            "feature": ("feature", np.array(survey.features, object)),
            "input_std": ("feature", np.array(survey.std), std),
        }
    )


def _create(
    group: zarr.Group,
    name: str,
    dims: tuple[str, ...],
    shape: tuple[int, ...],
    chunks: tuple[int, ...],
    dtype: str,
    attributes: dict[str, Any],
    *,
    coordinates: str,
) -> None:
    group.create_array(
        name,
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        fill_value=np.nan,
        dimension_names=dims,
        compressors=(CODEC, *CHECKED),
        chunk_key_encoding={"name": "default", "separator": "."},  # one directory: one fsync for its names
        attributes={**attributes, "coordinates": coordinates},
    )


def _write_labels(group: zarr.Group, survey: Survey, windows: Windows) -> None:
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
        skipped[start:stop] = windows.skipped(survey.gaps, start, stop)
        if site is not None:
            site[start:stop] = survey.site_of(steps)


def _site(group: zarr.Group, options: dict[str, Any]) -> zarr.Array:
    return group.create_array("site", dtype="string", attributes={"long_name": "site of the window"}, **options)


def _time(survey: Survey, steps: np.ndarray) -> xr.Variable:
    note = {"long_name": "time of the window's last step"}
    return xr.Variable(("time",), survey.times(steps), note)
