"""vᵀ · ∂ target / ∂ source for given vectors v, at the cost of a gradient each: the Jacobian is never formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tensorflow as tf

from ..facts import CallFacts
from ..record import read_array, require_shape
from ..variables import Dims, Variable
from .product import Arrays, Given, Product, some

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..model import Target
    from ..record import Record


_KEY = "sensitivity.vectors"
RULES = ("sum", "mean", "last")


@dataclass(frozen=True)
class Vjp(Product):
    """vectors: `(vector, *target_shape)`, the same for all windows. names: of each."""

    name: ClassVar[str] = "vjp"
    long_name: ClassVar[str] = "derivative of the outputs' sum, weighted by a vector, with respect to the source"
    vectors: np.ndarray = field(compare=False)
    names: tuple[str, ...] = ()

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> Vjp:
        shape = tuple(size for _, size in facts.target_dims)
        given = wanted.vectors or ("sum",)
        if isinstance(given, str):
            array = require_shape(read_array(given, _KEY), shape, _KEY, "vectors by output step and output")
            return cls(array, tuple(f"vector_{number}" for number in range(len(array))))
        return cls(np.stack([by_rule(rule, shape) for rule in given]), tuple(given))

    def shaped(self, facts: CallFacts) -> CallFacts:
        count, shape = len(self.vectors), facts.kept_shape
        block = (count, *shape)
        return replace(
            facts, product=self.name, rows_of="vectors", rows=count, group=count, row_shape=shape, block_shape=block
        )

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        return (Variable(self.name, (("vector", len(self.vectors)), *source), self.long_name),)

    def labels(self) -> dict[str, Sequence[str]]:
        return {"vector": self.names}

    def constants(self, target: Dims, source: Dims) -> dict[str, tuple[Dims, np.ndarray]]:
        return {"vectors": ((("vector", len(self.vectors)), *target), self.vectors)}

    def beside(self, facts: CallFacts, windows: int) -> Arrays:
        vectors = self.vectors.astype(facts.dtype).reshape(len(self.vectors), *facts.target_shape)
        return (np.broadcast_to(vectors, (windows, *vectors.shape)),)

    def rows(
        self, target: Target, given: Given, source: tf.Tensor, first: tf.Tensor, count: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        prediction = target.at(given, source)
        return prediction, contracted(prediction, some(given[1], first, count))


def by_rule(rule: str, shape: tuple[int, ...]) -> np.ndarray:
    """`([output_step, ]output)`: the sum or the mean of all outputs, or the sum of those of the last step."""
    ones = np.ones(shape)
    if rule == "last" and len(shape) > 1:
        ones[:-1] = 0
    return ones / ones.size if rule == "mean" else ones


def contracted(prediction: tf.Tensor, vectors: tf.Tensor) -> tf.Tensor:
    """(B, …) and (B, K, …) → (B, K), their products summed."""
    batch, count = vectors.shape[:2]
    flat = tf.reshape(prediction, (batch, -1, 1))
    return tf.squeeze(tf.matmul(tf.reshape(vectors, (batch, count, -1)), flat), -1)
