"""Second derivatives by pairs of sources, such as features: each pair counts once, whatever the order of the two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from .roles import PRODUCTS, Roles, labels_of_role, roles_of


@dataclass(frozen=True)
class Pairs:
    """The pairs of a product by two sources. whole: its roles, whose `feature` runs through first, second lag and
    second; roles: those of what has one entry for each pair, whose `feature` runs through first and second.

    A pair of two stands where its first order is, and the other order's place is empty: `(rain, heat)` holds both
    H by rain and heat and H by heat and rain, `(heat, rain)` nothing.
    """

    whole: Roles
    roles: Roles

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """How many labels of the first, of the second's lags together, and of the second."""
        first, *between, second = (self.whole.labels.sizes[dim] for dim in self.whole.of("feature"))
        return first, math.prod(between), second

    @cached_property
    def labels(self) -> tuple[list[Any], list[Any]]:
        """Of the first and of the second."""
        first, second = (self.roles.labels[dim].values.tolist() for dim in self.roles.of("feature"))
        return first, second

    @cached_property
    def other(self) -> np.ndarray:
        """Where the other order of each pair stands, int64 `(first × second)`; -1 where nowhere or in its place."""
        return other_orders(*self.labels)

    @cached_property
    def empty(self) -> np.ndarray:
        """Which places are of a pair that stands elsewhere: bool `(first × second)`."""
        return stand_elsewhere(*self.labels)

    @cached_property
    def orders(self) -> xr.DataArray:
        """2 for pairs of two, 1 for those of one with itself, `(feature)`."""
        return self._by_pair(np.array([1 if a == b else 2 for a, b in product(*self.labels)]))

    def added(self, field: xr.DataArray) -> xr.DataArray:
        """`(…, feature)` of the whole → by pair: sums over second lags and both orders; 0 where empty."""
        found = self._apart(field).sum(axis=-2)
        return self._by_pair(self._both(found.reshape(*found.shape[:-2], -1), np.add), field)

    def most(self, field: xr.DataArray) -> xr.DataArray:
        """The same of the largest of them."""
        found = self._apart(field).max(axis=-2)
        return self._by_pair(self._both(found.reshape(*found.shape[:-2], -1), np.maximum), field)

    def first(self, field: xr.DataArray) -> xr.DataArray:
        """Of what all second lags and both orders have in common."""
        found = self._apart(field)[..., 0, :]
        return self._by_pair(found.reshape(*found.shape[:-2], -1), field)

    def mean(self, field: xr.DataArray) -> xr.DataArray:
        """The mean over second lags and both orders of what is not NaN; NaN where empty."""
        known = field.notnull()
        count = self.added(known.astype(int))
        return self.added(field.where(known, 0)) / count.where(count > 0)

    def _apart(self, field: xr.DataArray) -> Any:
        values = field.transpose(..., "feature").data
        return values.reshape(*values.shape[:-1], *self.shape)

    def _both(self, values: Any, together: Any) -> Any:
        turned = np.where(self.other >= 0, values[..., self.other], 0)
        return np.where(self.empty, 0, together(values, turned))

    def _by_pair(self, values: Any, like: xr.DataArray | None = None) -> xr.DataArray:
        sizes = [self.roles.labels.sizes[dim] for dim in self.roles.of("feature")]
        labels = labels_of_role(self.roles, "feature", sizes)
        front = [] if like is None else [dim for dim in like.dims if dim != "feature"]
        coords = {} if like is None else {dim: like[dim].variable for dim in front if dim in like.coords}
        return xr.DataArray(values, dims=(*front, "feature"), coords=coords | {"feature": labels})


def other_orders(first: Sequence[Any], second: Sequence[Any]) -> np.ndarray:
    at = {pair: place for place, pair in enumerate(product(first, second))}
    return np.array([-1 if a == b else at.get((b, a), -1) for a, b in at], np.int64)


def stand_elsewhere(first: Sequence[Any], second: Sequence[Any]) -> np.ndarray:
    """Which places of a matrix of pairs are empty, as the other order comes before: bool `(first × second)`."""
    other = other_orders(first, second)
    return (other >= 0) & (other < np.arange(len(other)))


def pairs_of(found: xr.Dataset) -> Pairs | None:
    """The pairs of sums, or of an answer, that is by two sources and not by pairs already; None where it is not."""
    if "roles" not in found.attrs or PRODUCTS[roles_of(found).product].sources < 2:
        return None
    roles = roles_of(found)
    own = roles.of("feature")
    if found.sizes.get("feature") != math.prod(roles.labels.sizes[dim] for dim in own):
        return None
    labels = roles.labels.drop_vars(own[1:-1])
    return Pairs(roles, replace(roles, own=(*roles.own[:3], (own[0], own[-1])), labels=labels))


def matrix_of(found: xr.Dataset) -> tuple[str, str] | None:
    """The two dims of sources that an answer has, and no second lags; None where it has others."""
    roles = roles_of(found)
    there = [
        dim for dim in roles.of("feature") if dim in (roles.labels.coords if "roles" in found.attrs else found.dims)
    ]
    return (there[0], there[1]) if len(there) == 2 and there[1] == f"{there[0]}_2" else None


def by_pairs(found: xr.Dataset) -> xr.Dataset:
    """A statistic of means by pair: the mean over second lags and both orders. It stays as it is without pairs."""
    pairs = pairs_of(found)
    if pairs is None:
        return found
    std = {"input_std": pairs.first(found["input_std"].reset_coords(drop=True))} if "input_std" in found.coords else {}
    means = {name: pairs.mean(found[name]) for name in map(str, found.data_vars) if name != "count"}
    made = xr.Dataset({"count": pairs.most(found["count"]), **means}, coords=std)
    return made.assign_attrs(found.attrs | {"roles": pairs.roles})


def each_once(found: xr.Dataset) -> xr.Dataset:
    """An answer by pair without the empty places of the other order."""
    dims = matrix_of(found)
    if dims is None:
        return found
    labels = found.attrs["roles"].labels
    return found.isel(feature=~stand_elsewhere(*(labels[dim].values.tolist() for dim in dims)))
