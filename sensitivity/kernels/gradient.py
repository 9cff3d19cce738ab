"""Plain gradients, each of one output of one window, all in one pass: the windows are samples of a batch, as often as
there are outputs, and the gradient of what is wanted of them is every sample's own, since samples are independent.

It asks nothing of a model but one gradient, taken once. Where several outputs can be had of one forward pass, others
are faster; a model with one output has no faster way.
"""

from __future__ import annotations

import tensorflow as tf

from ..model import CallFacts, Target
from ..setting import Setting


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    if facts.target_size == 1 or facts.only_gradient:
        return None
    return f"the model gives {facts.target_size} numbers a window, and a gradient serves one"


def build(target: Target, setting: Setting):
    facts = target.facts
    rows = setting.outputs_per_call or facts.target_size

    def gradient(windows: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        samples = windows if rows == 1 else tf.repeat(windows, rows, axis=0)
        wanted = tf.tile(first + tf.range(rows), [setting.windows_per_call])
        vectors = tf.reshape(tf.one_hot(wanted, facts.target_size, dtype=facts.dtype), (-1, *facts.target_shape))
        together = facts.together or samples.shape[0]
        if together == samples.shape[0]:
            prediction, pulled = _pulled(target, samples, vectors)
        else:
            prediction, pulled = _in_batches(target, samples, vectors, together)
        return prediction[::rows], tf.reshape(pulled, (-1, rows, *facts.input_shape))

    return gradient


def _pulled(target: Target, samples: tf.Tensor, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(samples)
        prediction = target(samples)
    zero = tf.UnconnectedGradients.ZERO
    return prediction, tape.gradient(prediction, samples, vectors, unconnected_gradients=zero)


def _in_batches(target: Target, samples: tf.Tensor, vectors: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Batch after batch, each with a tape of its own; the last one is filled up by repeating."""
    count = samples.shape[0]
    batches = -(-count // size)
    filled = [tf.gather(part, tf.minimum(tf.range(batches * size), count - 1)) for part in (samples, vectors)]
    cut = [tf.reshape(part, (batches, size, *part.shape[1:])) for part in filled]
    found = tf.map_fn(
        lambda batch: _pulled(target, *batch),
        tuple(cut),
        fn_output_signature=tuple(tf.TensorSpec(part.shape[1:], part.dtype) for part in reversed(cut)),
        parallel_iterations=1,
    )
    prediction, pulled = (tf.reshape(part, (batches * size, *part.shape[2:]))[:count] for part in found)
    return prediction, pulled
