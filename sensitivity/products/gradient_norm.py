"""‖∂ output / ∂ source‖₂ of each output: the quantity of input-gradient regularization.

H. Drucker and Y. LeCun, "Improving generalization performance using double backpropagation", 1992.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tensorflow as tf

from ..facts import CallFacts
from ..variables import Dims, Variable
from .jacobian import Jacobian
from .product import Given, by_outputs, newest

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..model import Target
    from ..record import Record


@dataclass(frozen=True)
class GradientNorm(Jacobian):
    """std: of each feature, where windows are scaled by it: the norm is of derivatives in units of the series."""

    name: ClassVar[str] = "gradient_norm"
    long_name: ClassVar[str] = "Euclidean norm of the output's derivative with respect to the source"
    is_linear: ClassVar[bool] = False
    std: tuple[float, ...] = ()

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> GradientNorm:
        by_input = facts.source.kind == "input" and record.scaling is not None
        return cls(std=tuple(record.scale.tolist()) if by_input else ())

    def shaped(self, facts: CallFacts) -> CallFacts:
        return by_outputs(facts, self.name, ())

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        return (Variable(self.name, target, self.long_name),)

    def finished(self, target: Target, given: Given, block: tf.Tensor) -> tf.Tensor:
        kept = newest(block, target.facts)
        if self.std:
            shape = (*kept.shape[:2], -1, len(self.std))
            kept = tf.reshape(kept, shape) / tf.constant(self.std, kept.dtype)
        return tf.sqrt(tf.reduce_sum(tf.square(kept), tuple(range(2, len(kept.shape)))))

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        return values
