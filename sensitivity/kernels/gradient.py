"""Plain gradients, each of one row of one window, all in one pass: the windows are samples of a batch, as often as
there are rows, and the gradient of what is wanted of them is every sample's own, since samples are independent.

It asks nothing of a model but one gradient, taken once. Where several rows can be had of one forward pass, others are
faster; one row has no faster way.
"""

from __future__ import annotations

import tensorflow as tf

from ..facts import CallFacts
from ..model import Target
from ..products.product import Given
from ..setting import Setting


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    if facts.rows == 1 or facts.only_gradient:
        return None
    if facts.has_loops_alone and facts.rows_of in ("outputs", "vectors"):
        return None  # loops do little at a time, and so more samples cost little
    return f"there are {facts.rows} numbers a window, and a gradient serves one"


def build(target: Target, setting: Setting):
    rows = setting.outputs_per_call or target.facts.rows

    def gradient(given: Given, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        samples = [part if rows == 1 else tf.repeat(part, rows, axis=0) for part in given]
        count = samples[0].shape[0]
        wanted = tf.tile(tf.range(rows), [setting.windows_per_call])
        vectors = tf.one_hot(wanted, rows, dtype=target.facts.dtype)
        if (target.facts.together or count) >= count:
            prediction, pulled = _pulled(target, setting, first, samples, vectors)
        else:
            prediction, pulled = _in_batches(target, setting, first, [*samples, vectors])
        return prediction[::rows], tf.reshape(pulled, (-1, rows, *pulled.shape[1:]))

    return gradient


def _pulled(
    target: Target, setting: Setting, first: tf.Tensor, given: Given, vectors: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        source = target.product.source(target, given)
        tape.watch(source)
        prediction, rows = target.product.rows(target, given, source, first, setting.outputs_per_call)
    pulled = tape.gradient(rows, source, vectors, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return prediction, tf.ensure_shape(pulled, source.shape)  # which a gradient of Python's own does not tell


def _in_batches(
    target: Target, setting: Setting, first: tf.Tensor, parts: list[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Batch after batch, each with a tape of its own; the last one is filled up by repeating."""
    facts, count = target.facts, parts[0].shape[0]
    size = facts.together or count
    batches = -(-count // size)
    filled = [tf.gather(part, tf.minimum(tf.range(batches * size), count - 1)) for part in parts]
    cut = [tf.reshape(part, (batches, size, *part.shape[1:])) for part in filled]
    found = tf.map_fn(
        lambda batch: _pulled(target, setting, first, batch[:-1], batch[-1]),
        tuple(cut),
        fn_output_signature=tuple(
            tf.TensorSpec((size, *shape), facts.dtype) for shape in (facts.target_shape, facts.source.shape)
        ),
        parallel_iterations=1,
    )
    prediction, pulled = (tf.reshape(part, (batches * size, *part.shape[2:]))[:count] for part in found)
    return prediction, pulled
