"""Tables: CSV and Parquet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import Refused
from ..patience import StoreFailed
from . import blocks
from .blocks import Block, unreadable
from .columns import choose_features, no_column, numbers, require_once


class _Table(ABC):
    """Columns read in order, block by block: the formats that cannot be entered in the middle."""

    sliceable = False

    def __init__(
        self, path: str, file: str, columns: Sequence[str], time: str | None, features: Sequence[str] | None
    ) -> None:
        self.path, self.file, self.time = path, file, time
        if time is not None and time not in columns:
            raise no_column("series.time", [time], columns)
        self.features = choose_features([name for name in columns if name != time], features)
        require_once(self._columns, columns)

    @property
    def _columns(self) -> list[str]:
        return [*self.features, *([self.time] if self.time is not None else [])]

    def blocks(self) -> Iterator[Block]:
        row = 0
        try:
            for frame in self._frames():
                times = frame[self.time] if self.time is not None else None
                columns = [numbers(frame[name], name, row) for name in self.features]
                yield Block(times, np.stack(columns, axis=1))
                row += len(frame)
        except (Refused, StoreFailed):
            raise
        except Exception as error:
            raise unreadable(self.path, error) from error

    @abstractmethod
    def _frames(self) -> Iterator[Any]:
        """Data frames of at most `blocks.BLOCK_STEPS` consecutive rows."""

    def read(self, start: int, stop: int) -> np.ndarray:
        raise TypeError(f"{self.path} cannot be read by slices; ingest it first")


class Csv(_Table):
    def __init__(self, path: str, file: str, time: str | None, features: Sequence[str] | None) -> None:
        import pandas as pd

        written = pd.read_csv(file, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
        self._known = list(
            map(str, pd.read_csv(file, nrows=0))
        )  # where names are left out or repeated, pandas makes some up
        names = [own or name for own, name in zip(written, self._known, strict=True)]
        super().__init__(path, file, names, time, features)

    def _frames(self) -> Iterator[Any]:
        import pandas as pd

        others = {name: str for name in self._known if name not in self._columns}  # with usecols, long rows would pass
        with pd.read_csv(self.file, dtype=others, chunksize=blocks.BLOCK_STEPS) as chunks:
            for frame in chunks:
                if not isinstance(frame.index, pd.RangeIndex):  # columns would be shifted
                    raise ValueError("rows have more values than the header has names")
                yield frame


class Parquet(_Table):
    def __init__(self, path: str, file: str, time: str | None, features: Sequence[str] | None) -> None:
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as opened:
            names = [name for name in opened.schema_arrow.names if not name.startswith("__index_level_")]
            if time is not None and time in opened.schema_arrow.names and time not in names:
                names.append(time)
        super().__init__(path, file, names, time, features)

    def _frames(self) -> Iterator[Any]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.file) as file:
            for batch in file.iter_batches(blocks.BLOCK_STEPS, columns=self._columns):
                yield batch.to_pandas(ignore_metadata=True)
