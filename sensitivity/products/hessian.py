"""∂² output / ∂ source²: every output's gradient, differentiated once more, as many of its rows at a time as fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tensorflow as tf

from ..facts import CallFacts
from ..variables import Dims, Variable
from .product import Given, Product, require_all_lags

if TYPE_CHECKING:
    from ..model import Target

_ZERO = tf.UnconnectedGradients.ZERO


@dataclass(frozen=True)
class Hessian(Product):
    name: ClassVar[str] = "hessian"
    long_name: ClassVar[str] = "second derivative of the output with respect to the source"

    def shaped(self, facts: CallFacts) -> CallFacts:
        require_all_lags(self.name, facts)
        size, shape = facts.source_size, facts.source.shape
        return replace(
            facts,
            product=self.name,
            rows_of="derivatives",
            rows=facts.target_size * size,
            group=size,
            row_shape=shape,
            block_shape=(*facts.target_shape, *shape, *shape),
        )

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        again = tuple((f"{name}_2", size) for name, size in source)
        cut = 0 if target[0][1] > 1 else len(target)  # output steps, else rows
        return (Variable(self.name, (*target, *source, *again), self.long_name, cut),)

    def rows(
        self, target: Target, given: Given, source: tf.Tensor, first: tf.Tensor, count: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        size = target.facts.source_size
        prediction, gradient = gradient_of_one(target, given, source, first // size)
        return prediction, gradient if count is None else tf.slice(gradient, [0, first % size], [-1, count])

    def finished(self, target: Target, given: Given, block: tf.Tensor) -> tf.Tensor:
        return block

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        features = np.broadcast_to(std, values[self.name].shape[-1:])
        return {**values, self.name: values[self.name] / features[:, None, None] / features}


def gradient_of_one(target: Target, given: Given, source: tf.Tensor, output: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """prediction `(batch, *target_shape)`, and the gradient of one of its numbers `(batch, source_size)`."""
    facts = target.facts
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(source)
        prediction = target.at(given, source)
        flat = tf.reshape(prediction, (prediction.shape[0], facts.target_size))
        one = flat[:, 0] if facts.target_size == 1 else tf.gather(flat, output, axis=1)
    gradient = tape.gradient(one, source, unconnected_gradients=_ZERO)
    return prediction, tf.reshape(gradient, (prediction.shape[0], facts.source_size))
