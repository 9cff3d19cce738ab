"""Numbers that sentences and tables share: influence by lag and feature, and what it adds up to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from ..plots import influence
from ..plots.look import of_one_target, targets
from ..query.pairs import by_pairs, each_once
from ..query.statistics import nearest_first
from ..suspicions import Suspicion, of_outputs, of_stored
from .answers import Answers

HELD = (0.5, 0.9)


@dataclass(frozen=True)
class Feature:
    """A feature as tables show it; an interval is (low, high), NaN where none can be told."""

    name: str
    importance: float
    interval: tuple[float, float]
    share: float
    share_interval: tuple[float, float]
    mean_abs: float
    std: float
    held: tuple[float, ...]
    peak_lag: int
    positive: float
    negative: float


def features(answers: Answers) -> list[Feature]:
    """All of them, the most important first; of several targets the mean, without intervals."""
    found = each_once(answers["importance"])
    over = targets(found)
    mean = found.mean(over)
    total = float(mean["importance"].sum()) or np.nan
    by_lag = influence(_like(found, answers["mean-abs"]))
    std = mean["input_std"].values if "input_std" in mean else np.full(found.sizes["feature"], np.nan)
    ends = {name: _ends(found, name) for name in ("importance", "share")}
    held = [lags_holding(by_lag, part).values for part in HELD]
    peaks = peak_lags(by_lag)
    positive, negative = (_share(answers, found, name, peaks) for name in ("positive", "negative"))
    made = [
        Feature(
            name=str(name),
            importance=float(mean["importance"][i]),
            interval=ends["importance"][i],
            share=float(mean["importance"][i]) / total,
            share_interval=ends["share"][i],
            mean_abs=float(mean["mean_abs"][i]),
            std=float(std[i]),
            held=tuple(float(lags[i]) for lags in held),
            peak_lag=int(peaks[i]),
            positive=float(positive[i]),
            negative=float(negative[i]),
        )
        for i, name in enumerate(found["feature"].values.tolist())
    ]
    return sorted(made, key=lambda one: -np.nan_to_num(one.importance, nan=-1.0))


def _ends(found: xr.Dataset, name: str) -> list[tuple[float, float]]:
    if f"{name}_low" not in found or not of_one_target(found):
        return [(np.nan, np.nan)] * found.sizes["feature"]
    low, high = (found[f"{name}_{edge}"].squeeze(targets(found)).values for edge in ("low", "high"))
    most = 1 if name == "share" else np.inf
    return [(float(a), float(b)) for a, b in zip(np.clip(low, 0, most), np.clip(high, 0, most), strict=True)]


def peak_lags(by_lag: xr.DataArray) -> np.ndarray:
    """The lag at which each feature's influence is largest `(feature)`."""
    values = by_lag.transpose("lag", "feature").fillna(-1)
    return values["lag"].values[values.values.argmax(axis=0)]


def _like(found: xr.Dataset, other: xr.Dataset) -> xr.Dataset:
    """By pairs where importance is."""
    return each_once(by_pairs(other)) if "pairs" in found.attrs else other


def _share(answers: Answers, found: xr.Dataset, sign: str, peaks: np.ndarray) -> np.ndarray:
    """The share of windows (and targets) with J of a sign at each feature's peak `(feature)`."""
    if "signs" not in answers:
        return np.full(len(peaks), np.nan)
    signs = _like(found, answers["signs"])
    share = signs[f"share_{sign}"].mean(targets(signs)).transpose("lag", "feature")
    at = xr.DataArray(peaks, dims="feature")
    return share.sel(lag=at).values


def lags_holding(by_lag: xr.DataArray, part: float) -> xr.DataArray:
    """How many lags, the nearest to lag 0 first, hold so much of the sum over lags; NaN where that is zero."""
    there = nearest_first(by_lag).notnull()
    known = nearest_first(by_lag).fillna(0)
    total = known.sum("lag")
    share = known.cumsum("lag") / total.where(total > 0)
    return (((share < part * (1 - 1e-12)) & there).sum("lag") + 1).where(total > 0)


def faded(by_lag: xr.DataArray) -> float:
    """Influence at the oldest lag, as a share of the largest at any."""
    total = by_lag.sum("feature", min_count=1)
    return float(total.sel(lag=int(total["lag"].max())) / total.max()) if float(total.max()) > 0 else np.nan


def suspicions(answers: Answers) -> tuple[Suspicion, ...]:
    """What makes the stored derivatives doubtful: near zero in most windows where they are largest, or by an output
    that is near zero.
    """
    if not answers.said or not answers.terms.plain:
        return ()
    share = float(answers["near-zero"]["near_zero"].max()) if "near-zero" in answers else 0.0
    return (*_rarely(answers), *of_outputs(share))


def _rarely(answers: Answers) -> tuple[Suspicion, ...]:
    """Of one output: of several, one may have derivatives where the others have none."""
    found = answers["mean-abs"]
    if "size-quantiles" not in answers or not of_one_target(found):
        return ()
    by_lag = influence(found).transpose("lag", "feature")
    lag, feature = np.unravel_index(int(np.nan_to_num(by_lag.values).argmax()), by_lag.shape)
    at = {"lag": int(by_lag["lag"].values[lag]), "feature": by_lag["feature"].values[feature]}
    mean = float(found["mean_abs"].squeeze(targets(found)).sel(at))
    quartile = float(answers["size-quantiles"]["size_quantile"].sel(at | {"at": 0.75}))
    return of_stored(f"{at['feature']} at lag {at['lag']}", mean, quartile)
