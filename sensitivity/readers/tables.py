"""Tables: CSV and Parquet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..sections import SeriesSection
from . import blocks
from .blocks import Block, reading
from .columns import choose_features, dates, is_time_of_day, no_column, numbers, require_once
from .sites import site_column, split_by_site

GROUP_BYTES = 64 << 20  # of a row group of Parquet, as numbers: a worker holds one while it reads slices of it


class _Table(ABC):
    """Columns read in order, block by block."""

    sliceable = False

    def __init__(self, section: SeriesSection, columns: Sequence[str]) -> None:
        self.path, self.time, self.site = section.path, section.time, site_column(section, columns)
        if self.time is not None and self.time not in columns:
            raise no_column("series.time", [self.time], columns)
        others = [name for name in columns if name not in (self.time, self.site)]
        self.features = choose_features(others, section)
        require_once(self._columns, columns, section)

    @property
    def _columns(self) -> list[str]:
        return [*self.features, *(name for name in (self.time, self.site) if name is not None)]

    def blocks(self) -> Iterator[Block]:
        row = 0
        with reading(self.path):
            for frame in self._frames():
                yield from self._by_site(frame, row)
                row += len(frame)

    def _by_site(self, frame: Any, row: int) -> Iterator[Block]:
        values = np.stack([numbers(frame[name], name, row) for name in self.features], axis=1)
        times = frame[self.time] if self.time is not None else None
        if self.site is None:
            yield Block(times, values)
            return
        yield from split_by_site(frame[self.site], row, times if times is None else _read_at_once(times), values)

    @abstractmethod
    def _frames(self) -> Iterator[Any]:
        """Data frames of at most `blocks.BLOCK_STEPS` consecutive rows."""

    def read(self, start: int, stop: int) -> np.ndarray:
        raise TypeError(f"{self.path} cannot be read by slices; ingest it first")


def _read_at_once(times: Any) -> Any:
    """Times that are not told as numbers or dates, read together: there may be thousands of sites of a few rows each.
    What cannot be read is left as it stands, to be refused.
    """
    if (isinstance(times.dtype, np.dtype) and times.dtype.kind in "iufM") or any(map(is_time_of_day, times[:1])):
        return times
    found = dates(times)
    return times if np.isnat(found).any() else found


class Csv(_Table):
    def __init__(self, section: SeriesSection, file: str) -> None:
        import pandas as pd

        self._file = file
        written = pd.read_csv(file, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
        # Where names are left out or repeated, pandas makes some up.
        self._known = list(map(str, pd.read_csv(file, nrows=0)))
        super().__init__(section, [own or name for own, name in zip(written, self._known, strict=True)])

    def _frames(self) -> Iterator[Any]:
        import pandas as pd

        others = {name: str for name in self._known if name not in self._columns}  # with usecols, long rows would pass
        # As written: 01013500 is no number, and NA a country; pandas would still take it for nothing without a mark.
        marked = {} if self.site is None else {self.site: "=".__add__}
        with pd.read_csv(self._file, dtype=others, converters=marked, chunksize=blocks.BLOCK_STEPS) as chunks:
            for frame in chunks:
                if not isinstance(frame.index, pd.RangeIndex):  # columns would be shifted
                    raise ValueError("rows have more values than the header has names")
                if self.site is not None:
                    frame[self.site] = frame[self.site].str[1:].str.strip()
                yield frame


class Parquet(_Table):
    """Read by row groups, so that slices cost what their groups cost, where these are small."""

    def __init__(self, section: SeriesSection, file: Path | IO[bytes]) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(file, pre_buffer=True)
        schema = self._file.schema_arrow.names
        names = [name for name in schema if not name.startswith("__index_level_")]
        named = (section.time, section.site)
        super().__init__(section, names + [name for name in schema if name in named and name not in names])
        self._held: tuple[int, np.ndarray] | None = None

    @cached_property
    def _borders(self) -> np.ndarray:
        """The row at which each row group begins, and the end."""
        found = self._file.metadata
        return np.cumsum([0, *(found.row_group(i).num_rows for i in range(found.num_row_groups))])

    @cached_property
    def sliceable(self) -> bool:  # type: ignore[override]
        rows = np.diff(self._borders).max(initial=0)
        return bool(rows * len(self.features) * np.dtype(float).itemsize <= GROUP_BYTES)

    def _frames(self) -> Iterator[Any]:
        for groups in self._runs():  # what is asked for at once is held until all of it has been read
            for batch in self._file.iter_batches(blocks.BLOCK_STEPS, groups, columns=self._columns):
                yield batch.to_pandas(ignore_metadata=True)

    def _runs(self) -> Iterator[range]:
        """Consecutive row groups that together hold about a block, or one that holds more."""
        borders = self._borders
        block = np.append(borders[:-1] // blocks.BLOCK_STEPS, -1)
        ends = (np.flatnonzero(np.diff(block)) + 1).tolist()
        return (range(first, last) for first, last in zip([0, *ends], ends, strict=False))

    def read(self, start: int, stop: int) -> np.ndarray:
        borders = self._borders
        first, last = np.searchsorted(borders, [start, stop - 1], side="right") - 1
        parts = []
        for group in range(first, last + 1):
            offset = borders[group]
            parts.append(self._group(group)[max(start - offset, 0) : stop - offset])
        return np.concatenate(parts)

    def _group(self, group: int) -> np.ndarray:
        """The values of one row group. Shards are read in order: the last one is held for the next."""
        if self._held is None or self._held[0] != group:
            self._held = None
            row, end = self._borders[group : group + 2].tolist()
            values = np.empty((end - row, len(self.features)))
            for i, name in enumerate(self.features):  # one at a time: what is decoded is as large again
                column = self._file.read_row_group(group, columns=[name]).to_pandas(ignore_metadata=True)[name]
                values[:, i] = numbers(column, name, row)
            self._held = group, values
        return self._held[1]
