"""What the dims of a product stand for: every store is asked as one of derivatives of outputs by lagged features.

At the door a dataset becomes one with a variable `jacobian` `(time, output_step, output, lag, feature)`: dims that it
lacks have length 1, another dim plays the part of each, and several together are one that runs through all their
labels. Answers get the store's own dims and labels back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from ..errors import Refused
from .sums import CELL

JACOBIAN = "jacobian"
CALLED = "called"  # attribute of labels: of what they are, where it is not of what they stand for
INPUT = ("lag", "feature")
SOURCES = (INPUT, ("source_step", "unit"), ("parameter",))
STDS = {"feature": "input_std", "feature_2": "input_std_2"}
ASIDE = {"output_step": "predicted_step", "output": "predicted_output"}  # of predictions, beside other targets


@dataclass(frozen=True)
class Product:
    """Dims of a product: `targets` in place of output_step and output, one `sources` after the other, then `along`.
    scaled: it is per unit of its sources. Along weights is only what is by weights.
    """

    targets: tuple[tuple[str, ...], tuple[str, ...]] = (("output_step",), ("output",))
    sources: int = 1
    along: tuple[str, ...] = ()
    scaled: bool = True


PRODUCTS = {
    JACOBIAN: Product(),
    "smooth_gradients": Product(),
    "integrated_gradients": Product(scaled=False),
    "expected_gradients": Product(scaled=False),
    "vjp": Product(((), ("vector",))),
    "jvp": Product(sources=0, along=("direction",)),
    "hessian": Product(sources=2),
    "hvp": Product((("output_step",), ("output", "direction"))),
    "gradient_norm": Product(sources=0, along=("weight",)),
    "gram": Product(sources=0, along=("output_step_2", "output_2")),
}


@dataclass(frozen=True)
class Roles:
    """own: for each of `CELL` the dims that play its part, in order."""

    product: str
    own: tuple[tuple[str, ...], ...]
    labels: xr.Dataset = field(default_factory=xr.Dataset, compare=False)

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(dim for several in self.own for dim in several)

    @property
    def plain(self) -> bool:
        """Whether it is canonical already: derivatives of outputs by inputs."""
        return self.product == JACOBIAN and self.by_input

    @property
    def by_input(self) -> bool:
        """Whether each entry belongs to one lag of one feature."""
        return self.own[2:] == (("lag",), ("feature",))

    def of(self, role: str) -> tuple[str, ...]:
        return self.own[CELL.index(role)]

    def require(self, name: str, only: str) -> None:
        """Refuse a statistic that is `only` of "derivatives" by the input, of "rows", by whatever they are, or of
        "lags", for what is none of these.
        """
        fits = {"derivatives": self.plain, "rows": self.product == JACOBIAN, "lags": self.of("lag") == ("lag",)}
        if only and not fits[only]:
            what = {
                "derivatives": "derivatives of outputs by the input",
                "rows": "derivatives of outputs",
                "lags": "a product with lags",
            }[only]
            raise Refused(
                "statistic",
                given=f"{name} of {self}",
                allowed=f"{name} of {what}",
                remedy="ask for importance, mean-abs, summary or quantiles, or run a job of that product",
            )

    def __str__(self) -> str:
        return f"{self.product} ({', '.join(self.dims)})"


def main_of(dataset: xr.Dataset) -> str:
    """The variable that a run is about."""
    return JACOBIAN if "roles" in dataset.attrs else str(dataset.attrs.get("product", JACOBIAN))


def roles_of(dataset: xr.Dataset) -> Roles:
    """Of a store's dataset, a selection of it, an answer, or what these became at the door."""
    if "roles" in dataset.attrs:
        return dataset.attrs["roles"]
    name = main_of(dataset)
    if name not in PRODUCTS:
        raise Refused("product", given=name, allowed=", ".join(PRODUCTS), remedy="open it with the version it is from")
    if "dims" in dataset.attrs:
        names = set(dataset.attrs["dims"].split())
    else:
        known = dataset.variables if name in dataset else {}
        names = {*known[name].dims, *(key for key in dataset.coords if not known[key].dims)} if known else set()
    own = own_dims(PRODUCTS[name], {str(one) for one in names})
    dims = [dim for several in own for dim in several if dim in dataset.coords]
    return Roles(name, own, xr.Dataset(coords={dim: dataset[dim].variable for dim in dims}))


def own_dims(of: Product, names: set[str]) -> tuple[tuple[str, ...], ...]:
    """For each of `CELL`, of a dataset with these `names`: several of a second source are one with the first's."""
    source = next((dims for dims in SOURCES[1:] if {*dims} & names), INPUT) if of.sources else ()
    second = tuple(f"{dim}_2" for dim in source) if of.sources > 1 else ()
    along = tuple(dim for dim in of.along if dim != "weight" or dim in names)
    return (*of.targets, source[:-1], (*source[-1:], *second, *along))


def known_roles(dataset: xr.Dataset) -> dict[str, Any]:
    """The attribute by which what is made of it gets the store's own dims back."""
    return {"roles": dataset.attrs["roles"]} if "roles" in dataset.attrs else {}


def scale_of(dataset: xr.Dataset) -> xr.DataArray | None:
    """What makes its entries comparable: float64, by feature, of second derivatives by both; None where nothing does.

    The standard deviation of the feature, or the product of both.
    """
    roles = roles_of(dataset)
    needed = [STDS[dim] for dim in roles.dims if dim in STDS]
    if not needed or not PRODUCTS[roles.product].scaled or any(name not in dataset.coords for name in needed):
        return None
    return math.prod(dataset[name].reset_coords(drop=True).astype(np.float64).compute() for name in needed)  # type: ignore[return-value]


# ---- at the door -------------------------------------------------------------------------------------


def as_jacobian(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset with its main variable as `jacobian` and what else there is along time alone; no data is read.

    `input_std` along feature is what entries are scaled by, if by anything. Those of the input are given back as they
    are.
    """
    roles = roles_of(dataset)
    main = main_of(dataset)
    if roles.plain or "roles" in dataset.attrs or main not in dataset or "time" not in dataset[main].dims:
        return dataset
    variable = _widened(dataset[main].variable, [dim for dim in roles.dims if dim not in dataset[main].dims])
    shape = [[variable.sizes[dim] for dim in several] for several in roles.own]
    sizes = [math.prod(several) for several in shape]
    others = {dim: -1 for dim in roles.dims if dim != "output_step"}
    made = variable.transpose("time", *roles.dims).chunk(others)
    labels = {dim: labels_of_role(roles, dim, shape[place]) for place, dim in enumerate(CELL)}
    whole = dataset.drop_vars([main]).drop_dims(set(dataset.dims) - {"time"})
    whole = whole.drop_vars([name for name in (*CELL, *roles.dims, *STDS.values()) if name in whole.variables])
    whole = whole.assign({JACOBIAN: (("time", *CELL), _reshaped(made.data, bool(roles.own[0]), sizes))})
    if "prediction" in dataset:
        whole = whole.assign(prediction=_aside(dataset["prediction"].variable, roles))
    scale = scale_of(dataset)
    if scale is not None:
        frame = xr.DataArray(np.ones(shape[3]), dims=roles.own[3])
        flat = (frame * scale).transpose(*roles.own[3]).values.reshape(-1)
        labels["input_std"] = xr.Variable("feature", flat)
    named = Roles(roles.product, roles.own, _labelled(roles, variable))
    return whole.assign_coords(labels).assign_attrs(roles=named)


def _widened(variable: xr.Variable, dims: Sequence[str]) -> xr.Variable:
    """With further dims of length 1."""
    return xr.Variable((*variable.dims, *dims), variable.data[(..., *[None] * len(dims))], variable.attrs)


def _labelled(roles: Roles, variable: xr.Variable) -> xr.Dataset:
    """Labels of all dims: numbers where there are none, and that alone that was chosen."""
    known = {dim: roles.labels[dim].variable for dim in roles.dims if dim in roles.labels.coords}
    whole = {dim: known.get(dim, xr.Variable(dim, np.arange(variable.sizes[dim]))) for dim in roles.dims}
    return xr.Dataset(coords={dim: one if one.dims else _widened(one, [dim]) for dim, one in whole.items()})


def _reshaped(data: da.Array, stepped: bool, sizes: Sequence[int]) -> da.Array:
    """`(time, *own dims)` → `(time, *CELL)`, block by block: only time and steps are cut."""
    if data.ndim == 1 + len(CELL) and data.shape[2:] == tuple(sizes[1:]):
        return data
    steps = data.chunks[1] if stepped else (1,)
    chunks = (data.chunks[0], steps, *((size,) for size in sizes[1:]))
    how = {"dtype": data.dtype, "chunks": chunks, "meta": np.empty((0,) * 5, data.dtype)}
    lost, gained = [*range(5, data.ndim)], [*range(data.ndim, 5)]
    return da.map_blocks(_block, data, stepped=stepped, sizes=list(sizes[1:]), drop_axis=lost, new_axis=gained, **how)


def _block(block: np.ndarray, stepped: bool, sizes: list[int]) -> np.ndarray:
    return block.reshape(len(block), block.shape[1] if stepped else 1, *sizes)


def _aside(prediction: xr.Variable, roles: Roles) -> xr.Variable:
    """With dims of its own, for conditions to ask for, where its targets are others than those of the product."""
    if roles.own[:2] == (CELL[:1], CELL[1:2]):
        return _widened(prediction, [dim for dim in CELL[:2] if dim not in prediction.dims])
    return xr.Variable([ASIDE.get(str(dim), dim) for dim in prediction.dims], prediction.data, prediction.attrs)


def labels_of_role(roles: Roles, role: str, sizes: Sequence[int]) -> xr.Variable:
    """Labels of a role: those of the dim that plays it, or a text for each combination of several."""
    dims = roles.of(role)
    if len(dims) == 1:
        label = roles.labels[dims[0]].variable if dims[0] in roles.labels.coords else np.arange(sizes[0])
        attrs = dict(getattr(label, "attrs", {})) | ({} if dims == (role,) else {CALLED: dims[0].replace("_", " ")})
        return xr.Variable(role, np.atleast_1d(getattr(label, "values", label)), attrs)
    if not dims:
        label = np.array([roles.product.replace("_", " ")], object) if role == "feature" else np.zeros(1, int)
        return xr.Variable(role, label, {CALLED: ""})
    known = roles.labels.coords
    several = [
        np.atleast_1d(known[dim].values if dim in known else np.arange(n)) for dim, n in zip(dims, sizes, strict=True)
    ]
    texts = [_text(dims, labels) for labels in product(*(one.tolist() for one in several))]
    return xr.Variable(role, np.array(texts, object), {CALLED: f"{dims[0]} pair"})


def in_words(dim: str) -> str:
    """`lag_2`: second lag."""
    return ("second " * dim.endswith("_2") + dim.removesuffix("_2")).replace("_", " ")


def _text(dims: Sequence[str], labels: Sequence[Any]) -> str:
    """`rain × heat, second lag 3`"""
    named = " × ".join(str(label) for label in labels if not isinstance(label, int))
    counted = [f"{in_words(dim)} {label}" for dim, label in zip(dims, labels, strict=True) if isinstance(label, int)]
    return ", ".join([*([named] if named else []), *counted])


# ---- and back ----------------------------------------------------------------------------------------


def restored(found: xr.Dataset) -> xr.Dataset:
    """An answer with the store's own dims and labels; `product` and `dims` say what it is of."""
    roles = roles_of(found)
    if "roles" not in found.attrs:
        return found
    attrs = {name: value for name, value in found.attrs.items() if name != "roles"}
    bare = found.drop_vars([dim for dim in CELL if dim in found.coords])
    made = {name: _apart(one, roles) for name, one in bare.variables.items()}
    whole = xr.Dataset({name: made[name] for name in bare.data_vars}, {name: made[name] for name in bare.coords})
    labels = {dim: label for dim, label in roles.labels.variables.items() if dim in whole.dims}
    return whole.assign_coords(labels).assign_attrs(attrs | {"product": roles.product, "dims": " ".join(roles.dims)})


def _apart(variable: xr.Variable, roles: Roles) -> xr.Variable:
    dims: list[Any] = []
    sizes: list[int] = []
    for dim in variable.dims:
        own = roles.of(dim) if dim in CELL else (dim,)
        dims += own
        sizes += [variable.sizes[dim]] if len(own) == 1 else [roles.labels.sizes[one] for one in own]
    if dims == list(variable.dims):
        return variable
    return xr.Variable(dims, variable.data.reshape(sizes), variable.attrs)


def gathered(found: xr.Dataset) -> xr.Dataset:
    """An answer as it was before it was `restored`; dims that it has only some labels of by then, too."""
    roles = roles_of(found)
    if roles.plain or "roles" in found.attrs:
        return found
    sizes = {dim: found.sizes[dim] for dim in roles.dims if dim in found.dims}
    own = tuple(tuple(dim for dim in several if dim in sizes) for several in roles.own)
    left = Roles(roles.product, own, roles.labels.drop_vars([d for d in roles.labels.variables if d not in sizes]))
    bare = found.drop_vars([dim for dim in roles.dims if dim in found.coords])
    made = {name: _joined(one, left) for name, one in bare.variables.items()}
    data = {name: made[name] if left.of("feature") else _widened(made[name], ["feature"]) for name in bare.data_vars}
    whole = xr.Dataset(data, {name: made[name] for name in bare.coords}, found.attrs)
    labels = {
        dim: labels_of_role(left, dim, [sizes[one] for one in several])
        for dim, several in zip(CELL, own, strict=True)
        if dim in whole.dims
    }
    full = Roles(roles.product, roles.own, left.labels)
    return whole.assign_coords(labels).assign_attrs(roles=full)


def _joined(variable: xr.Variable, roles: Roles) -> xr.Variable:
    """Own dims become those whose part they play."""
    for role, own in zip(CELL, roles.own, strict=True):
        there = [dim for dim in own if dim in variable.dims]
        if len(there) == 1:
            variable = xr.Variable([role if dim in there else dim for dim in variable.dims], variable.data)
        elif there:
            front = variable.dims[: variable.dims.index(there[0])]
            back = [dim for dim in variable.dims if dim not in (*front, *there)]
            moved = variable.transpose(*front, *there, *back)
            sizes = [*(moved.sizes[dim] for dim in front), -1, *(moved.sizes[dim] for dim in back)]
            variable = xr.Variable((*front, role, *back), moved.data.reshape(sizes))
    return variable
