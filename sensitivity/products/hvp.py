"""∂² output / ∂ source² · d for given directions d: the Hessian is never formed.

B. A. Pearlmutter, "Fast exact multiplication by the Hessian", 1994.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import tensorflow as tf

from ..facts import CallFacts
from ..variables import Dims, Variable
from .directions import Directed
from .hessian import gradient_of_one
from .product import Given, require_all_lags, some
from .vjp import contracted

if TYPE_CHECKING:
    from ..model import Target


@dataclass(frozen=True)
class Hvp(Directed):
    name: ClassVar[str] = "hvp"
    long_name: ClassVar[str] = "derivative, with respect to the source, of the output's derivative along a direction"

    def shaped(self, facts: CallFacts) -> CallFacts:
        require_all_lags(self.name, facts)
        count, shape = len(self.directions), facts.source.shape
        return replace(
            facts,
            product=self.name,
            rows_of="derivatives",
            rows=facts.target_size * count,
            group=count,
            row_shape=shape,
            block_shape=(*facts.target_shape, count, *shape),
        )

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        return (Variable(self.name, (*target, ("direction", len(self.directions)), *source), self.long_name),)

    def rows(
        self, target: Target, given: Given, source: tf.Tensor, first: tf.Tensor, count: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        directions = given[1].shape[1]
        prediction, gradient = gradient_of_one(target, given, source, first // directions)
        return prediction, contracted(gradient, some(given[1], first % directions, count))

    def finished(self, target: Target, given: Given, block: tf.Tensor) -> tf.Tensor:
        return block
