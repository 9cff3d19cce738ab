"""∂ target / ∂ source · d for given directions d: how all outputs answer to one change of the source, at once.

By transposition: uᵀ · J · d is linear in u, so its gradient by u is J · d (J. Townsend, "A new trick for calculating
Jacobian vector products", 2017). What is differentiated by is u, whatever its value, and so every kernel serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tensorflow as tf

from ..errors import Refused
from ..facts import CallFacts
from ..record import read_array, require_shape
from ..variables import Dims, Variable
from .product import Arrays, Given, Product, require_all_lags, some
from .vjp import contracted

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..model import Target
    from ..record import Record

_ZERO = tf.UnconnectedGradients.ZERO


_KEY = "sensitivity.directions"


@dataclass(frozen=True)
class Jvp(Product):
    """directions: `(direction, *source)`, the same for all windows. names: of each."""

    name: ClassVar[str] = "jvp"
    long_name: ClassVar[str] = "derivative of the output along a direction"
    directions: np.ndarray = field(compare=False)
    names: tuple[str, ...] = ()

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> Jvp:
        return cls(*directions_asked(wanted, facts, record))

    def shaped(self, facts: CallFacts) -> CallFacts:
        require_all_lags(self.name, facts)
        count, shape = len(self.directions), facts.target_shape
        block = (count, *shape)
        return replace(
            facts, product=self.name, rows_of="directions", rows=count, group=count, row_shape=shape, block_shape=block
        )

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        return (Variable(self.name, (*target, ("direction", len(self.directions))), self.long_name),)

    def labels(self) -> dict[str, Sequence[str]]:
        return {"direction": self.names}

    def constants(self, target: Dims, source: Dims) -> dict[str, tuple[Dims, np.ndarray]]:
        return {"directions": ((("direction", len(self.directions)), *source), self.directions)}

    def beside(self, facts: CallFacts, windows: int) -> Arrays:
        return (repeated(self.directions, facts, windows),)

    def source(self, target: Target, given: Given) -> tf.Tensor:
        return tf.zeros((given[0].shape[0], *target.facts.target_shape), given[0].dtype)

    def rows(
        self, target: Target, given: Given, source: tf.Tensor, first: tf.Tensor, count: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            start = target.start(given)
            tape.watch(start)
            prediction = target.at(given, start)
        pulled = tape.gradient(prediction, start, source, unconnected_gradients=_ZERO)
        return prediction, contracted(pulled, some(given[1], first, count))

    def finished(self, target: Target, given: Given, block: tf.Tensor) -> tf.Tensor:
        return block

    def arranged(self, block: np.ndarray) -> np.ndarray:
        return np.moveaxis(block, 1, -1)

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        return values


def repeated(directions: np.ndarray, facts: CallFacts, windows: int) -> np.ndarray:
    """`(windows, direction, *source)`"""
    shaped = directions.astype(facts.dtype).reshape(len(directions), *facts.source.shape)
    return np.broadcast_to(shaped, (windows, *shaped.shape))


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
            remedy="name these",
        )
    found = np.zeros((len(names), *shape))
    for number, name in enumerate(names):
        found[number, :, record.features.index(name)] = 1 / record.scale[record.features.index(name)]
    return found, tuple(names)
