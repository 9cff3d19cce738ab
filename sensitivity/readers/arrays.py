"""Bare arrays: .npy, and Zarr outside a group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import Refused
from ..sections import SeriesSection
from . import blocks
from .blocks import Block, reading
from .columns import choose_features


class Sliced(ABC):
    """Formats that give any range of steps at its own cost."""

    sliceable = True
    path: str
    features: tuple[str, ...]
    steps: int

    def blocks(self) -> Iterator[Block]:
        for start in range(0, self.steps, blocks.BLOCK_STEPS):
            stop = min(start + blocks.BLOCK_STEPS, self.steps)
            with reading(self.path):
                found = list(self._blocks(start, stop))
            yield from found

    def _blocks(self, start: int, stop: int) -> Iterator[Block]:
        yield Block(None, self.read(start, stop))

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """The values of steps `[start, stop)`, `(step, feature)` float64."""


class Matrix(Sliced):
    """A bare `(step, feature)` or `(step)` array: .npy, or a Zarr array outside a group. It has no times."""

    def __init__(self, section: SeriesSection, array: Any) -> None:
        path, features = section.path, section.features and [*section.features, *section.beside]
        if array.ndim not in (1, 2) or np.dtype(array.dtype).kind not in "iufb":
            raise Refused(
                "series.path",
                given=f"{path}, an array of shape {tuple(array.shape)} and dtype {array.dtype}",
                allowed="numbers of shape (step, feature), or (step) for one feature",
                remedy="save the series itself, not windows cut from it",
            )
        for key, name in (("time", section.time), ("site", section.site)):
            if name:
                raise Refused(
                    f"series.{key}",
                    given=f"{name!r} for {path}",
                    allowed=f"no {key} column: a bare array has none",
                    remedy=f"leave series.{key} out, or give the series as CSV, Parquet, NetCDF or Zarr",
                )
        width = 1 if array.ndim == 1 else array.shape[1]
        columns = [f"feature_{i}" for i in range(width)]
        names_them = features is not None and len(features) == width and not set(features) <= set(columns)
        self.features = tuple(features or ()) if names_them else choose_features(columns, section)
        self._index = list(range(width)) if names_them else [columns.index(name) for name in self.features]
        self.path, self._array, self.steps = path, array, array.shape[0]

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = np.asarray(self._array[start:stop])
        return rows.reshape(stop - start, -1)[:, self._index].astype(np.float64)
