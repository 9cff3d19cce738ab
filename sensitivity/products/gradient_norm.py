"""‖∂ output / ∂ source‖₂ of each output: the quantity of input-gradient regularization. By weights, a norm for each.

H. Drucker and Y. LeCun, "Improving generalization performance using double backpropagation", 1992.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """std: of each feature, where windows are scaled by it: the norm is of derivatives in units of the series.
    weights, sizes: names of weights that it is by, and how many numbers each has.
    """

    name: ClassVar[str] = "gradient_norm"
    long_name: ClassVar[str] = "Euclidean norm of the output's derivative with respect to the source"
    is_linear: ClassVar[bool] = False
    std: tuple[float, ...] = ()
    weights: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> GradientNorm:
        return replace(cls.of(facts), std=scale_of(facts, record))

    @classmethod
    def of(cls, facts: CallFacts) -> GradientNorm:
        """By the source, as the model takes it."""
        weights = facts.source.weights
        return cls(weights=tuple(one.name for one in weights), sizes=tuple(one.size for one in weights))

    def shaped(self, facts: CallFacts) -> CallFacts:
        return by_outputs(facts, self.name, (len(self.weights),) if self.weights else ())

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        own = (("weight", len(self.weights)),) if self.weights else ()
        return (Variable(self.name, (*target, *own), self.long_name),)

    def labels(self) -> dict[str, Sequence[str]]:
        return {"weight": self.weights}

    def finished(self, target: Target, given: Given, block: tf.Tensor) -> tf.Tensor:
        kept = newest(block, target.facts)
        if self.std:
            shape = (*kept.shape[:2], -1, len(self.std))
            kept = tf.reshape(kept, shape) / tf.constant(self.std, kept.dtype)
        if not self.weights:
            return _norm(kept)
        flat = tf.reshape(kept, (*kept.shape[:2], sum(self.sizes)))
        return tf.stack([_norm(part) for part in tf.split(flat, self.sizes, -1)], -1)

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        return values


def scale_of(facts: CallFacts, record: Record) -> tuple[float, ...]:
    """The std of each feature, where windows are scaled by it and derivatives are by them; nothing else."""
    return tuple(record.scale.tolist()) if facts.source.kind == "input" and record.scaling is not None else ()


def _norm(block: tf.Tensor) -> tf.Tensor:
    """`(batch, rows, …)` → `(batch, rows)`"""
    return tf.sqrt(tf.reduce_sum(tf.square(block), tuple(range(2, len(block.shape)))))
