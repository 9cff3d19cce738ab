"""Products with the Jacobian by plain automatic differentiation, with which kernels must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from .errors import Refused
from .layers import as_graph
from .model import CallFacts, Target

TOLERANCE = 1e-4  # of the largest entry: float32 and another order of adding stay below 1e-5
_ZERO = tf.UnconnectedGradients.ZERO


def vjp(target: Target, windows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """vectorsᵀ · Jacobian: `(batch, *input_shape)` and `(batch, *target_shape)` → `(batch, *input_shape)`."""

    def pulled(source: tf.Tensor, vectors: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(source)
            prediction = target(source)
        return tape.gradient(prediction, source, vectors, unconnected_gradients=_ZERO)

    return _plainly(target, pulled, windows, vectors)


def jvp(target: Target, windows: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Jacobian · directions: two arrays `(batch, *input_shape)` → `(batch, *target_shape)`, by forward accumulation.

    That cannot pass the loop of a graph. There uᵀ · Jacobian, which is linear in u, is differentiated by u.
    """

    def accumulated(source: tf.Tensor, directions: tf.Tensor) -> tf.Tensor:
        with tf.autodiff.ForwardAccumulator(source, directions) as accumulator:
            prediction = target(source)
        return accumulator.jvp(prediction, unconnected_gradients=_ZERO)

    def transposed(source: tf.Tensor, directions: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as outer:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(source)
                prediction = target(source)
            vectors = tf.zeros_like(prediction)
            outer.watch(vectors)
            pulled = tape.gradient(prediction, source, vectors, unconnected_gradients=_ZERO)
        return outer.gradient(pulled, vectors, directions, unconnected_gradients=_ZERO)

    return _plainly(target, transposed if target.facts.recurrent else accumulated, windows, directions)


def _plainly(target: Target, product: Callable[..., tf.Tensor], *given: np.ndarray) -> np.ndarray:
    """Outside of any graph; of recurrent models, which would call Python at every step there, in one without XLA."""
    tensors = map(tf.constant, given)
    if not target.facts.recurrent:
        return product(*tensors).numpy()
    with target.folded():
        return as_graph(product)(*tensors).numpy()


def contracted(vectors: np.ndarray, jacobian: np.ndarray) -> np.ndarray:
    """vectorsᵀ · Jacobian of arrays `(batch, *target)` and `(batch, *target, *source)` → `(batch, source_size)`."""
    count = len(vectors)
    flat = vectors.reshape(count, -1)
    return np.einsum("nr,nrs->ns", flat, jacobian.reshape(*flat.shape, -1))


@dataclass(frozen=True)
class Seen:
    """What of a Jacobian that `max_lag` cuts can be compared with products of the whole.

    firsts: of each sample, the first of `lags` steps of the window by which outputs are compared. Where lags count back
    from each output's own step, only outputs of these steps are: all that they have of them is kept.
    """

    facts: CallFacts
    firsts: tuple[int, ...]

    @classmethod
    def of(cls, facts: CallFacts, samples: int) -> Seen:
        """The newest steps; with lags of each output's own, the newest, the oldest and others at random."""
        last = facts.input_shape[0] - facts.lags
        if not facts.by_output_step:
            return cls(facts, (last,) * samples)
        at = facts.output_at
        ends = [at[-1], at[0], *np.random.default_rng(0).choice(list(at), samples).tolist()]
        return cls(facts, tuple(min(max(0, end - facts.lags + 1), last) for end in ends[:samples]))

    def vectors(self, vectors: np.ndarray) -> np.ndarray:
        """`(batch, *target_shape)`, zero for outputs that are not compared."""
        if not self.facts.by_output_step:
            return vectors
        at = np.array(self.facts.output_at)
        kept = [(at >= first) & (at < first + self.facts.lags) for first in self.firsts]
        return vectors * np.array(kept, vectors.dtype)[..., None]

    def directions(self, directions: np.ndarray) -> np.ndarray:
        """`(batch, *input_shape)`, zero for steps that are not compared."""
        found = np.zeros_like(directions)
        for sample, first in enumerate(self.firsts):
            found[sample, first : first + self.facts.lags] = directions[sample, first : first + self.facts.lags]
        return found

    def steps(self, windows: np.ndarray) -> np.ndarray:
        """`(batch, *input_shape)` → `(batch, kept_size)`, the steps that are compared."""
        lags = self.facts.lags
        cut = [window[first : first + lags].ravel() for window, first in zip(windows, self.firsts, strict=True)]
        return np.stack(cut)

    def rows(self, jacobian: np.ndarray) -> np.ndarray:
        """`(batch, *target_shape, *kept_shape)` → `(batch, target_size, kept_size)`, by the steps that are compared."""
        facts, lags = self.facts, self.facts.lags
        rows = jacobian.reshape(len(jacobian), facts.target_size, facts.kept_size)
        if not facts.by_output_step:
            return rows
        by_lag = jacobian.reshape(len(jacobian), len(facts.output_at), -1, lags, facts.kept_size // lags)
        by_step = np.zeros_like(by_lag)
        for sample, first in enumerate(self.firsts):
            for number, step in enumerate(facts.output_at):
                seen = step - first + 1
                if 0 < seen <= lags:
                    by_step[sample, number, :, :seen] = by_lag[sample, number, :, lags - seen :]
        return by_step.reshape(rows.shape)


@dataclass(frozen=True)
class Probe:
    """Products of vectors with the Jacobian of a few windows, by plain reverse mode: kernels must agree with them.

    vectors: `(batch, *target_shape)`. expected: `(batch, *input_shape)`.
    """

    facts: CallFacts
    vectors: np.ndarray
    expected: np.ndarray

    @classmethod
    def of(cls, target: Target, windows: np.ndarray) -> Probe:
        facts = target.facts
        vectors = Seen.of(facts, len(windows)).vectors(_vectors(facts, len(windows)).astype(windows.dtype))
        source, size = windows.reshape(-1, *facts.input_shape), facts.together or len(windows)
        parts = [vjp(target, source[i : i + size], vectors[i : i + size]) for i in range(0, len(source), size)]
        return cls(facts, vectors, np.concatenate(parts))

    def error(self, jacobian: np.ndarray) -> float:
        """Of the Jacobian of these windows, or of the first of them, relative to the largest entry of the product."""
        count = len(jacobian)
        seen = Seen.of(self.facts, count)
        return relative_error(contracted(self.vectors[:count], seen.rows(jacobian)), seen.steps(self.expected[:count]))


def _vectors(facts: CallFacts, count: int) -> np.ndarray:
    """Random ones `(count, *target_shape)`; where a product is not linear in them, one output of each window."""
    random = np.random.default_rng(0)
    if facts.linear:
        return random.standard_normal((count, *facts.target_shape))
    wanted = random.integers(facts.target_size, size=count)
    return np.eye(facts.target_size)[wanted].reshape(count, *facts.target_shape)


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
