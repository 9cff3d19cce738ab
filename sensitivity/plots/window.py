"""One window's story: what went in, what came out, and the derivative that ties them."""

from __future__ import annotations

from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import Refused
from ..query import with_inputs
from ..query.alignment import Alignment, aligned
from ..query.conditions import holding
from ..query.passes import canonical
from ..query.roles import roles_of
from . import look
from .terms import terms_of

ROWS = 6


def story(
    dataset: xr.Dataset, *, time: Any = None, where: str | None = None, align: str | None = None, **chosen: Any
) -> xr.Dataset:
    """One window, lazy: `jacobian`, `prediction`, its labels and, of a run, `input`; align, lags, … as in `query.ask`.

    That with this time of its last step; without one, that with the largest |J| × the input's standard deviation,
    found in one pass over the store.
    """
    part, alignment = aligned(dataset, align, **chosen)
    whole = canonical(part, inputs=False)
    reads = None if alignment is None else alignment.reads
    index = _at(whole, time) if time is not None else _largest(whole, where, reads)
    told = dask.delayed(partial(_told, whole, alignment), pure=False)(index)
    shape = _shape(whole, alignment)
    made = {name: (one.dims, _lazy(told, name, one.shape, one.dtype)) for name, one in shape.variables.items()}
    kept = {name: shape[name].variable for name in (*shape.dims, "input_std") if name in shape.coords}
    facts = {"windows": dataset.sizes["time"], "chosen": "largest" if time is None else "time"}
    facts |= {key: value for key, value in shape.attrs.items() if key == "roles"}
    return xr.Dataset(made | kept).set_coords([*kept]).assign_attrs(facts | _units(dataset))


def _shape(dataset: xr.Dataset, alignment: Alignment | None) -> xr.Dataset:
    """What any of its windows has, with inputs where they may be had."""
    one = dataset.isel(time=slice(0, 1))
    try:
        one = with_inputs(one)
    except Refused:
        pass
    one = one.isel(time=0, missing_dims="ignore").drop_vars("window", errors="ignore")
    one = _moved(xr.zeros_like(one), alignment)
    return one.assign_coords({name: one[name].load() for name in ("input_std",) if name in one.coords})


def _moved(window: xr.Dataset, alignment: Alignment | None) -> xr.Dataset:
    """By the lags of the picture."""
    if alignment is None:
        return window
    roles = roles_of(window)
    found = alignment.of_cells(window, roles)
    return found.assign_attrs(roles=alignment.roles(roles)) if "roles" in window.attrs else found


def _lazy(told: Any, name: Any, shape: tuple[int, ...], dtype: Any) -> da.Array:
    return da.from_delayed(dask.delayed(_part)(told, name, shape, dtype), shape, dtype)


def _part(told: xr.Dataset, name: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """NaN for inputs that turn out not to be had."""
    return np.asarray(told[name].values, dtype) if name in told else np.full(shape, np.nan, dtype)


def _units(dataset: xr.Dataset) -> dict[str, Any]:
    named = dataset["prediction"].attrs.get("units") if "prediction" in dataset else None
    return {"units": named} if named else {}


def _at(dataset: xr.Dataset, time: Any) -> int:
    times = dataset["time"].values
    try:
        wanted = np.datetime64(time) if times.dtype.kind == "M" else times.dtype.type(time)
    except ValueError as error:
        raise _no_window(times, time, "write it as 2015-06-03T07:00, or as a number") from error
    found = np.flatnonzero(times == wanted)
    if len(found) > 1:
        raise _no_window(times, f"{time}, of which {len(found)} sites have a window", "choose one site")
    if not len(found):
        nearest = f"the nearest is {_shown(times[np.abs(times - wanted).argmin()])}" if len(times) else "choose others"
        raise _no_window(times, time, nearest)
    return int(found[0])


def _no_window(times: np.ndarray, time: Any, remedy: str) -> Refused:
    ends = [_shown(time) for time in (times.min(), times.max())] if len(times) else []
    known = f"the last step of a window, from {ends[0]} to {ends[1]}" if ends else "no window at all"
    return Refused("time", given=time, allowed=known, remedy=remedy)


def _shown(time: Any) -> str:
    return np.datetime_as_string(time, "auto") if time.dtype.kind == "M" else str(time)


def _largest(dataset: xr.Dataset, where: str | None, reads: np.ndarray | None) -> da.Array:
    """The number of the window with the largest |J| × std, lazily; the first where none has any. reads: which entries
    count, bool `(output_step, lag)`; None: all.
    """
    jacobian = dataset["jacobian"].data
    if reads is not None:
        jacobian = da.where(da.asarray(reads)[:, None, :, None], jacobian, jacobian.dtype.type(0))
    std = dataset["input_std"].values if "input_std" in dataset.coords else 1.0
    sizes = da.map_blocks(
        _sizes, jacobian, std=std, drop_axis=[2, 3, 4], dtype=jacobian.dtype, meta=np.empty((0, 0), jacobian.dtype)
    ).max(axis=1)
    if where is not None:
        sizes = da.where(holding(dataset, where), sizes, -1)
    return da.argmax(sizes, axis=0)


def _sizes(block: np.ndarray, std: Any) -> np.ndarray:
    """`(window, output_step)`: the largest finite |J| × std of each; -1 where there is none."""
    sizes = np.abs(block) * np.asarray(std, block.dtype)
    return np.where(np.isfinite(sizes), sizes, -1).max(axis=(2, 3, 4), initial=-1)


def _told(dataset: xr.Dataset, alignment: Alignment | None, index: Any) -> xr.Dataset:
    """The window itself, read where the task runs, without inputs where these are not to be had."""
    one = dataset.isel(time=[int(index)])
    try:
        one = with_inputs(one).isel(time=0).compute(scheduler="synchronous")
    except Refused:
        one = one.isel(time=0).compute(scheduler="synchronous")
    return _moved(one, alignment)


def draw_window(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `jacobian` `(output_step, output, lag, feature)`, and `prediction` and `input` where known, of a window.

    Of several targets, that with the largest derivative; a row for each feature, the largest on top.
    """
    scaled = look.newest_last(look.scaled(found, "jacobian"))
    target = _target(scaled)
    values = _there(scaled.isel(target))
    order, others = look.most(values, top or ROWS)
    path, labels = _outputs(found), look.names(values.isel(feature=order))
    rows = len(order) + (path is not None)
    figure.set_size_inches(look.WIDTH, 1.6 + 1.05 * max(rows, 2))
    grid = figure.subplots(rows, 2 if _has_input(found) else 1, squeeze=False)
    for row, feature in enumerate(order):
        one = found.isel(target).sel(lag=values["lag"])
        _row(grid[row], one, values.isel(feature=feature), look.largest(values.values))
        grid[row, 0].set_title(labels[row], loc="left")
    _share_lags(grid[: len(order)], values["lag"])
    if _has_input(found):
        grid[0, 1].set_title(_derivative(found), loc="left")
    if path is not None:
        _draw_outputs(figure, grid[-1], path, target["output_step"])
        grid[-1][0].set_title(f"prediction (dotted: the step that the {terms_of(found).nouns} are of)", loc="left")
    _title(found, figure, target, others)


def _has_input(found: xr.Dataset) -> bool:
    return "input" in found and bool(found["input"].notnull().any())


def _target(scaled: xr.DataArray) -> dict[str, int]:
    """Where the largest derivative is, of all output steps and outputs."""
    sizes = abs(scaled).fillna(-1).max(["lag", "feature"]).transpose("output_step", "output")
    step, output = np.unravel_index(int(sizes.values.argmax()), sizes.shape)
    return {"output_step": int(step), "output": int(output)}


def _there(values: xr.DataArray) -> xr.DataArray:
    """Without lags that the target does not have, where it has any."""
    there = values.notnull().any("feature").values
    return values.isel(lag=there) if there.any() else values


def _row(panels: np.ndarray, found: xr.Dataset, values: xr.DataArray, high: float) -> None:
    """A feature's input and its derivatives, by lag."""
    at = look.places(values["lag"].values)
    edges = np.append(at + 0.5, at[-1] - 0.5)[::-1]
    numbers = np.nan_to_num(values.values)[::-1]
    for part, colour, hatch in ((numbers.clip(min=0), look.COLOURS[1], ""), (numbers.clip(max=0), look.COLOURS[0], "")):
        panels[-1].stairs(part, edges, fill=True, color=colour, hatch=hatch)
    panels[-1].axhline(0, color="#666666", linewidth=0.8)
    panels[-1].set_ylim(-1.05 * high, 1.05 * high)
    if len(panels) > 1:
        inputs = look.newest_last(found["input"].sel(feature=values["feature"]))
        panels[0].plot(at, inputs, color="black", marker="." if len(at) <= 60 else "")


def _share_lags(grid: np.ndarray, lags: xr.DataArray) -> None:
    for row, panels in enumerate(grid):
        for axes in panels:
            axes.set_xlim(*look.span(lags.values))
            look.dress_lags(axes.xaxis, lags, label=row == len(grid) - 1)
            axes.tick_params(axis="x", labelbottom=row == len(grid) - 1)


def _outputs(found: xr.Dataset) -> xr.DataArray | None:
    """The prediction by output step, where there are several."""
    if "prediction" not in found or "output_step" not in found["prediction"].dims or found.sizes["output_step"] < 2:
        return None
    return found["prediction"].transpose("output_step", "output")


def _draw_outputs(figure: Figure, panels: np.ndarray, path: xr.DataArray, chosen: int) -> None:
    for other in panels[1:]:
        other.set_axis_off()
    axes: Axes = panels[0]
    steps = path["output_step"].values
    for i in range(min(path.sizes["output"], len(look.COLOURS))):
        axes.plot(steps, path[:, i], label=look.plain(path["output"].values[i]), **look.line(i, len(steps)))
    axes.axvline(steps[chosen], color="#999999", linestyle=":")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("output step")
    if path.sizes["output"] > 1:
        axes.legend(fontsize="small", bbox_to_anchor=(1.01, 1), loc="upper left")


def _title(found: xr.Dataset, figure: Figure, target: dict[str, int], others: str) -> None:
    one = found.isel(target)
    site = f", {look.plain(found['site'].item())}" if "site" in found else ""
    step = f"output step {one['output_step'].item()}" if found.sizes["output_step"] > 1 else ""
    told = "prediction" in one and not one["prediction"].ndim
    answer = f"{look.output(one)}: {float(one['prediction']):.4g} {_unit(found)}".strip() if told else ""
    own = terms_of(found)
    largest = f"largest |{own.letter}|{' × std' if own.plain or look.is_scaled(found) else ''}"
    how = f"{largest} of {found.attrs['windows']:,} windows" if found.attrs.get("chosen") == "largest" else ""
    look.title(figure, f"The window that ends at {_time(found)}{site}", answer, step, how, _inputs(found), others)


def _time(found: xr.Dataset) -> str:
    return str(_shown(found["time"].values)).replace("T", " ")


def _derivative(found: xr.Dataset) -> str:
    return look.size_label(found, "{}").replace("\n", " ")


def _unit(found: xr.Dataset) -> str:
    return look.units(found) if "units" in found.attrs else ""


def _inputs(found: xr.Dataset) -> str:
    """What the left column is, or why nothing is there."""
    if found["jacobian"].notnull().any():
        return "left: inputs in units of the series" if _has_input(found) else f"{_derivative(found)}, without inputs"
    if "committed" in found and not found["committed"]:
        return "not computed yet"
    return "not computed: a value of the series is missing"
