"""One output a window: the gradient of the batch's sum is every window's Jacobian, since windows are independent."""

from __future__ import annotations

import tensorflow as tf

from ..model import CallFacts, Target
from ..setting import Setting


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    if facts.target_size == 1:
        return None
    return f"the model gives {facts.target_size} numbers a window, and a gradient serves one"


def build(target: Target, setting: Setting):
    facts = target.facts

    def gradient(windows: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(windows)
            prediction = target(windows)
        jacobian = tape.gradient(prediction, windows, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return prediction, tf.reshape(jacobian, (-1, 1, *facts.input_shape))

    return gradient
