"""Any target: one vector-Jacobian product per output number, vectorised by pfor or looped over."""

from __future__ import annotations

import tensorflow as tf

from ..facts import CallFacts
from ..model import Target
from ..products.product import Given
from ..setting import Setting
from .rows import side_by_side


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    if pfor and facts.source.loops:
        return "pfor cannot pass the loop over samples with weights of their own"
    if facts.recurrent and pfor and facts.rows_of in ("directions", "derivatives"):
        return "pfor cannot pass a recurrent loop twice"
    if facts.recurrent and pfor and xla:
        return "it has no kernel for the lists that pfor makes of a recurrent loop"
    return None


def build(target: Target, setting: Setting):
    def batch_jacobian(given: Given, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # A tape that serves fewer than all rows at a time is used several times, so it must persist. Through
        # recurrent loops, that makes it a quarter slower.
        several = side_by_side(setting) is not None
        with tf.GradientTape(persistent=several, watch_accessed_variables=False) as tape:
            source = target.product.source(target, given)
            tape.watch(source)
            prediction, rows = target.product.rows(target, given, source, first, setting.outputs_per_call)
        jacobian = tape.batch_jacobian(
            rows,
            source,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
            parallel_iterations=side_by_side(setting),
            experimental_use_pfor=setting.experimental_use_pfor,
        )
        return prediction, jacobian

    return batch_jacobian
