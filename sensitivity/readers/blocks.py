"""What every reader of a series gives, and how it says that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import Refused, gist

BLOCK_STEPS = 1 << 18


class Block(NamedTuple):
    """Consecutive steps: `times` `(step)` or None where steps are numbered, `values` `(step, feature)` float64."""

    times: Any
    values: np.ndarray


class Reader(Protocol):
    """`sliceable`: `read` fetches steps without reading those before them."""

    features: tuple[str, ...]
    sliceable: bool

    def blocks(self) -> Iterator[Block]: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


def unreadable(path: str, error: Exception) -> Refused:
    return Refused(
        "series.path",
        given=f"{path} ({gist(error)})",
        allowed="a file that its ending describes",
        remedy="save it as UTF-8"
        if isinstance(error, UnicodeDecodeError)
        else "open it with pandas or xarray to see what is wrong with it",
    )
