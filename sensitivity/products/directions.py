"""Directions that a source is moved in, for products that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np

from ..errors import Refused, suggested
from ..facts import CallFacts
from ..record import read_array, require_shape
from ..variables import Dims
from .product import Arrays, Product

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..record import Record

_KEY = "sensitivity.directions"


@dataclass(frozen=True)
class Directed(Product):
    """directions: `(direction, *source)`, the same for all windows. names: of each."""

    directions: np.ndarray = field(compare=False)
    names: tuple[str, ...] = ()

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> Self:
        return cls(*directions_asked(wanted, facts, record))

    def labels(self) -> dict[str, Sequence[str]]:
        return {"direction": self.names}

    def constants(self, target: Dims, source: Dims) -> dict[str, tuple[Dims, np.ndarray]]:
        return {"directions": ((("direction", len(self.directions)), *source), self.directions)}

    def beside(self, facts: CallFacts, windows: int) -> Arrays:
        shaped = self.directions.astype(facts.dtype).reshape(len(self.directions), *facts.source.shape)
        return (np.broadcast_to(shaped, (windows, *shaped.shape)),)


def directions_asked(
    wanted: SensitivitySection, facts: ModelFacts, record: Record
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Directions `(direction, *source)`, as the model takes them, and their names: of a file, else a feature's own unit
    more at all lags, for each of those that are named; of all, where none is. Raises `Refused`.
    """
    by_input, shape = facts.source.kind == "input", tuple(size for _, size in facts.source_dims)
    if isinstance(wanted.directions, str):
        found = require_shape(read_array(wanted.directions, _KEY), shape, _KEY, "directions by the source's dims")
        return found / record.scale if by_input else found, tuple(f"direction_{number}" for number in range(len(found)))
    names = wanted.directions or (record.features if by_input else ())
    unknown = [name for name in names if name not in record.features] if by_input else list(names)
    if unknown or not names:
        known = f"features ({', '.join(record.features)}), or " if by_input else ""
        raise Refused(
            _KEY,
            given=", ".join(unknown) or "nothing",
            allowed=f"{known}a .npy file of shape {('n', *shape)}",
            remedy=suggested(unknown, record.features if by_input else (), "name these"),
        )
    found = np.zeros((len(names), *shape))
    for number, name in enumerate(names):
        found[number, :, record.features.index(name)] = 1 / record.scale[record.features.index(name)]
    return found, tuple(names)
