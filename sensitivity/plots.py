"""Pictures for people who would rather look than read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .query import lag_profile

# Okabe & Ito (2008): told apart with any colour vision; marks and line styles tell more features apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = ("-", "--", ":")


def influence(dataset: xr.Dataset) -> xr.DataArray:
    """Mean |J| × the feature's standard deviation `(lag, feature)`, in units of the output: comparable over features.

    The mean over output steps and outputs, where there are several. Computed, in one pass over the store; the
    attribute `windows` says how many it comes from.
    """
    profile = lag_profile(dataset)["mean_abs"]
    values = (profile * profile["input_std"]).mean(["output_step", "output"]).compute()
    return values.assign_attrs(windows=int(np.asarray(dataset["committed"] & ~dataset["skipped"]).sum()))


def draw_lag_profile(values: xr.DataArray, axes: Axes) -> None:
    for i, feature in enumerate(values["feature"].values):
        series = values.sel(feature=feature)
        look: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKS[i % len(MARKS)],
            "label": _plain(feature),
        }
        style = STYLES[i // len(COLOURS) % len(STYLES)]
        axes.plot(values["lag"], series, linestyle=style, markersize=4, linewidth=1.5, **look)
    axes.invert_xaxis()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("mean |∂output/∂input| × input's std\n(units of the output)")
    axes.legend(fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def draw_heatmap(values: xr.DataArray, axes: Axes) -> None:
    features = [_plain(name) for name in values["feature"].values]
    newest, oldest = int(values["lag"].min()), int(values["lag"].max())
    extent = (oldest + 0.5, newest - 0.5, len(features) - 0.5, -0.5)
    image = axes.imshow(values.transpose("feature", "lag"), aspect="auto", cmap="viridis", extent=extent, vmin=0)
    axes.set_yticks(range(len(features)), features)
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label("mean |∂output/∂input| × input's std\n(units of the output)")


def _plain(name: object) -> str:
    """A label that matplotlib takes as it is: no mathematics, and not hidden for an underscore in front."""
    text = str(name).replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


KINDS: dict[str, Callable[[xr.DataArray, Axes], None]] = {"lag-profile": draw_lag_profile, "heatmap": draw_heatmap}


def plot(dataset: xr.Dataset, kind: str, file: str | Path) -> None:
    """Draw `kind` ("lag-profile" or "heatmap") of a run's dataset into a PNG, SVG or PDF file."""
    draw(influence(dataset), kind, file)


def draw(values: xr.DataArray, kind: str, file: str | Path) -> None:
    """The same from what `influence` gave, for several pictures of one pass."""
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        KINDS[kind](values, axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(f"lag ({values['lag'].attrs.get('long_name', 'steps back')})")
        title = f"How far back the output listens, {values.attrs['windows']:,} windows"
        axes.set_title(title, loc="left", fontsize="medium")
        figure.savefig(file, dpi=150)
