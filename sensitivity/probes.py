"""Products with the Jacobian by plain automatic differentiation, with which kernels must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from .errors import Refused
from .facts import CallFacts
from .layers import as_graph
from .model import Target
from .products.product import Given

TOLERANCE = 1e-4  # of the largest entry: float32 and another order of adding stay below 1e-5
_ZERO = tf.UnconnectedGradients.ZERO


def vjp(target: Target, windows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """vectorsᵀ · derivatives of the last group of rows: `(batch, *input_shape)` and `(batch, …)`, a number of each row
    (of a Jacobian `(batch, *target_shape)`), → `(batch, *source)`.
    """

    def pulled(vectors: tf.Tensor, *given: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            source = target.product.source(target, given)
            tape.watch(source)
            rows = last_rows(target, given, source)
        return tape.gradient(rows, source, vectors, unconnected_gradients=_ZERO)

    beside = target.product.beside(target.facts, len(windows))
    return _plainly(target, pulled, vectors.reshape(len(vectors), -1), windows, *beside)


def last_rows(target: Target, given: Given, source: tf.Tensor) -> tf.Tensor:
    """The rows that one call may share, the last of them: `(batch, group)`."""
    facts = target.facts
    count = None if facts.group == facts.rows else facts.group
    return target.product.rows(target, given, source, tf.constant(facts.rows - facts.group), count)[1]


def jvp(target: Target, windows: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Jacobian · directions: `(batch, *input_shape)` and `(batch, *source)` → `(batch, *target_shape)`, by forward
    accumulation.

    That cannot pass the loop of a graph. There uᵀ · Jacobian, which is linear in u, is differentiated by u.
    """

    def accumulated(windows: tf.Tensor, directions: tf.Tensor) -> tf.Tensor:
        source = target.start([windows])
        with tf.autodiff.ForwardAccumulator(source, directions) as accumulator:
            prediction = target.at([windows], source)
        return accumulator.jvp(prediction, unconnected_gradients=_ZERO)

    def transposed(windows: tf.Tensor, directions: tf.Tensor) -> tf.Tensor:
        source = target.start([windows])
        with tf.GradientTape(watch_accessed_variables=False) as outer:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(source)
                prediction = target.at([windows], source)
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
        last = 0 if facts.max_lag is None else facts.source.shape[0] - facts.lags
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
        """`(batch, *source)`, zero for steps that are not compared."""
        if self.facts.max_lag is None:
            return directions
        found = np.zeros_like(directions)
        for sample, first in enumerate(self.firsts):
            found[sample, first : first + self.facts.lags] = directions[sample, first : first + self.facts.lags]
        return found

    def steps(self, windows: np.ndarray) -> np.ndarray:
        """`(batch, *source)` → `(batch, row_size)`, the steps that are compared."""
        if self.facts.max_lag is None:
            return windows.reshape(len(windows), -1)
        lags = self.facts.lags
        cut = [window[first : first + lags].ravel() for window, first in zip(windows, self.firsts, strict=True)]
        return np.stack(cut)

    def rows(self, jacobian: np.ndarray) -> np.ndarray:
        """`(batch, *block_shape)` → the last group `(batch, group, row_size)`, by the steps that are compared."""
        facts, lags = self.facts, self.facts.lags
        rows = jacobian.reshape(len(jacobian), facts.rows, facts.row_size)[:, -facts.group :]
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
    """Products of vectors with derivatives of a few windows, by plain reverse mode: kernels must agree with them.

    vectors: `(batch, …)`, a number of each row of the last group: of a Jacobian `(batch, *target_shape)`. Where it or
    what becomes of it is not linear, they name one row of each window. expected: `(batch, …)`, as `Seen` has it.
    """

    facts: CallFacts
    vectors: np.ndarray
    expected: np.ndarray

    @classmethod
    def of(cls, target: Target, windows: np.ndarray) -> Probe:
        facts, seen, random = target.facts, Seen.of(target.facts, len(windows)), np.random.default_rng(0)
        shaped = windows.reshape(-1, *facts.input_shape)
        shape = facts.target_shape if facts.rows_of == "outputs" else (facts.group,)
        if facts.linear and target.product.is_linear:
            vectors = random.standard_normal((len(windows), *shape))
        else:
            vectors = np.eye(facts.group)[random.integers(facts.group, size=len(windows))].reshape(-1, *shape)
        vectors = seen.vectors(vectors.astype(windows.dtype))
        size = facts.together or len(windows)
        parts = [vjp(target, shaped[i : i + size], vectors[i : i + size]) for i in range(0, len(windows), size)]
        expected = np.concatenate(parts)
        if target.product.is_linear:
            return cls(facts, vectors, seen.steps(expected))
        along = target.product.pushed(expected)
        if along is not None:
            return cls(facts, vectors, jvp(target, shaped, along))
        return cls(facts, vectors, target.product.finished(target, [shaped], tf.constant(expected[:, None])).numpy())

    def error(self, derived: np.ndarray) -> float:
        """Of the derivatives of these windows, or of the first of them, relative to the product's largest entry."""
        count = len(derived)
        found = contracted(self.vectors[:count], Seen.of(self.facts, count).rows(derived))
        return relative_error(found, self.expected[:count].reshape(count, -1))


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
