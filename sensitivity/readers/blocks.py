"""What every reader of a series gives, and how it says that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import Refused, gist
from ..patience import StoreFailed

BLOCK_STEPS = 1 << 18


class Block(NamedTuple):
    """Consecutive steps of one site: `times` `(step)` or None where steps are numbered, `values` `(step, feature)`
    float64, and the site's name, None where the series has no sites. mixed: others' steps stand between them.
    """

    times: Any
    values: np.ndarray
    site: str | None = None
    mixed: bool = False


class Reader(Protocol):
    """Blocks cover the series in order, site by site or side by side: the steps of each site come in order.

    `sliceable`: `read` fetches steps without reading those before them. Its steps are numbered through all sites, one
    site after another.

    features: the columns that are read: what the model takes, and then what a loss takes beside it.
    """

    features: tuple[str, ...]

    @property
    def sliceable(self) -> bool: ...

    def blocks(self) -> Iterator[Block]: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


@contextmanager
def reading(path: str) -> Iterator[None]:
    """What goes wrong means that the series cannot be read: every format has its own way of being damaged."""
    try:
        yield
    except (Refused, StoreFailed):
        raise
    except Exception as error:
        raise Refused(
            "series.path",
            given=f"{path} ({gist(error)})",
            allowed="a file that its ending describes",
            remedy="save it as UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else "open it with pandas or xarray to see what is wrong with it",
        ) from error
