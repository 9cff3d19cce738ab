"""∂ target / ∂ source, whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import tensorflow as tf

from ..facts import CallFacts
from ..variables import OF_INPUT, Dims, Variable
from .product import Given, Product, by_outputs, outputs

if TYPE_CHECKING:
    from ..model import Target


@dataclass(frozen=True)
class Jacobian(Product):
    name: ClassVar[str] = "jacobian"
    long_name: ClassVar[str] = "derivative of the output with respect to"

    def shaped(self, facts: CallFacts) -> CallFacts:
        return by_outputs(facts, self.name, facts.kept_shape)

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        by = {"parameter": "the model's weights"}.get(source[0][0], "what a layer gives")
        said = OF_INPUT if source[0][0] == "lag" else f"{self.long_name} {by}"
        return (Variable(self.name, (*target, *source), said),)

    def rows(
        self, target: Target, given: Given, source: tf.Tensor, first: tf.Tensor, count: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        prediction = target.at(given, source)
        return prediction, outputs(target, prediction, first, count)
