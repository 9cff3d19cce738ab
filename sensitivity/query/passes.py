"""One pass over the store: blocks become sums by group, sums are added up in a tree, statistics are made of the last.

Lazy: a pass is a Dask graph, run by whatever scheduler Dask is told to use. A block is read, reduced and dropped; what
travels between tasks are sums.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.delayed import Delayed

from ..errors import Refused
from ..plan import human_bytes
from .conditions import Grouping
from .inputs import with_inputs
from .roles import as_jacobian, known_roles, main_of
from .sums import CELL, DIMS, INPUTS, TARGETS, Part, cell_bytes, merged, sums_of
from .tasks import TOGETHER, tree


@dataclass(frozen=True)
class Pass:
    """What is summed and for whom. codes: int64 `(time)`, the group of each window, below zero where it counts for
    none; groups: how many there are; needs: names of sums; moved: how large a copy of them all is that is made once
    they are added up, in sizes of these.
    """

    dataset: xr.Dataset
    codes: da.Array
    groups: int
    needs: tuple[str, ...]
    moved: float = 0.0

    @property
    def others(self) -> dict[str, da.Array]:
        """What is read beside the Jacobian, by the names that `sums_of` has for it."""
        known = {"codes": self.codes, "prediction": self._prediction, "inputs": self._inputs}
        return {name: array for name, array in known.items() if array is not None}

    @property
    def _prediction(self) -> da.Array | None:
        if not {*TARGETS, *INPUTS} & {*self.needs}:
            return None
        return self.dataset["prediction"].data.rechunk(self.dataset["jacobian"].data.chunks[:3], method="tasks")

    @property
    def _inputs(self) -> da.Array | None:
        """`(time, 1 or output_step, lag, feature)`"""
        if not {*INPUTS} & {*self.needs}:
            return None
        inputs = self.dataset["input"]
        return inputs.data if "output_step" in inputs.dims else inputs.data[:, None]

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

    def require_room(self, memory: float, groups_apart: int = 1) -> None:
        """Refuse what would not fit into `memory` bytes; groups_apart: of how many groups a block may have none."""
        held = self.held_bytes(groups_apart)
        if held > memory:
            raise Refused(
                "memory",
                given=f"{human_bytes(held)} of sums, of {self.groups:,} groups with {self.cells:,} derivatives each",
                allowed=human_bytes(memory),
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
        return group * (self.groups * 2 + self.groups * branches // groups_apart + math.ceil(self.groups * self.moved))


def _place(array: da.Array, time: int, step: int) -> tuple[int, ...]:
    """Of the block for these windows and output steps, or for all steps."""
    place = (time, step if array.ndim > 1 and array.numblocks[1] > 1 else 0)
    return (*place, *[0] * array.ndim)[: array.ndim]


def sums_together(passes: Sequence[Pass]) -> list[list[Delayed]]:
    """For each pass delayed `Part`s, one for each block of output steps. Blocks are read once for all passes that have
    the same.
    """
    alike: dict[str, list[int]] = {}
    for i, one in enumerate(passes):
        alike.setdefault(one.dataset["jacobian"].data.name, []).append(i)
    found: dict[int, list[Delayed]] = {}
    for members in alike.values():
        for i, parts in zip(members, _sums_of_same([passes[i] for i in members]), strict=True):
            found[i] = parts
    return [found[i] for i in range(len(passes))]


def _sums_of_same(passes: Sequence[Pass]) -> list[list[Delayed]]:
    jacobian = passes[0].dataset["jacobian"].data
    arrays = {array.name: array for array in (jacobian, *(array for one in passes for array in one.others.values()))}
    places = {name: i for i, name in enumerate(arrays)}
    wants = tuple((one.needs, {role: places[array.name] for role, array in one.others.items()}) for one in passes)
    function, several = functools.partial(_block, wants=wants), list(arrays.values())
    times, steps = jacobian.numblocks[:2]
    sums = [
        tree(function, several, [[_place(array, i, step) for array in several] for i in range(times)], _each_merged)
        for step in range(steps)
    ]
    return [[dask.delayed(operator.getitem)(one, i) for one in sums] for i in range(len(passes))]


Wants = tuple[tuple[tuple[str, ...], dict[str, int]], ...]


def _block(*blocks: np.ndarray, wants: Wants) -> list[Part]:
    """A part for each pass: `wants` are its sums, and where in `blocks` it finds what these are of."""
    return [
        sums_of(blocks[0], needs=needs, **{role: blocks[place] for role, place in roles.items()})
        for needs, roles in wants
    ]


def _each_merged(parts: Sequence[list[Part]]) -> list[Part]:
    return [merged(several) for several in zip(*parts, strict=True)]


def canonical(dataset: xr.Dataset, *, inputs: bool) -> xr.Dataset:
    """The dataset with all dims that a run's has, and with blocks that hold all outputs, lags and features."""
    dataset = as_jacobian(dataset)
    if "jacobian" not in dataset or "time" not in dataset["jacobian"].dims:
        raise Refused(
            "dataset",
            given=f"one without a {main_of(dataset)} along time",
            allowed="what sensitivity.open_run returned, or a selection of it that keeps time",
            remedy="select windows with a slice: isel(time=slice(5, 6))",
        )
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
    # Variables, as a DataArray's copy would have one of the times, too.
    jacobian = dataset["jacobian"].variable.transpose("time", *CELL).chunk({"output": -1, "lag": -1, "feature": -1})
    dataset = dataset.assign(jacobian=jacobian)
    if "prediction" in dataset and {*CELL[:2]} <= {*dataset["prediction"].dims}:
        prediction = dataset["prediction"].variable.transpose("time", *CELL[:2])
        dataset = dataset.assign(prediction=prediction.chunk())
    if inputs:
        dataset = with_inputs(dataset)
        dims = [dim for dim in ("time", "output_step", "lag", "feature") if dim in dataset["input"].dims]
        chunks = {dim: jacobian.chunksizes[dim] for dim in dims}
        dataset = dataset.assign(input=dataset["input"].variable.transpose(*dims).chunk(chunks))
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
    return xr.Dataset(coords=labels, attrs=attrs | known_roles(dataset))


def as_dataset(parts: Sequence[Part], labels: xr.Dataset) -> xr.Dataset:
    """Sums with a dimension for each grouping and the labels of `like`; where no window counts, those of none."""
    names = labels.attrs["groupings"]
    shape = tuple(labels.sizes[name] for name in names)
    found = {}
    everyone = filled(parts, math.prod(shape))
    for name in parts[0].sums:
        several = [part.sums[name] for part in everyone]
        whole = several[0] if len(several) == 1 else np.concatenate(several, axis=1)
        found[name] = ([*names, *DIMS[name]], whole.reshape(*shape, *whole.shape[1:]))
    return labels.assign(found)


def filled(parts: Sequence[Part], groups: int) -> list[Part]:
    """The same with all groups, also those that have no window."""
    everyone = np.arange(groups)
    made = []
    for part in parts:
        if len(part.groups) == groups:
            made.append(part)
            continue
        empty = {name: np.zeros((groups, *field.shape[1:]), field.dtype) for name, field in part.sums.items()}
        for name, edge in (("least", np.inf), ("largest", -np.inf)):
            if name in empty:
                empty[name][:] = edge
        for name, field in part.sums.items():
            empty[name][part.groups] = field
        made.append(Part(everyone, empty))
    return made
