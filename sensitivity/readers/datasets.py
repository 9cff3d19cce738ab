"""Labelled datasets: NetCDF and Zarr groups. Dimensions go by their names, in whatever order they stand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import Refused
from ..sections import SeriesSection
from . import blocks
from .arrays import Sliced
from .blocks import Block, Reader, reading
from .columns import choose_features, no_column, require_once
from .sites import require_told_apart, site_column, site_names, split_by_site

AT_ONCE = 64 << 20  # bytes of several sites' steps that are read together
SITES_TOGETHER = 4  # as many sites may be read for the sake of one; where they lie closer together, a copy is made


@dataclass(frozen=True)
class Axes:
    """Where steps and sites are: the dimension of steps, the variables that label steps and sites, if any do, and the
    dimension of sites, if they have one of their own.
    """

    steps: str
    time: Any
    site: Any
    sites: str | None

    @classmethod
    def of(cls, section: SeriesSection, dataset: Any) -> Axes:
        found = cls._along(section, dataset, *_sites(section, dataset))
        return found if section.site is not None or found.sites is None else found._as_taken(section, dataset)

    def _as_taken(self, section: SeriesSection, dataset: Any) -> Axes:
        """Nobody says that these are sites: they may as well label what the model takes side by side, or none of it."""
        columns = dict(_columns(dataset, self))
        wanted = [*section.features, *section.beside] if section.features else columns
        if columns.keys() >= set(wanted):
            of_sites = any(self.sites in dataset[columns[name][0]].dims for name in wanted)
            return self if of_sites else replace(self, site=None, sites=None)
        with contextlib.suppress(Refused):  # what is wrong with the features is said of the panel
            alone = Axes._along(section, dataset, None, None)
            if dict(_columns(dataset, alone)).keys() >= set(wanted):
                return alone
        return self

    @classmethod
    def _along(cls, section: SeriesSection, dataset: Any, site: Any, along: str | None) -> Axes:
        time = _time_variable(dataset, section.time)
        if time is not None:
            steps = str(time.dims[0])
        elif along is not None and _repeats(site):
            steps = along
        else:
            steps = _leading_dim(section, dataset, site, along)
        return cls(steps, time, site, None if along == steps else along)


def open_labelled(section: SeriesSection, dataset: Any) -> Reader:
    axes = Axes.of(section, dataset)
    return Record(section, dataset, axes) if axes.sites is None else Panel(section, dataset, axes)


class _Labelled(Sliced):
    """One variable per feature, or one variable whose labelled columns are features."""

    def __init__(self, section: SeriesSection, dataset: Any, axes: Axes) -> None:
        self.path, self._dataset, self._axes = section.path, dataset, axes
        columns = [*_columns(dataset, axes), *(_once_a_site(dataset, axes) if section.features else ())]
        names = [name for name, _ in columns]
        self.features = choose_features(names, section)
        require_once(self.features, names, section)
        places = dict(columns)
        self._places = [places[name] for name in self.features]

    @property
    def _variables(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self._places))

    def _times(self, start: int, stop: int) -> np.ndarray | None:
        return None if self._axes.time is None else self._axes.time[start:stop].values

    def _values(self, where: dict[str, slice]) -> np.ndarray:
        """The features there, float64: `(step, feature)`, or `(step, site, feature)` where `where` names sites."""
        shape = [part.stop - part.start for part in where.values()]
        values = np.empty((*shape, len(self.features)))
        for name in self._variables:
            variable = self._dataset[name]
            part = variable.isel(where, missing_dims="ignore").transpose(*where, ..., missing_dims="ignore").values
            if len(where) > 1 and self._axes.sites not in variable.dims:  # the same at every site
                part = part[:, None]
            for column, (owner, index) in enumerate(self._places):
                if owner == name:
                    values[..., column] = part if index is None else part[..., index]
        return values


class Record(_Labelled):
    """Steps along one dimension, of one site or of several, one after another or mixed."""

    def __init__(self, section: SeriesSection, dataset: Any, axes: Axes) -> None:
        super().__init__(section, dataset, axes)
        self.steps = dataset.sizes[axes.steps]

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._values({self._axes.steps: slice(start, stop)})

    def _blocks(self, start: int, stop: int) -> Iterator[Block]:
        times, values = self._times(start, stop), self.read(start, stop)
        if self._axes.site is None:
            yield Block(times, values)
            return
        yield from split_by_site(self._axes.site[start:stop].values, start, times, values)


class Panel(_Labelled):
    """A dimension of sites, all of them with the same times. Steps are numbered through one site after another."""

    def __init__(self, section: SeriesSection, dataset: Any, axes: Axes) -> None:
        super().__init__(section, dataset, axes)
        self._length, count = dataset.sizes[axes.steps], dataset.sizes[axes.sites]
        self._names = site_names(range(count) if axes.site is None else axes.site.values)
        require_told_apart(self._names, self.path)
        self.steps = self._length * count

    @cached_property
    def sliceable(self) -> bool:  # type: ignore[override]
        return self._at_once[1] <= SITES_TOGETHER

    @cached_property
    def _at_once(self) -> tuple[int, int]:
        """Steps and sites that lie in one piece, so that whoever reads one of them pays for all."""
        steps = sites = 1
        for name in self._variables:
            variable = self._dataset[name]
            if not {self._axes.steps, self._axes.sites} <= set(variable.dims):
                continue
            chunks = variable.encoding.get("preferred_chunks", {})
            dims = variable.dims
            across = not chunks and dims.index(self._axes.steps) < dims.index(self._axes.sites)
            steps = max(steps, chunks.get(self._axes.steps, 1))
            sites = max(sites, chunks.get(self._axes.sites, len(self._names) if across else 1))
        return max(1, min(steps, self._length)), min(sites, len(self._names))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Sites that are wanted whole are read at once: there may be thousands of a few steps each."""
        length = self._length
        whole = -(-start // length) * length, stop // length * length
        borders = sorted({start, stop, *(step for step in whole if start < step < stop)})
        parts = []
        for first, last in zip(borders, borders[1:], strict=False):
            site, step = divmod(first, length)
            part = self._part(step, min(step + last - first, length), site, site + max(1, (last - first) // length))
            parts.append(part.swapaxes(0, 1).reshape(last - first, -1))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _part(self, start: int, stop: int, first: int, last: int) -> np.ndarray:
        """Steps `[start, stop)` of sites `[first, last)`, `(step, site, feature)`."""
        return self._values({self._axes.steps: slice(start, stop), str(self._axes.sites): slice(first, last)})

    @property
    def _cut(self) -> tuple[int, int]:
        """Steps and sites of a block, never less than lies in one piece. Of a source that workers read where it is, one
        site comes after another.
        """
        whole, together = self._at_once
        most = max(1, AT_ONCE // (len(self.features) * np.dtype(float).itemsize))
        if self.sliceable and self._length <= most:
            return max(1, self._length), most // max(1, self._length)
        together = 1 if self.sliceable else together
        most //= together
        return max(whole, most - most % whole), together

    def blocks(self) -> Iterator[Block]:
        steps, together = self._cut
        for first in range(0, len(self._names), together):
            last = min(first + together, len(self._names))
            for start in range(0, self._length, steps):
                stop = min(start + steps, self._length)
                with reading(self.path):
                    times, values = self._times(start, stop), self._part(start, stop, first, last)
                for site in range(first, last):
                    yield Block(times, values[:, site - first], self._names[site])


def open_dataset(path: Any, engine: str | None, **options: Any) -> Any:
    import xarray as xr

    any_year = xr.coders.CFDatetimeCoder(time_unit="us")
    options |= {"chunks": None, "cache": False, "decode_times": any_year}
    return xr.open_dataset(path, engine=engine, create_default_indexes=False, **options)  # indexes hold every time


def _time_variable(dataset: Any, time: str | None) -> Any:
    if time is None:
        return None
    if time not in dataset.variables:
        raise no_column("series.time", [time], list(map(str, dataset.variables)))
    return _along_one("series.time", dataset[time], "name the coordinate that labels the steps")


def _along_one(key: str, variable: Any, remedy: str) -> Any:
    if variable.ndim == 1:
        return variable
    raise Refused(
        key,
        given=f"{variable.name!r} with dimensions {variable.dims}",
        allowed="a one-dimensional coordinate",
        remedy=remedy,
    )


def _sites(section: SeriesSection, dataset: Any) -> tuple[Any, str | None]:
    """The variable that names sites, if there is one, and the dimension that it is along."""
    name = site_column(section, list(dict.fromkeys(map(str, [*dataset.variables, *dataset.dims]))))
    if name is None:
        return None, None
    if name not in dataset.variables:
        return None, name
    site = dataset[name]
    if section.site is not None:
        site = _along_one("series.site", site, "name the coordinate or dimension that tells sites apart")
    return (site, str(site.dims[0])) if site.ndim == 1 else (None, None)


def _repeats(site: Any) -> bool:
    """Whether sites come again: then they are told step by step, and have no dimension of their own."""
    labels = site[: blocks.BLOCK_STEPS].values.tolist() if site is not None else []
    return len(set(labels)) < len(labels)


def _leading_dim(section: SeriesSection, dataset: Any, site: Any, along: str | None) -> str:
    """Without a time coordinate, the steps are the first dimension but for that of sites of the variables that are
    asked for; of variables that have no other it is that one.
    """
    known = [name for name in dataset.data_vars if site is None or name != site.name]
    wanted = [name for name in (*(section.features or ()), *section.beside) if name in known] or known
    dims = {str(dim): None for name in wanted for dim in [d for d in dataset[name].dims if d != along][:1]}
    found = list(dims) or ([along] if along is not None else [])
    if len(found) == 1:
        return found[0]
    raise Refused(
        "series.time",
        given=f"nothing, and the variables of {section.path} begin with dimensions {found}",
        allowed="one dimension of steps",
        remedy="name the time coordinate as series.time, or the variables as series.features",
    )


def _once_a_site(dataset: Any, axes: Axes) -> list[tuple[str, tuple[str, int | None]]]:
    """Features that a site has once, such as its area: the same at every step."""
    found = [str(name) for name, variable in dataset.data_vars.items() if variable.dims == (axes.sites,)]
    return [(name, (name, None)) for name in found if dataset[name].dtype.kind in "iufb"]


def _columns(dataset: Any, axes: Axes) -> list[tuple[str, tuple[str, int | None]]]:
    """Of each feature the name, and (variable, column in it, or None for a variable of one feature)."""
    labels_only = {variable.name for variable in (axes.time, axes.site) if variable is not None}
    found: list[tuple[str, tuple[str, int | None]]] = []
    for name, variable in dataset.data_vars.items():
        across = [dim for dim in variable.dims if dim not in (axes.steps, axes.sites)]
        is_number = variable.dtype.kind in "iufb" and name not in labels_only
        if not is_number or axes.steps not in variable.dims or len(across) > 1:
            continue
        if not across:
            found.append((str(name), (name, None)))
            continue
        labels = variable[across[0]].values if across[0] in variable.coords else None
        for i in range(variable.sizes[across[0]]):
            found.append((str(labels[i]) if labels is not None else f"{name}_{i}", (name, i)))
    return found
