"""Products with the Jacobian by plain automatic differentiation: other paths through TensorFlow than any kernel's."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from .errors import Refused
from .model import CallFacts, Target

TOLERANCE = 1e-4  # of the largest entry: float32 and another order of adding stay below 1e-5
_ZERO = tf.UnconnectedGradients.ZERO


def vjp(target: Target, windows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """vectorsᵀ · Jacobian: `(batch, *input_shape)` and `(batch, *target_shape)` → `(batch, *input_shape)`."""
    source = tf.constant(windows)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(source)
        prediction = target(source)
    return tape.gradient(prediction, source, tf.constant(vectors), unconnected_gradients=_ZERO).numpy()


def jvp(target: Target, windows: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Jacobian · directions: two arrays `(batch, *input_shape)` → `(batch, *target_shape)`, by forward accumulation."""
    source = tf.constant(windows)
    with tf.autodiff.ForwardAccumulator(source, tf.constant(directions)) as accumulator:
        prediction = target(source)
    return accumulator.jvp(prediction, unconnected_gradients=_ZERO).numpy()


def contracted(vectors: np.ndarray, jacobian: np.ndarray) -> np.ndarray:
    """vectorsᵀ · Jacobian of arrays `(batch, *target)` and `(batch, *target, *source)` → `(batch, source_size)`."""
    count = len(vectors)
    flat = vectors.reshape(count, -1)
    return np.einsum("nr,nrs->ns", flat, jacobian.reshape(*flat.shape, -1))


def newest(jacobian: np.ndarray, facts: CallFacts) -> np.ndarray:
    """∂ outputs / ∂ the window's last `lags` steps, `(batch, target_size, kept_size)`: whole even where `max_lag` cuts.

    What is kept by each output's own lags holds all that later outputs have of the last `lags` steps.
    """
    rows = jacobian.reshape(len(jacobian), facts.target_size, facts.kept_size)
    if not facts.by_output_step:
        return rows
    steps, lags = facts.input_shape[0], facts.lags
    by_lag = jacobian.reshape(len(jacobian), steps, -1, lags, facts.kept_size // lags)
    by_step = np.zeros_like(by_lag)
    for output_step in range(max(0, steps - lags), steps):
        seen = output_step - (steps - lags) + 1
        by_step[:, output_step, :, :seen] = by_lag[:, output_step, :, lags - seen :]
    return by_step.reshape(rows.shape)


def require_agreement(kernel: str, error: float) -> None:
    """Refuse a kernel whose numbers are not the model's."""
    if not error <= TOLERANCE:
        raise Refused(
            "sensitivity.kernel",
            given=f"{kernel} that differs from an independent vector-Jacobian product by {error:.1e}",
            allowed=f"{TOLERANCE:.0e} of the largest entry",
            remedy='set it to "auto", or to "batch_jacobian" with experimental_use_pfor = false',
        )


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference by largest entry, over finite entries; infinite where one is finite and the other not."""
    finite = np.isfinite(expected)
    if (np.isfinite(found) != finite).any():
        return float("inf")
    scale = float(np.abs(expected[finite]).max(initial=0.0)) or 1.0
    return float(np.abs(found[finite] - expected[finite]).max(initial=0.0) / scale)
