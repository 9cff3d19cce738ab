"""J·Jᵀ of each window: how far its outputs move together, over all that they are by. By weights it is the empirical
neural tangent kernel within the window; J itself is never stored.

A. Jacot, F. Gabriel and C. Hongler, "Neural tangent kernel: convergence and generalization in neural networks", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tensorflow as tf

from ..facts import CallFacts
from ..variables import Dims, Variable
from .gradient_norm import scale_of
from .jacobian import Jacobian
from .product import Given, by_outputs, require_all_lags

if TYPE_CHECKING:
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..model import Target
    from ..record import Record

_SUMMED = 1024  # numbers in one sum


@dataclass(frozen=True)
class Gram(Jacobian):
    """std: of each feature, where windows are scaled by it: derivatives are in units of the series."""

    name: ClassVar[str] = "gram"
    long_name: ClassVar[str] = "inner product of two outputs' derivatives with respect to the source"
    is_linear: ClassVar[bool] = False
    std: tuple[float, ...] = ()

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> Gram:
        return cls(scale_of(facts, record))

    def shaped(self, facts: CallFacts) -> CallFacts:
        require_all_lags(self.name, facts)
        return by_outputs(facts, self.name, facts.target_shape, indivisible=True)

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        again = tuple((f"{name}_2", size) for name, size in target)
        return (Variable(self.name, (*target, *again), self.long_name),)

    def finished(self, target: Target, given: Given, block: tf.Tensor) -> tf.Tensor:
        flat = self._by_unit(tf.reshape(block, (*block.shape[:2], target.facts.source_size)), 1)
        return tf.reshape(_product(flat), (*flat.shape[:2], *target.facts.target_shape))

    def pushed(self, pulled: np.ndarray) -> np.ndarray | None:
        flat = tf.reshape(tf.constant(pulled), (len(pulled), -1))
        return self._by_unit(flat, 2).numpy().reshape(pulled.shape)

    def _by_unit(self, derived: tf.Tensor, times: int) -> tf.Tensor:
        """`(…, source)`, over the features' std as often."""
        if not self.std:
            return derived
        by_feature = tf.reshape(derived, (*derived.shape[:-1], -1, len(self.std)))
        std = tf.constant(self.std, derived.dtype) ** times
        return tf.reshape(by_feature / std, derived.shape)

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        return values


def _product(flat: tf.Tensor) -> tf.Tensor:
    """`(batch, rows, number)` → `(batch, rows, rows)`: sums of sums, since one sum of millions loses digits."""
    batch, rows, numbers = flat.shape
    if numbers <= _SUMMED:
        return tf.matmul(flat, flat, transpose_b=True)
    whole = tf.pad(flat, [[0, 0], [0, 0], [0, -numbers % _SUMMED]])
    parts = tf.transpose(tf.reshape(whole, (batch, rows, -1, _SUMMED)), (0, 2, 1, 3))
    products = tf.matmul(parts, parts, transpose_b=True)
    return tf.cast(tf.reduce_sum(tf.cast(products, "float64"), 1), flat.dtype)
