"""DGSM: derivative-based global sensitivity measures, as a screening index.

ν = E[J²] bounds the total Sobol index from above, S_tot ≤ C·ν / Var(y), by the Poincaré inequality, C being the
constant of the input's distribution (Sobol & Kucherenko 2009; Lamboni et al. 2013, arXiv 1202.0943; Roustant et al.
2017, arXiv 1612.03689). It holds for inputs that are independent of each other. Lags of a series are not, so the bound
is no more than a way to screen: what is far below 1 hardly matters, what is not may or may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import xarray as xr

from ..errors import Refused, suggested
from .naming import COUNT, Words, escaped
from .statistics import Statistic, variance

NOTE = (
    "screening index: an upper bound of the total Sobol index if inputs were independent of each other and distributed "
    "as stated; lags of a series are not independent"
)
# By name: number of parameters, the constant from these, and the constant in variances where none are given.
DISTRIBUTIONS: dict[str, tuple[int, Callable[..., float], float]] = {
    "normal": (1, lambda std: std**2, 1.0),
    "uniform": (2, lambda low, high: (max(high - low, 0) / math.pi) ** 2, 12 / math.pi**2),
    "exponential": (1, lambda scale: 4 * scale**2, 4.0),
}
Distribution = str | Mapping[str, str]


def dgsm(distribution: Distribution = "normal") -> Statistic:
    """`nu` = mean J², in squared units of J; `constant` C; `bound` = C·ν / Var(y), each of every J.

    distribution: of the inputs: "normal", "uniform" or "exponential", with the standard deviation that the feature has
    in the series, or with parameters: "normal:STD", "uniform:LOW:HIGH", "exponential:SCALE"; or one for each feature,
    by name, and "*" for the others.
    """
    by_feature = {"*": distribution} if isinstance(distribution, str) else {"*": "normal", **distribution}
    constants = {feature: _constant(text) for feature, text in by_feature.items()}
    needs = ("count", "total_squares", "target_count", "target_total", "target_squares")
    finish, words = partial(_finish, constants=constants), _words(by_feature)
    return Statistic("dgsm", needs, finish, ("count", "constant"), only="derivatives", words=words)


def _words(by_feature: Mapping[str, str]) -> Words:
    others = " for the others" if len(by_feature) > 1 else ""
    told = ", ".join(text + others if name == "*" else f"{name}={text}" for name, text in by_feature.items())
    assumed = f"the distribution assumed of the inputs: {escaped(told)}"
    return COUNT | {
        "nu": ("ν, mean squared {noun} over windows", "({unit})²"),
        "constant": (f"constant C of the Poincaré inequality, from {assumed}", "squared units of the {source}"),
        "bound": (
            f"C·ν / Var(output): a bound of the total Sobol index if inputs were independent, with {assumed}",
            "1",
        ),
    }


def _constant(text: str) -> tuple[float | None, float]:
    """The constant, or None and the constant in variances."""
    name, *given = text.split(":")
    try:
        wanted, known, relative = DISTRIBUTIONS[name]
        if not given:
            return None, relative
        values = [float(part) for part in given]
        if len(values) == wanted and np.isfinite(values).all() and (found := known(*values)) > 0:
            return found, relative
    except (KeyError, ValueError):
        pass
    raise Refused(
        "distribution",
        given=text,
        allowed="normal, uniform, exponential, or with parameters normal:STD, uniform:LOW:HIGH, exponential:SCALE",
        remedy="state what the inputs are distributed like, as in rain=exponential",
    )


def _finish(sums: xr.Dataset, constants: Mapping[str, tuple[float | None, float]]) -> xr.Dataset:
    features = [str(name) for name in sums["feature"].values]
    unknown = [name for name in constants if name not in ("*", *features)]
    if unknown:
        raise Refused(
            "distribution",
            given=unknown[0],
            allowed=", ".join(features),
            remedy=suggested(unknown, features, "name one of the features, or *"),
        )
    chosen = [constants.get(name, constants["*"]) for name in features]
    known = xr.DataArray([math.nan if one[0] is None else one[0] for one in chosen], dims="feature")
    variances = np.square(sums["input_std"].reset_coords(drop=True).drop_vars("feature"))
    constant = known.fillna(xr.DataArray([one[1] for one in chosen], dims="feature") * variances)
    nu = sums["total_squares"] / sums["count"].where(sums["count"] > 0)
    windows = sums["target_count"].where(sums["target_count"] > 0)
    varied = variance(sums["target_squares"] / windows, sums["target_total"] / windows)
    return xr.Dataset(
        {
            "count": sums["count"],
            "nu": nu,
            "constant": constant.broadcast_like(nu),
            "bound": nu * constant / varied.where(varied > 0),
        },
        attrs={"note": NOTE},
    )
