"""Sites as an index of xarray's: windows stand site by site, so that a site is a slice of them, never a mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from xarray.core.indexing import IndexSelResult


class SiteIndex(xr.Index):
    """names `(part)` and borders `(part + 1)`: windows `[borders[i], borders[i + 1])` along `dim` are of names[i].

    Selecting sites keeps the dimension, also where one has a single window.
    """

    def __init__(self, coordinate: str, dim: str, names: np.ndarray, borders: np.ndarray) -> None:
        self._coordinate, self._dim, self._names, self._borders = coordinate, dim, names, borders

    @classmethod
    def from_variables(cls, variables: Mapping[Any, xr.Variable], *, options: Mapping[str, Any]) -> SiteIndex:
        ((name, variable),) = variables.items()
        values = variable.values
        starts = np.flatnonzero(np.concatenate([[len(values) > 0], values[1:] != values[:-1]]))
        return cls(name, str(variable.dims[0]), values[starts], np.append(starts, len(values)))

    @classmethod
    def concat(
        cls, indexes: Sequence[SiteIndex], dim: Any, positions: Iterable[Iterable[int]] | None = None
    ) -> SiteIndex:
        sizes = np.cumsum([0, *(index._borders[-1] for index in indexes)])
        borders = [index._borders[:-1] + begin for index, begin in zip(indexes, sizes, strict=False)]
        names = np.concatenate([index._names for index in indexes])
        return cls(indexes[0]._coordinate, dim, names, np.concatenate([*borders, sizes[-1:]]))

    def create_variables(self, variables: Mapping[Any, xr.Variable] | None = None) -> dict[Any, xr.Variable]:
        attributes = variables[self._coordinate].attrs if variables and self._coordinate in variables else {}
        labels = np.repeat(self._names, np.diff(self._borders))
        return {self._coordinate: xr.Variable((self._dim,), labels, attributes)}

    @property
    def names(self) -> list[str]:
        """Every site that has windows, in their order."""
        return list(dict.fromkeys(self._names.tolist()))

    @property
    def codes(self) -> np.ndarray:
        """Of each window, where its site stands in `names`: int64 `(window)`."""
        place = {name: i for i, name in enumerate(self.names)}
        return np.repeat([place[name] for name in self._names.tolist()], np.diff(self._borders)).astype(np.int64)

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """names `(part)` and borders `(part + 1)`; a site may have several parts."""
        return self._names, self._borders

    def sel(self, labels: dict[Any, Any], method: Any = None, tolerance: Any = None) -> IndexSelResult:
        ((_, wanted),) = labels.items()
        listed = np.atleast_1d(np.asarray(getattr(wanted, "values", wanted), object)).tolist()
        parts = [part for site in listed for part in self._parts(site)]
        if len(parts) == 1:
            return IndexSelResult({self._dim: slice(*parts[0])})
        return IndexSelResult({self._dim: np.concatenate([np.arange(0), *(np.arange(*part) for part in parts)])})

    def _parts(self, site: Any) -> list[tuple[int, int]]:
        found = np.flatnonzero(self._names == site)
        if not len(found):
            raise KeyError(f"no window is of a site {site!r}")
        return [(int(self._borders[i]), int(self._borders[i + 1])) for i in found]

    def isel(self, indexers: Mapping[Any, Any]) -> SiteIndex | None:
        """The index of a slice; other indexers leave a coordinate without one."""
        part = indexers[self._dim]
        if not isinstance(part, slice) or (part.step or 1) != 1:
            return None
        start, stop, _ = part.indices(int(self._borders[-1]))
        borders = np.clip(self._borders, start, max(start, stop)) - start
        kept = np.diff(borders) > 0
        return SiteIndex(self._coordinate, self._dim, self._names[kept], np.append(borders[:-1][kept], borders[-1]))

    def equals(self, other: xr.Index, **_: Any) -> bool:
        return (
            isinstance(other, SiteIndex)
            and np.array_equal(self._names, other._names)
            and np.array_equal(self._borders, other._borders)
        )

    def rename(self, name_dict: Mapping[Any, Any], dims_dict: Mapping[Any, Any]) -> SiteIndex:
        name, dim = name_dict.get(self._coordinate, self._coordinate), dims_dict.get(self._dim, self._dim)
        return SiteIndex(name, dim, self._names, self._borders)
