"""What is made of sums: each statistic names the sums it needs and is a function of them, by dimension names.

J is the derivative of an output by an input at a lag, in units of the output per unit of the feature; all statistics
are over windows. `sums` is a dataset of `sums.DIMS`, with any dimensions in front, such as groups and resamples, and
`input_std` along feature: the feature's standard deviation over the series.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xarray as xr

from ..errors import Refused
from . import histogram
from .naming import COUNT, Words
from .pairs import pairs_of

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HELD = (0.5, 0.9, 0.99)
COMPONENTS = 10
EXTREMES = ("min", "max")
EACH_ONCE = "only the upper triangle of pairs is filled; each value is for both orders of the pair"
ROUNDING = 1e-12  # of sums of squares in float64, relative


@dataclass(frozen=True)
class Statistic:
    """needs: names of sums. finish: makes its variables of them. sure: variables that sampling leaves as they are, or
    of which it cannot say; ending: of the names of all others. sides: of a difference, a dimension of the sums and two
    places in it. only: as `Roles.require` has it. words: what its variables are called, as `naming` fills them.
    """

    name: str
    needs: tuple[str, ...]
    finish: Callable[[xr.Dataset], xr.Dataset]
    sure: tuple[str, ...] = ("count", "input_std", *EXTREMES)  # resamples never surpass an extreme
    ending: str = ""
    sides: tuple[str, tuple[int, int]] | None = None
    only: str = ""
    words: Words = field(default_factory=dict, compare=False)


def _over(total: xr.DataArray, count: xr.DataArray) -> xr.DataArray:
    """NaN where nothing counts."""
    return total / count.where(count > 0)


def variance(mean_square: xr.DataArray, mean: xr.DataArray) -> xr.DataArray:
    """Zero where it is less than what rounding leaves of the difference: where values are the same to six digits."""
    found = mean_square - np.square(mean)
    return found.where(~(found < ROUNDING * mean_square), 0)


def _mean(sums: xr.Dataset) -> xr.Dataset:
    return xr.Dataset({"count": sums["count"], "mean": _over(sums["total"], sums["count"])})


def _mean_abs(sums: xr.Dataset) -> xr.Dataset:
    return xr.Dataset({"count": sums["count"], "mean_abs": _over(sums["total_abs"], sums["count"])})


def _rms(sums: xr.Dataset) -> xr.Dataset:
    return xr.Dataset({"count": sums["count"], "rms": np.sqrt(_over(sums["total_squares"], sums["count"]))})


def _std(sums: xr.Dataset) -> xr.Dataset:
    found = variance(_over(sums["total_squares"], sums["count"]), _over(sums["total"], sums["count"]))
    return xr.Dataset({"count": sums["count"], "std": np.sqrt(found)})


def _min(sums: xr.Dataset) -> xr.Dataset:
    return xr.Dataset({"count": sums["count"], "min": sums["least"].where(sums["count"] > 0)})


def _max(sums: xr.Dataset) -> xr.Dataset:
    return xr.Dataset({"count": sums["count"], "max": sums["largest"].where(sums["count"] > 0)})


def _share_positive(sums: xr.Dataset) -> xr.Dataset:
    positive, negative = (_over(sums[name], sums["count"]) for name in ("positive", "negative"))
    return xr.Dataset(
        {"count": sums["count"], "share_positive": positive, "sign_agreement": np.maximum(positive, negative)}
    )


def _joined(*finishes: Callable[[xr.Dataset], xr.Dataset]) -> Callable[[xr.Dataset], xr.Dataset]:
    return partial(_all, finishes=finishes)


def _all(sums: xr.Dataset, finishes: tuple[Callable[[xr.Dataset], xr.Dataset], ...]) -> xr.Dataset:
    return xr.merge([finish(sums) for finish in finishes], join="exact", compat="override")


def _quantiles(sums: xr.Dataset, at: Sequence[float]) -> xr.Dataset:
    """`quantile`: off by `histogram.ERROR` of itself at most, or by 2⁻²³ of the largest |J|; `error` says how much."""
    dims = sums["count"].dims
    values = histogram.quantile(sums["histogram"].values, sums["tops"].values, np.array(at), sums.attrs["dtype"])
    found = xr.DataArray(values, dims=(*dims, "at"), coords={"at": np.array(at)})
    bound = abs(found) * histogram.ERROR + histogram.smallest(sums["tops"], sums.attrs["dtype"])
    return xr.Dataset({"count": sums["count"], "quantile": found, "error": bound.where(sums["count"] > 0)})


def _importance(sums: xr.Dataset) -> xr.Dataset:
    std = sums["input_std"].reset_coords(drop=True) if "input_std" in sums.coords else None
    pairs = pairs_of(sums)
    sums = sums.drop_vars("input_std", errors="ignore")
    count, total, windows = sums["count"].sum("lag"), sums["total_abs"].sum("lag"), sums["count"].max("lag")
    orders, attrs = xr.DataArray(1), {}
    if pairs is not None:
        count, total, windows = pairs.added(count), pairs.added(total), pairs.most(windows)
        std = None if std is None else pairs.first(std)
        orders, attrs = pairs.orders, {"roles": pairs.roles, "pairs": EACH_ONCE}
    mean_abs = _over(total, count)
    importance = (mean_abs if std is None else mean_abs * std) * orders
    whole = importance.sum("feature")
    return xr.Dataset(
        {
            "count": windows,
            "mean_abs": mean_abs,
            **({} if std is None else {"input_std": std.broadcast_like(mean_abs)}),
            "importance": importance,
            "share": importance / whole.where(whole > 0),
        },
        attrs=attrs,
    )


def _effective_memory(sums: xr.Dataset, held: Sequence[float]) -> xr.Dataset:
    mean_abs = nearest_first(_over(sums["total_abs"], sums["count"]))
    known, there = mean_abs.fillna(0), mean_abs.notnull()
    share = known.cumsum("lag") / known.sum("lag")
    lags = [((share < part * (1 - 1e-12)) & there).sum("lag") + 1 for part in held]
    found = xr.concat(lags, xr.Variable("held", list(held))).transpose(..., "held")
    return xr.Dataset({"count": sums["count"].max("lag"), "effective_memory": found.where(share.notnull().all("lag"))})


def nearest_first(by_lag: xr.DataArray) -> xr.DataArray:
    """Lags by their distance from lag 0: the newest first, and of an output's own step both ways."""
    return by_lag.isel(lag=np.argsort(np.abs(by_lag["lag"].values), kind="stable"))


def _gradient_input(sums: xr.Dataset) -> xr.Dataset:
    count = sums["input_count"]
    return xr.Dataset(
        {"count": count, "mean": _over(sums["input_total"], count), "mean_abs": _over(sums["input_abs"], count)}
    )


def _elasticity(sums: xr.Dataset) -> xr.Dataset:
    count = sums["elastic_count"]
    return xr.Dataset(
        {"count": count, "mean": _over(sums["elastic_total"], count), "mean_abs": _over(sums["elastic_abs"], count)}
    )


_MEANS = ("count", "total", "total_abs", "total_squares")
_MEAN: Words = {"mean": ("mean {noun} over windows, mean {letter}", "{unit}")}
_MEAN_ABS: Words = {"mean_abs": ("mean absolute {noun} over windows, mean |{letter}|", "{unit}")}
_RMS: Words = {"rms": ("root of the mean squared {noun} over windows", "{unit}")}
_STD: Words = {"std": ("standard deviation of the {noun} over windows", "{unit}")}
_MIN: Words = {"min": ("smallest {noun} over windows", "{unit}")}
_MAX: Words = {"max": ("largest {noun} over windows", "{unit}")}
_SHARES: Words = {
    "share_positive": ("share of windows whose {noun} is positive", "1"),
    "sign_agreement": ("share of windows whose {noun} has the more frequent sign", "1"),
}
_QUANTILE: Words = {
    "quantile": ("quantile of the {noun} over windows", "{unit}"),
    "error": ("upper bound of the error of the quantile, which a histogram gives", "{unit}"),
}
_SHARE: Words = {
    "mean_abs": ("mean absolute {noun} over {over}, mean |{letter}|", "{unit}"),
    "input_std": ("standard deviation of the {source} over the series{of_both}", "{source_unit}"),
    "importance": ("importance: mean |{letter}| over {over}{std}", "{scaled}"),
    "share": ("share of the importance of {features}", "1"),
}
_HELD: Words = {
    "effective_memory": (
        "number of lags, the nearest to lag 0 first, that hold this share of the sum of mean |{letter}|",
        "lags",
    )
}
_PRODUCT: Words = {
    "mean": ("mean of {noun} × input over windows", "{output}"),
    "mean_abs": ("mean absolute {noun} × input over windows", "{output}"),
}
_RELATIVE: Words = {
    "mean": ("mean elasticity over windows: {noun} × input / prediction", "1"),
    "mean_abs": ("mean absolute elasticity over windows: |{noun} × input / prediction|", "1"),
    "near_zero": ("share of windows whose |prediction| is below 1 % of its standard deviation", "1"),
}


def mean() -> Statistic:
    """`mean` J `(output_step, output, lag, feature)`."""
    return Statistic("mean", ("count", "total"), _mean, words=COUNT | _MEAN)


def mean_abs() -> Statistic:
    """`mean_abs`: mean |J| `(output_step, output, lag, feature)`."""
    return Statistic("mean-abs", ("count", "total_abs"), _mean_abs, words=COUNT | _MEAN_ABS)


def rms() -> Statistic:
    """`rms`: the root of the mean J² `(output_step, output, lag, feature)`."""
    return Statistic("rms", ("count", "total_squares"), _rms, words=COUNT | _RMS)


def std() -> Statistic:
    """`std`: the standard deviation of J over windows (divided by their number)."""
    return Statistic("std", ("count", "total", "total_squares"), _std, words=COUNT | _STD)


def minimum() -> Statistic:
    """`min`: the least J. Without intervals: resamples never surpass an extreme."""
    return Statistic("min", ("count", "least"), _min, words=COUNT | _MIN)


def maximum() -> Statistic:
    """`max`: the largest J. Without intervals, as `min`."""
    return Statistic("max", ("count", "largest"), _max, words=COUNT | _MAX)


def share_positive() -> Statistic:
    """`share_positive`: of windows with J > 0; `sign_agreement`: of those with the more frequent sign."""
    return Statistic("share-positive", ("count", "positive", "negative"), _share_positive, words=COUNT | _SHARES)


def summary() -> Statistic:
    """All of `mean`, `mean_abs`, `rms`, `std`, `min`, `max`, `share_positive`, `sign_agreement`."""
    finish = _joined(_mean, _mean_abs, _rms, _std, _min, _max, _share_positive)
    words = COUNT | _MEAN | _MEAN_ABS | _RMS | _STD | _MIN | _MAX | _SHARES
    return Statistic("summary", (*_MEANS, "least", "largest", "positive", "negative"), finish, words=words)


def quantiles(at: Sequence[float] = QUANTILES) -> Statistic:
    """`quantile` of J `(…, at)`, and its largest possible `error`, in units of J.

    From histograms with bins of equal relative width: within 1.6 % of the value that NumPy's "inverted_cdf" gives, or
    within 2⁻²³ of the largest |J|.
    """
    chosen = tuple(sorted(at))
    if not chosen or not all(0 <= part <= 1 for part in chosen):
        raise Refused("at", given=list(at), allowed="shares between 0 and 1", remedy="write 0.05,0.5,0.95")
    return Statistic(
        "quantiles",
        ("count", "total", "total_abs", "histogram", "tops"),
        partial(_quantiles, at=chosen),
        ("count", "error"),
        words=COUNT | _QUANTILE,
    )


def lag_profile() -> Statistic:
    """`mean` J, `mean_abs` |J| and `rms` J `(output_step, output, lag, feature)`."""
    return Statistic("lag-profile", _MEANS, _joined(_mean, _mean_abs, _rms), words=COUNT | _MEAN | _MEAN_ABS | _RMS)


def importance() -> Statistic:
    """What each feature moves the output by, typically `(output_step, output, feature)`.

    `mean_abs` |J| over windows and lags; `input_std`; `importance` = mean_abs × input_std, in units of the output;
    `share`: importance by its sum over the features that are asked for. Attributions, and what is by no input, are
    taken as they are: without `input_std`, importance is mean_abs.

    Of second derivatives it is a matrix `(output_step, output, feature, feature_2)` with each pair of features once,
    where the first order of its two stands; the other order's place is NaN, with count 0. With H of windows w and lags
    k, m: mean_abs of (i, j) is the mean of |H_w,(k,i),(m,j)| and |H_w,(k,j),(m,i)| over w, k and m; `input_std` is
    std_i × std_j; importance is mean_abs × input_std of a feature with itself, and 2 × that of two features, whose
    both orders move the output.
    """
    return Statistic("importance", ("count", "total_abs"), _importance, words=COUNT | _SHARE)


def effective_memory(held: Sequence[float] = HELD) -> Statistic:
    """`effective_memory`: how many lags, the nearest to lag 0 first, hold so much of the sum of mean |J| over lags.

    `(output_step, output, feature, held)`, in lags; NaN where J is zero throughout.
    """
    chosen = tuple(sorted(held))
    if not chosen or not all(0 < part <= 1 for part in chosen):
        raise Refused("held", given=list(held), allowed="shares above 0, up to 1", remedy="write 0.5,0.9,0.99")
    finish, words = partial(_effective_memory, held=chosen), COUNT | _HELD
    return Statistic("effective-memory", ("count", "total_abs"), finish, only="lags", words=words)


def gradient_input() -> Statistic:
    """Gradient × input: `mean` and `mean_abs` of J·x `(output_step, output, lag, feature)`, in units of the output.

    x is the input as the series has it, so a feature's zero must mean something.
    """
    needs = ("input_count", "input_total", "input_abs")
    return Statistic("gradient-input", needs, _gradient_input, only="derivatives", words=COUNT | _PRODUCT)


def elasticity() -> Statistic:
    """`mean` and `mean_abs` of J·x/y: by how many per cent y moves for one per cent of x.

    Over windows whose prediction y is not zero. Where y comes near zero a few windows may determine the mean:
    `near_zero` `(output_step, output)` is the share of windows, of all groups, whose |y| is below 1 % of its standard
    deviation.
    """
    needs = ("elastic_count", "elastic_total", "elastic_abs")
    return Statistic("elasticity", needs, _elasticity, only="derivatives", words=COUNT | _RELATIVE)
