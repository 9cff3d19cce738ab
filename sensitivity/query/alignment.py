"""Lags counted back from each output's own step, where outputs stand at steps of the window.

A store has lags as they were computed: from the window's last step, or, with `max_lag`, from the output's own step.
Then some entries do not exist: inputs after the output of a causal model, inputs before the window. The store has zeros
there, which are no derivatives. Sums are kept apart by output step, and are moved along the lag once they are added up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ..errors import Refused
from .roles import Roles, labels_of_role, main_of, roles_of
from .selection import select
from .sums import EMPTY

STEP_LAG = "step_lag"  # the coordinate of a store that says where outputs stand
MEANINGS = {
    "output": "steps back from the output's own step",
    "window": "steps back from the window's last step",
}
WAYS = tuple(MEANINGS)
_SIZES = ("total_abs", "total_squares", "input_abs")
_LEFT = 1e-4  # of the sum of sizes: what rounding leaves of entries that do not exist


@dataclass(frozen=True)
class Alignment:
    """Where the entries of an answer, by its lags, are found in a store.

    step_lags: of each output step, the lag of its own step from the source's last one. steps: of the source. causal: an
    output depends on no later input. stored: the store's lags, which count from the output's own step `by_step`. to:
    what lags of the answer count from, "output" or "window". wanted: those lags; None: all that exist.
    """

    step_lags: tuple[int, ...]
    steps: int
    causal: bool
    stored: tuple[int, ...]
    by_step: bool
    to: str = "output"
    wanted: tuple[int, ...] | None = None

    @property
    def lags(self) -> tuple[int, ...]:
        """The lags of an answer, the oldest first; a negative lag is an input after the output."""
        if self.wanted is not None:
            return self.wanted
        every = tuple(range(self.steps - 1, -self.steps, -1))
        exists = (self._places(every) >= 0).any(axis=0)
        return tuple(np.array(every)[exists].tolist())

    @property
    def labels(self) -> xr.Variable:
        """The lags of an answer as labels, with what they count from."""
        later = "; < 0: ahead" if self.to == "output" and min(self.lags, default=0) < 0 else ""
        return xr.Variable("lag", np.array(self.lags, np.int64), {"long_name": f"{MEANINGS[self.to]}{later}"})

    @property
    def leaves_out(self) -> bool:
        """Whether inputs after the output are left out, whose derivatives are to be zero."""
        return self.causal and self.to == "output"

    @property
    def growth(self) -> float:
        """How many times the store's lags the answer's are."""
        return len(self.lags) / len(self.stored)

    @property
    def places(self) -> np.ndarray:
        """Where in the store each lag of the answer stands: int64 `(output_step, lag)`, −1 where no entry exists."""
        return self._places(self.lags)

    @property
    def reads(self) -> np.ndarray | None:
        """Which of the store's entries the answer is made of: bool `(output_step, lag)`, by the store's lags; None: all
        of them.
        """
        return None if self.wanted is None and not self.leaves_out else self._kept

    @property
    def _kept(self) -> np.ndarray:
        found, places = np.zeros((len(self.step_lags), len(self.stored)), bool), self.places
        rows, columns = np.nonzero(places >= 0)
        found[rows, places[rows, columns]] = True
        return found

    def _places(self, lags: tuple[int, ...]) -> np.ndarray:
        own, asked = np.array(self.step_lags, np.int64)[:, None], np.array(lags, np.int64)
        back = asked - own * (self.to == "window")  # from the output's own step
        exists = (back >= (0 if self.causal else -own)) & (back < self.steps - own)
        kept = back + own * (not self.by_step)
        places = pd.Index(self.stored).get_indexer(pd.Index((kept + 0 * own).ravel())).reshape(len(own), len(lags))
        return np.where(exists, places, -1)

    def relabelled(self, dataset: xr.Dataset) -> xr.Dataset:
        """A dataset that has the lags of the answer as labels, to be compared with another: its entries say nothing."""
        return dataset.isel(lag=np.zeros(len(self.lags), int)).assign_coords(lag=self.labels)

    def second(self, stored: Any) -> Alignment:
        """That of the second lag of second derivatives, whose labels are `stored`."""
        return replace(self, stored=tuple(np.atleast_1d(stored).tolist()), by_step=False, wanted=None)

    # ---- of arrays -----------------------------------------------------------------------------------

    def roles(self, roles: Roles) -> Roles:
        """Roles with the lag labels of an answer."""
        labels = {name: one.variable for name, one in roles.labels.coords.items()}
        labels["lag"] = self.labels
        if "lag_2" in labels:
            second = self.second(labels["lag_2"].values).labels
            labels["lag_2"] = xr.Variable("lag_2", second.values, second.attrs)
        return replace(roles, labels=xr.Dataset(coords=labels))

    def of_sums(self, sums: xr.Dataset, roles: Roles) -> xr.Dataset:
        """Sums by the lags of an answer; an entry that does not exist has the sum of no windows."""
        if self.leaves_out:
            _require_zero(sums, ~replace(self, wanted=None)._kept)
        known = {"roles": self.roles(roles)} if "roles" in sums.attrs else {}
        found = self.of_cells(sums, roles, {name: EMPTY.get(str(name), 0) for name in sums.data_vars})
        return found.assign_attrs(known)

    def of_cells(self, cells: xr.Dataset, roles: Roles, blanks: Mapping[Any, Any] | None = None) -> xr.Dataset:
        """Variables with dims of `CELL` by the lags of the answer; `blanks` by name, or NaN, where no entry exists."""
        blank: Mapping[Any, Any] = blanks or dict.fromkeys(cells.data_vars, np.nan)
        own = roles.own[3] if "lag_2" in roles.own[3] else ()
        sizes = {dim: roles.labels.sizes[dim] for dim in own}
        made: dict[Hashable, Any] = {}
        for name, field in cells.data_vars.items():
            variable = _moved(field.variable, "lag", self.places, blank[name])
            if "lag_2" in variable.dims:  # of products of two derivatives, both by the same lags
                variable = _moved(variable, "lag_2", self.places, blank[name])
            if own and "feature" in variable.dims and "output_step" in variable.dims:
                second = self.second(roles.labels["lag_2"].values)
                apart = variable.unstack(feature={f"of {dim}": size for dim, size in sizes.items()})
                moved = _moved(apart, "of lag_2", second.places, blank[name])
                at = [dim for dim in variable.dims if dim != "feature"]
                joined = moved.transpose(*at, *(f"of {dim}" for dim in own)).stack(feature=[f"of {dim}" for dim in own])
                variable = joined.transpose(*variable.dims)
            made[name] = variable
        kept = {name: one.variable for name, one in cells.coords.items() if not {*one.dims} & {"lag", "feature"}}
        return xr.Dataset(made, attrs=cells.attrs).assign_coords(kept | self._labels(cells, roles))

    def _labels(self, cells: xr.Dataset, roles: Roles) -> dict[str, Any]:
        labels: dict[str, Any] = {"lag": self.labels}
        labels |= {name: cells[name].variable for name in ("feature", "input_std") if name in cells.coords}
        if "lag_2" in roles.own[3]:
            mine = self.roles(roles)
            stored, sizes = roles.labels.sizes["lag_2"], [mine.labels.sizes[dim] for dim in roles.own[3]]
            labels["feature"] = labels_of_role(mine, "feature", sizes)
            if "input_std" in labels:
                apart = labels["input_std"].values.reshape(sizes[0], stored, sizes[2])[:, :1]
                labels["input_std"] = xr.Variable("feature", np.repeat(apart, sizes[1], 1).ravel())
        return labels

    def of_entries(self, found: xr.Dataset) -> xr.Dataset:
        """Single windows with the product's own dims, by the lags of the answer; NaN where no entry exists."""
        axes = {"lag": self} | ({"lag_2": self.second(found["lag_2"].values)} if "lag_2" in found.dims else {})
        made: dict[Hashable, Any] = {}
        for name, field in found.data_vars.items():
            made[name] = field.variable
            for dim in (dim for dim in axes if dim in field.dims):
                made[name] = _moved(made[name], dim, axes[dim].places, np.nan)
        kept = {name: one.variable for name, one in found.coords.items() if not {*one.dims} & {*axes}}
        labels = {dim: xr.Variable(dim, one.labels.values, one.labels.attrs) for dim, one in axes.items()}
        return xr.Dataset(made, attrs=found.attrs).assign_coords(kept | labels)

    def blanked(self, found: xr.Dataset) -> xr.Dataset:
        """An answer with NaN where no entry exists, also in variables that are not made of counts."""
        exists = xr.DataArray(self.places >= 0, dims=("output_step", "lag"))
        made = {
            name: one.where(exists).transpose(*one.dims)
            for name, one in found.data_vars.items()
            if {"output_step", "lag"} <= {*one.dims} and one.dtype.kind == "f"
        }
        return found.assign(made)


def _moved(variable: xr.Variable, dim: str, places: np.ndarray, blank: Any) -> xr.Variable:
    """A variable with lags along `dim`, by other lags: `places` `(output_step, lag)` as `Alignment.places` has them."""
    if dim not in variable.dims:
        return variable
    if "output_step" not in variable.dims:  # inputs, which all output steps share
        front = variable.dims[: variable.dims.index(dim)]
        variable = variable.set_dims({"output_step": len(places), **variable.sizes})
        variable = variable.transpose(*front, "output_step", ...)
    dims = tuple(map(str, variable.dims))
    axes = dims.index("output_step"), dims.index(dim)
    shape = [places.shape[1] if axis == axes[1] else size for axis, size in enumerate(variable.shape)]
    found = np.full(shape, blank, variable.dtype)
    into, values = (np.moveaxis(array, axes, (0, 1)) for array in (found, variable.values))
    for step, row in enumerate(places):
        there = np.flatnonzero(row >= 0)
        if len(there):
            into[step][_slice(there)] = values[step][_slice(row[there])]
    return xr.Variable(dims, found, variable.attrs)


def _slice(places: np.ndarray) -> Any:
    """Neighbours as a slice, which copies nothing."""
    together = (np.diff(places) == 1).all()
    return slice(int(places[0]), int(places[-1]) + 1) if together else places


def _require_zero(sums: xr.Dataset, left: np.ndarray) -> None:
    """Refuse to leave out derivatives that are not zero: a model was taken for one that sees no later inputs.

    left: what is left out, bool `(output_step, lag)`.
    """
    out = xr.DataArray(left, dims=("output_step", "lag"))
    for name in (name for name in _SIZES if name in sums):
        if float(sums[name].where(out, 0).sum()) > _LEFT * float(sums[name].sum()):
            raise Refused(
                "align",
                given="lags from the output's own step, of a store that has derivatives by inputs after the output",
                allowed="window: the run recorded its model as causal",
                remedy='ask with align="window" (on the command line: --align window)',
            )


# ---- at the door ---------------------------------------------------------------------------------------


def aligned(
    dataset: xr.Dataset,
    align: str | None = None,
    lags: Any = None,
    features: Any = None,
    outputs: Any = None,
    output_steps: Any = None,
) -> tuple[xr.Dataset, Alignment | None]:
    """The part of a dataset that a question is about, as `select` has it, and where its entries stand by the lags of
    the answer; None where they stand as the store has them. Raises `Refused`.

    align: what lags count from: "output", the output's own step, or "window", the window's last one; None: the first
    where it is known. The part has the store's lags that the answer is made of.
    """
    if align not in (None, *WAYS):
        raise Refused("align", given=repr(align), allowed=", ".join(WAYS), remedy="leave it out")
    known = _has_own_steps(dataset)
    if not known or (align == "window" and dataset[STEP_LAG].attrs["lags_from"] == "window"):
        if align == "output":
            raise Refused(
                "align",
                given="output, of a run whose outputs are not known to belong to steps of the window",
                allowed="window",
                remedy="leave it out: lags count back from the window's last step",
            )
        return select(dataset, lags, features, outputs, output_steps), None
    part = _with_dims(select(dataset, None, features, outputs, output_steps))
    found = _alignment(part, align or "output")
    if lags is not None:
        chosen = select(xr.Dataset(coords={"lag": found.labels}), lags)
        found = replace(found, wanted=tuple(chosen["lag"].values.tolist()))
        used = np.unique(found.places[found.places >= 0])
        part = part.isel(lag=_slice(used) if len(used) else slice(1))
        found = replace(found, stored=tuple(part["lag"].values.tolist()))
    return part, found


def _has_own_steps(dataset: xr.Dataset) -> bool:
    if STEP_LAG not in dataset.coords or main_of(dataset) not in dataset:
        return False
    roles = roles_of(dataset)
    return roles.of("output_step") == ("output_step",) and roles.of("lag") == ("lag",) and "lag" in dataset.coords


def _with_dims(dataset: xr.Dataset) -> xr.Dataset:
    """With output steps and lags as dims, of which one may have been chosen."""
    for dim in ("output_step", "lag"):
        if dim not in dataset[main_of(dataset)].dims:
            label, at = dataset[dim].item(), {name for name in (main_of(dataset), "prediction") if name in dataset}
            at -= {"prediction"} if dim == "lag" else set()
            at |= {"input"} if dim == "lag" and "input" in dataset else set()
            wide = {name: dataset[name].drop_vars(dim).expand_dims({dim: [label]}) for name in at}
            dataset = dataset.drop_vars([*at, dim]).assign(wide)
    if not dataset[STEP_LAG].dims:
        dataset = dataset.assign_coords(
            {STEP_LAG: ("output_step", [dataset[STEP_LAG].item()], dataset[STEP_LAG].attrs)}
        )
    return dataset


def _alignment(dataset: xr.Dataset, to: str) -> Alignment:
    known = dataset[STEP_LAG]
    return Alignment(
        step_lags=tuple(known.values.tolist()),
        steps=int(known.attrs["steps"]),
        causal=known.attrs["sees"] == "earlier",
        stored=tuple(dataset["lag"].values.tolist()),
        by_step=known.attrs["lags_from"] == "output",
        to=to,
    )


def counts_from(found: xr.Dataset | xr.DataArray) -> str:
    """What the lags of an answer count from: "output", "window", or "" where it does not say."""
    said = str(found["lag"].attrs.get("long_name", "")) if "lag" in found.coords else ""
    return next((to for to, meaning in MEANINGS.items() if said.startswith(meaning)), "")
