"""What a model's backward pass allows, beyond one plain gradient of windows.

A kernel pulls many outputs back at once, and adds up as it likes, since uᵀ·J is linear in u and each window is alone.
Some models are not like that: SavedModels whose loops are called as they were restored, which no tape can use twice
(tensorflow#57343), models with a `tf.py_function`, and models with a `tf.custom_gradient` that clips, or works on the
batch as a whole. Their Jacobian is by definition what `tape.gradient` gives for one output of one window alone, as the
model is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from .errors import Refused, gist
from .layers import as_graph, holds_moments, keras
from .packing import drawn, innermost
from .saved_models import SavedModel, custom_gradient_of

_TOLERANCE = 1e-4  # of the largest entry
_SCALES = (1.0, 1e-4, 1e4)  # of what is pulled back: clipping may begin anywhere
_SAMPLES = 3
Pulled = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class Backward:
    """only_gradient: why no kernel serves but `gradient`; empty where others do. together: windows whose gradient can
    be taken in one pass; None: any number. linear: as far as custom gradients tell. only_first: why second derivatives
    mean nothing; empty where they do.
    """

    only_gradient: str = ""
    together: int | None = None
    linear: bool = True
    only_first: str = ""


def backward(
    model: keras.Model,
    target: Callable[[tf.Tensor], tf.Tensor],
    shape: tuple[int, ...],
    dtype: str,
    nodes: Iterable[Any],
) -> Backward:
    """Of a target of windows `(batch, *shape)`. nodes: its graph's operations. Raises `Refused` without a gradient."""
    saved, nodes = isinstance(innermost(model), SavedModel), list(nodes)
    found = _restored(innermost(model), target, shape, dtype) if saved else Backward()
    if saved and any(node.op == "StopGradient" for node in nodes):  # as tf.nn.moments has
        found = replace(found, only_first="it was saved with a stopped gradient, such as that of normalization")
    elif holds_moments(nodes):
        found = replace(
            found,
            only_first="it has TensorFlow's moments by a name of its own, or in a tf.function: call tf.nn.moments",
        )
    if any(node.op == "EagerPyFunc" for node in nodes):
        found = replace(found, only_gradient="tf.py_function remembers its pass forward for one gradient alone")
    if not any(map(custom_gradient_of, nodes)):
        return found
    try:
        alone, linear = _tried(target, drawn(model, shape, dtype, _SAMPLES))
    except Exception as error:
        raise _without_gradient(error) from error
    if not alone:
        return _one_by_one(found)
    if not linear:
        said = "a custom gradient is not linear in what it is given"
        return replace(found, only_gradient=said, linear=False)
    return found


def _one_by_one(found: Backward) -> Backward:
    if found.together not in (None, 1):
        raise Refused(
            "model.path",
            given=f"a SavedModel that takes {found.together} windows at a time, and whose custom gradient lets them "
            "influence each other",
            allowed="models whose gradient is each window's own",
            remedy="save it for any number of windows, (None, lag, feature), or for one",
        )
    said = "a custom gradient lets the windows of a batch influence each other"
    return replace(found, only_gradient=said, together=1, linear=False)


# ---- SavedModels -------------------------------------------------------------------------------------


def _restored(model: SavedModel, target: Any, shape: tuple[int, ...], dtype: str) -> Backward:
    """Traced, not run."""
    batch = model.batch
    windows = tf.TensorSpec((batch or _SAMPLES, *shape), dtype)
    try:
        as_graph(lambda given: _pulled(target)(given, tf.ones_like(target(given)))).get_concrete_function(windows)
    except Exception as error:
        raise _without_gradient(error) from error
    if batch:
        return Backward(f"the SavedModel takes {batch} windows at a time", batch)
    try:
        as_graph(lambda given: _pulled_twice(target, given)).get_concrete_function(windows)
    except Exception:  # TensorFlow has several words for it
        twice = "a SavedModel's loops cannot be differentiated by a tape that is used twice (tensorflow#57343)"
        return Backward(f"{twice}: {model.bound}" if model.bound else twice)
    return Backward()


def _without_gradient(error: Exception) -> Refused:
    return Refused(
        "model.path",
        given=f"a model without a gradient ({gist(error)})",
        allowed="models that tape.gradient can differentiate",
        remedy="where it was on a tape before, load it anew; else save it with "
        "tf.saved_model.SaveOptions(experimental_custom_gradients=True), "
        "and not for inference alone",
    )


def _pulled_twice(target: Any, windows: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(windows)
        prediction = target(windows)
    return tape.gradient(prediction, windows, unconnected_gradients=tf.UnconnectedGradients.ZERO)


# ---- custom gradients --------------------------------------------------------------------------------


def _pulled(target: Any) -> Pulled:
    def pulled(windows: tf.Tensor, vectors: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(windows)
            prediction = target(windows)
        return tape.gradient(prediction, windows, vectors, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    return pulled


def _tried(target: Any, windows: tf.Tensor) -> tuple[bool, bool]:
    """Whether the gradients of a batch are those of each sample alone, and linear in what is pulled back."""
    random = np.random.default_rng(1)
    pulled = as_graph(_pulled(target))
    like = as_graph(target)(windows)
    one, other = (tf.constant(random.standard_normal(like.shape), windows.dtype) for _ in range(2))
    plain, alone, linear = pulled(windows, one) + pulled(windows, other), True, True
    for scale in _SCALES:
        whole = pulled(windows, scale * (one + other))
        parts = [pulled(windows[i : i + 1], scale * (one + other)[i : i + 1]) for i in range(_SAMPLES)]
        alone = alone and _agree(tf.concat(parts, 0), whole)
        linear = linear and _agree(whole / scale, plain)
    return alone, linear


def _agree(found: tf.Tensor, expected: tf.Tensor) -> bool:
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    return np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
