"""One number a window: the gradient of the batch's sum is every window's Jacobian, since windows are independent."""

from __future__ import annotations

import tensorflow as tf

from ..facts import CallFacts
from ..model import Target
from ..products.product import Given
from ..setting import Setting


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    return None if facts.rows == 1 else f"there are {facts.rows} numbers a window, and a gradient serves one"


def build(target: Target, setting: Setting):
    def gradient(given: Given, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            source = target.product.source(target, given)
            tape.watch(source)
            prediction, row = target.product.rows(target, given, source, first, None)
        derived = tape.gradient(row, source, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return prediction, derived[:, None]

    return gradient
