"""Any target: one vector-Jacobian product per output number, vectorised by pfor or looped over."""

from __future__ import annotations

import tensorflow as tf

from ..model import CallFacts, Target
from ..setting import Setting
from .rows import rows, side_by_side


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    if facts.recurrent and pfor and xla:
        return "it has no kernel for the lists that pfor makes of a recurrent loop"
    return None


def build(target: Target, setting: Setting):
    facts = target.facts

    def batch_jacobian(windows: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # A tape that serves fewer than all outputs at a time is used several times, so it must persist.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(windows)
            prediction = target(windows)
            outputs = rows(prediction, first, facts, setting)
        jacobian = tape.batch_jacobian(
            outputs,
            windows,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
            parallel_iterations=side_by_side(setting),
            experimental_use_pfor=setting.experimental_use_pfor,
        )
        return prediction, jacobian

    return batch_jacobian
