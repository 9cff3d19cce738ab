"""The outputs that one call differentiates, and how many of them at a time."""

from __future__ import annotations

import tensorflow as tf

from ..model import CallFacts
from ..setting import Setting


def rows(prediction: tf.Tensor, first: tf.Tensor, facts: CallFacts, setting: Setting) -> tf.Tensor:
    """`(batch, *target_shape)` → `(batch, outputs_per_call)`, from output `first` on."""
    flat = tf.reshape(prediction, (setting.windows_per_call, facts.target_size))
    if setting.outputs_per_call is None:
        return flat
    return tf.slice(flat, [0, first], [setting.windows_per_call, setting.outputs_per_call])


def side_by_side(setting: Setting) -> int | None:
    """`parallel_iterations` for TensorFlow, whose own default lets ten iterations of a loop be under way at once.

    That is no faster on one core, and took nine times the memory of one for LSTM(32) over 100 steps.
    """
    if setting.experimental_use_pfor:
        return setting.parallel_iterations
    return setting.parallel_iterations or 1
