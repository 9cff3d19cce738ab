"""One pass over the store: blocks become sums by group, sums are added up in a tree, statistics are made of the last.

Lazy: a pass is a Dask graph, run by whatever scheduler Dask is told to use. A block is read, reduced and dropped; what
travels between tasks are sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

from ..errors import Refused
from .conditions import Grouping
from .inputs import with_inputs
from .sums import CELL, DIMS, INPUTS, TARGETS, Part, cell_bytes, merged, sums_of

TOGETHER = 2  # sums added at a time: fewer are held than with more


@dataclass(frozen=True)
class Pass:
    """What is summed and for whom. codes: int64 `(time)`, the group of each window, below zero where it counts for
    none; groups: how many there are; needs: names of sums.
    """

    dataset: xr.Dataset
    codes: da.Array
    groups: int
    needs: tuple[str, ...]

    def sums(self) -> list[Any]:
        """Delayed `Part`s, one for each block of output steps."""
        jacobian = self.dataset["jacobian"]
        arguments: list[Any] = [jacobian.data, "tsolf", self.codes, "t"]
        prediction = inputs = False
        if {*TARGETS, *INPUTS} & {*self.needs}:
            prediction = True
            chunks = jacobian.data.chunks[:3]
            arguments += [self.dataset["prediction"].data.rechunk(chunks), "tso"]
        if {*INPUTS} & {*self.needs}:
            inputs = True
            array = self.dataset["input"]
            arguments += [array.data, "tslf" if "output_step" in array.dims else "tlf"]
        states = da.blockwise(
            _block,
            "ts",
            *arguments,
            dtype=object,
            adjust_chunks={"t": 1, "s": 1},
            concatenate=False,
            align_arrays=False,
            meta=np.empty((0, 0), object),
            needs=self.needs,
            prediction=prediction,
            inputs=inputs,
        )
        total = da.reduction(
            states,
            chunk=_same,
            combine=_added,
            aggregate=_added,
            axis=(0,),
            keepdims=True,
            concatenate=False,
            dtype=object,
            meta=np.empty((0, 0), object),
            split_every={0: TOGETHER},
        )
        return list(total.to_delayed(optimize_graph=False).ravel())

    def nothing(self) -> list[Part]:
        """What the sums are where no window counts."""
        jacobian = self.dataset["jacobian"]
        parts = []
        for steps in jacobian.data.chunks[1]:
            empty = np.empty((0, steps, *jacobian.shape[2:]), jacobian.dtype)
            known = np.empty(empty.shape[:3], jacobian.dtype)
            inputs = np.empty((0, 1, *empty.shape[3:]), jacobian.dtype)
            parts.append(sums_of(empty, np.empty(0, np.int64), self.needs, known, inputs))
        return parts

    def require_room(self, memory: int, groups_apart: int = 1) -> None:
        """Refuse what would not fit into `memory` bytes; groups_apart: of how many groups a block may have none."""
        held = self.held_bytes(groups_apart)
        if held > memory:
            raise Refused(
                "memory",
                given=f"{held / 1e6:,.0f} MB of sums, of {self.groups:,} groups with {self.cells:,} derivatives each",
                allowed=f"{memory / 1e6:,.0f} MB",
                remedy="choose fewer groups, lags, features, outputs or output steps, or give more memory",
            )

    @property
    def cells(self) -> int:
        return math.prod(self.dataset["jacobian"].shape[1:])

    def held_bytes(self, groups_apart: int = 1) -> int:
        """Sums held at once, at most: those of half-done branches of the tree, and the last."""
        jacobian = self.dataset["jacobian"]
        group = self.cells * cell_bytes(self.needs, math.prod(jacobian.shape[3:]))
        branches = 2 + TOGETHER * max(1, math.ceil(math.log2(max(2, jacobian.data.numblocks[0]))))
        return group * (self.groups * 2 + self.groups * branches // groups_apart)


def _block(*blocks: Any, needs: tuple[str, ...], prediction: bool, inputs: bool) -> Part:
    jacobian, codes, *others = map(_only, blocks)
    known = others.pop(0) if prediction else None
    x = others.pop(0) if inputs else None
    if x is not None and x.ndim == 3:
        x = x[:, None]
    return sums_of(jacobian, codes, needs, known, x)


def _only(block: Any) -> np.ndarray:
    """Out of the lists that Dask hands over for dimensions that are summed over, which have one block each."""
    return _only(block[0]) if isinstance(block, list) else block


def _same(part: Part, axis: Any, keepdims: bool) -> Part:
    return part


def _added(parts: Any, axis: Any, keepdims: bool) -> Part:
    return merged(_flat(parts))


def _flat(parts: Any) -> list[Part]:
    return [parts] if isinstance(parts, Part) else [one for part in parts for one in _flat(part)]


def canonical(dataset: xr.Dataset, *, inputs: bool) -> xr.Dataset:
    """The dataset with all dims that a run's has, and with blocks that hold all outputs, lags and features."""
    for dim in CELL:
        if dim not in dataset["jacobian"].dims:
            label = dataset[dim].item() if dim in dataset.coords else 0
            variables = [name for name, dims in OWN.items() if name in dataset and dim in dims]
            widened = {
                name: dataset[name].drop_vars(dim, errors="ignore").expand_dims({dim: [label]}) for name in variables
            }
            dataset = dataset.drop_vars([*variables, *([dim] if dim in dataset.coords else [])]).assign(widened)
    if "input_std" in dataset.coords and not dataset["input_std"].dims:
        dataset = dataset.assign_coords(input_std=("feature", [dataset["input_std"].values.item()]))
    jacobian = dataset["jacobian"].transpose("time", *CELL)
    whole = {"output": -1, "lag": -1, "feature": -1}
    dataset["jacobian"] = jacobian.copy(data=jacobian.variable.chunk(whole).data)
    if "prediction" in dataset:
        prediction = dataset["prediction"].transpose("time", *CELL[:2])
        dataset["prediction"] = prediction.copy(data=prediction.variable.chunk().data)
    if inputs:
        dataset = with_inputs(dataset)
        dims = [dim for dim in ("time", "output_step", "lag", "feature") if dim in dataset["input"].dims]
        chunks = {dim: dataset["jacobian"].variable.chunksizes[dim] for dim in dims}
        inputs_there = dataset["input"].transpose(*dims)
        dataset["input"] = inputs_there.copy(data=inputs_there.variable.chunk(chunks).data)
    return dataset


OWN = {
    "jacobian": CELL,
    "prediction": CELL[:2],
    "input": ("lag", "feature"),
}


def combined(groupings: Sequence[Grouping], holding: da.Array | None, like: da.Array) -> da.Array:
    """One code for a window's place in all groupings, the last one's varying fastest."""
    sizes = [len(grouping.labels) for grouping in groupings]
    arrays = [grouping.codes for grouping in groupings] + ([] if holding is None else [holding])
    if not arrays:
        return da.zeros(like.shape[0], chunks=(like.chunks[0],), dtype=np.int64)
    return da.map_blocks(
        _combined, *arrays, sizes=sizes, dtype=np.int64, chunks=(like.chunks[0],), meta=np.empty(0, np.int64)
    )


def _combined(*blocks: np.ndarray, sizes: list[int]) -> np.ndarray:
    found = np.zeros(len(blocks[0]), np.int64)
    counts = np.ones(len(blocks[0]), bool)
    for codes, size in zip(blocks, sizes, strict=False):
        found = found * size + codes
        counts &= codes >= 0
    for held in blocks[len(sizes) :]:
        counts &= held
    return np.where(counts, found, -1)


def labels_of(dataset: xr.Dataset, groupings: Sequence[Grouping]) -> xr.Dataset:
    """The labels that sums have, and no data."""
    labels: dict[str, Any] = {dim: dataset[dim].variable for dim in CELL if dim in dataset.coords}
    labels |= {name: dataset[name].variable.load() for name in ("input_std",) if name in dataset.coords}
    labels |= {grouping.name: (grouping.name, grouping.labels) for grouping in groupings}
    attrs = {"dtype": str(dataset["jacobian"].dtype), "groupings": [grouping.name for grouping in groupings]}
    return xr.Dataset(coords=labels, attrs=attrs)


def as_dataset(parts: Sequence[Part], labels: xr.Dataset) -> xr.Dataset:
    """Sums with a dimension for each grouping and the labels of `like`; where no window counts, those of none."""
    names = labels.attrs["groupings"]
    shape = tuple(labels.sizes[name] for name in names)
    found = {}
    for name in parts[0].sums:
        whole = np.concatenate([part.sums[name] for part in filled(parts, math.prod(shape))], axis=1)
        found[name] = ([*names, *DIMS[name]], whole.reshape(*shape, *whole.shape[1:]))
    return labels.assign(found)


def filled(parts: Sequence[Part], groups: int) -> list[Part]:
    """The same with all groups, also those that have no window."""
    everyone = np.arange(groups)
    made = []
    for part in parts:
        empty = {name: np.zeros((groups, *field.shape[1:]), field.dtype) for name, field in part.sums.items()}
        for name, edge in (("least", np.inf), ("largest", -np.inf)):
            if name in empty:
                empty[name][:] = edge
        for name, field in part.sums.items():
            empty[name][part.groups] = field
        made.append(Part(everyone, empty))
    return made
