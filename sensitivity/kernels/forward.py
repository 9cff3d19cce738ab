"""Fewer inputs than outputs: one Jacobian-vector product per input number, all outputs at once.

TensorFlow's own forward accumulator cannot pass a compiled recurrent loop, so forward mode is had by transposition.
The vector-Jacobian product g(u) = uᵀ·J is linear in u, whatever u is; its own reverse-mode derivative by u, one input
at a time, is a column of J: ∂g_i/∂u = J·e_i. (The identity is that of J. Townsend, "A new trick for calculating
Jacobian vector products", 2017.) Each column costs a pass forward through the linearised model, and no weight gradient
or second derivative is ever formed: TensorFlow prunes what u does not reach.
"""

from __future__ import annotations

import tensorflow as tf

from ..facts import CallFacts
from ..model import Target
from ..products.product import Given
from ..setting import Setting
from .rows import side_by_side

_ZERO = tf.UnconnectedGradients.ZERO


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    if facts.rows_of != "outputs":
        return f"the {facts.product} is made of few products, and not of a Jacobian's columns"
    return "pfor cannot pass a recurrent loop twice" if facts.recurrent and pfor else None


def build(target: Target, setting: Setting):
    facts = target.facts

    def forward(given: Given, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        several = side_by_side(setting) is not None  # times that the tape is used
        with tf.GradientTape(persistent=several, watch_accessed_variables=False) as outer:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                source = target.start(given)
                tape.watch(source)
                prediction, outputs = target.product.rows(target, given, source, first, setting.outputs_per_call)
            cotangents = tf.zeros_like(outputs)
            outer.watch(cotangents)
            pulled = tape.gradient(outputs, source, output_gradients=cotangents, unconnected_gradients=_ZERO)
            pulled = tf.reshape(pulled, (setting.windows_per_call, facts.source_size))
        columns = outer.batch_jacobian(
            pulled,
            cotangents,
            unconnected_gradients=_ZERO,
            parallel_iterations=side_by_side(setting),
            experimental_use_pfor=setting.experimental_use_pfor,
        )
        block = tf.transpose(columns, (0, 2, 1))
        return prediction, tf.reshape(block, (setting.windows_per_call, -1, *facts.source.shape))

    return forward
