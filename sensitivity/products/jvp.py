"""∂ target / ∂ source · d for given directions d: how all outputs answer to one change of the source, at once.

By transposition: uᵀ · J · d is linear in u, so its gradient by u is J · d (J. Townsend, "A new trick for calculating
Jacobian vector products", 2017). What is differentiated by is u, whatever its value, and so every kernel serves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tensorflow as tf

from ..facts import CallFacts
from ..variables import Dims, Variable
from .directions import Directed
from .product import Given, require_all_lags, some
from .vjp import contracted

if TYPE_CHECKING:
    from ..model import Target

_ZERO = tf.UnconnectedGradients.ZERO


@dataclass(frozen=True)
class Jvp(Directed):
    name: ClassVar[str] = "jvp"
    long_name: ClassVar[str] = "derivative of the output along a direction"

    def shaped(self, facts: CallFacts) -> CallFacts:
        require_all_lags(self.name, facts)
        count, shape = len(self.directions), facts.target_shape
        block = (count, *shape)
        return replace(
            facts, product=self.name, rows_of="directions", rows=count, group=count, row_shape=shape, block_shape=block
        )

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        return (Variable(self.name, (*target, ("direction", len(self.directions))), self.long_name),)

    def source(self, target: Target, given: Given) -> tf.Tensor:
        return tf.zeros((given[0].shape[0], *target.facts.turned_shape), given[0].dtype)

    def rows(
        self, target: Target, given: Given, source: tf.Tensor, first: tf.Tensor, count: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            start = target.start(given)
            tape.watch(start)
            prediction = target.at(given, start)
        turned = tf.reshape(source, prediction.shape)
        pulled = tape.gradient(prediction, start, turned, unconnected_gradients=_ZERO)
        return prediction, contracted(pulled, some(given[1], first, count))

    def finished(self, target: Target, given: Given, block: tf.Tensor) -> tf.Tensor:
        return block

    def arranged(self, block: np.ndarray) -> np.ndarray:
        return np.moveaxis(block, 1, -1)

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        return values
