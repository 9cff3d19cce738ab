"""Averages of a Jacobian over points near a window: what products that look beyond the window itself have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Refused
from ..facts import CallFacts
from ..variables import Dims, Variable
from .jacobian import Jacobian
from .product import Arrays, Fetch, require_all_lags

if TYPE_CHECKING:
    from ..engine import Tuned


@dataclass(frozen=True)
class Points:
    """The points share·x + shift of an input x, and the weights of their Jacobians in a sum.

    shares, weights: `(point)`. shifts: `(point, *source)`, or of one point for all. baselines: the same, which
    Jacobians are multiplied by the input's difference to; None: they are not.
    """

    shares: np.ndarray
    shifts: np.ndarray
    weights: np.ndarray
    baselines: np.ndarray | None = None

    @property
    def count(self) -> int:
        return len(self.shares)

    def as_dtype(self, dtype: str) -> Points:
        """The same numbers in the dtype that windows are computed in."""
        shares, shifts, weights = (part.astype(dtype) for part in (self.shares, self.shifts, self.weights))
        return Points(shares, shifts, weights, None if self.baselines is None else self.baselines.astype(dtype))

    def of(self, inputs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """`(n, *source)`: of each input the point of that number."""
        shares = self.shares[numbers].reshape(-1, *(1,) * (inputs.ndim - 1))
        moved = shares * inputs
        moved += _at(self.shifts, numbers)
        return moved

    def weighted(self, blocks: np.ndarray, inputs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Jacobians `(n, *target, *source)` of such points, as the sum takes them."""
        factors = self.weights[numbers].reshape(-1, *(1,) * (inputs.ndim - 1))
        if self.baselines is not None:
            factors = factors * (inputs - _at(self.baselines, numbers))
        between = (1,) * (blocks.ndim - inputs.ndim)
        return blocks * factors.reshape(len(factors), *between, *factors.shape[1:])

    def and_window(self) -> Points:
        """With the input itself at the end, of no weight, for its prediction."""
        none = np.zeros_like(self.shifts[:1])
        baselines = None if self.baselines is None else np.concatenate([self.baselines, none])
        return Points(
            np.append(self.shares, 1.0), np.concatenate([self.shifts, none]), np.append(self.weights, 0.0), baselines
        )


def _at(of_points: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return of_points if len(of_points) == 1 else of_points[numbers]


def summed(engine: Tuned, given: Arrays, points: Points) -> tuple[np.ndarray, np.ndarray]:
    """The sums of weighted Jacobians `(n, *target, *source)` of n windows, and predictions at their first and last
    points `(n, 2, *target)`. All points of all windows go through in calls of the engine's size.
    """
    windows, count = given[0], points.count
    facts = engine.target.facts
    inputs, points = facts.source.of(windows), points.as_dtype(facts.dtype)
    total = np.zeros((len(windows), *facts.block_shape), facts.dtype)
    ends = np.empty((len(windows), 2, *facts.target_shape), facts.dtype)

    def fetch(part: slice) -> Arrays:
        which, numbers = np.divmod(np.arange(part.start, part.stop), count)
        moved = points.of(inputs[which], numbers)
        return facts.source.put(windows[which], moved), *(beside[which] for beside in given[1:])

    for part, (prediction, block) in engine.calls(fetch, len(windows) * count):
        which, numbers = np.divmod(np.arange(part.start, part.stop), count)
        for end, number in enumerate((0, count - 1)):
            ends[which[numbers == number], end] = prediction[numbers == number]
        starts = np.flatnonzero(np.diff(which, prepend=-1))
        total[which[starts]] += np.add.reduceat(points.weighted(block, inputs[which], numbers), starts, axis=0)
    return total, ends


@dataclass(frozen=True)
class OfInput(Jacobian):
    """A product by the input alone, and of all its lags."""

    @classmethod
    def require_input(cls, facts: CallFacts) -> None:
        if facts.source.kind != "input":
            raise Refused(
                "sensitivity.wrt",
                given=f'"{facts.source.name}" for {cls.name}',
                allowed='"input": other sources have no baselines and no neighbours',
                remedy="leave it out, or ask for the jacobian",
            )
        require_all_lags(cls.name, facts)

    def shaped(self, facts: CallFacts) -> CallFacts:
        self.require_input(facts)
        return super().shaped(facts)

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        return (Variable(self.name, (*target, *source), self.long_name),)


def in_parts(engine: Tuned, fetch: Fetch, count: int) -> Iterator[tuple[slice, Arrays]]:
    """`count` windows, as many at a time as are summed together, each `(*input_shape)` as the model has it: their
    points are the windows of the engine's calls.
    """
    facts = engine.target.facts
    size, shape = facts.windows_summed(engine.setting.windows_per_call), facts.input_shape
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        windows, *beside = fetch(part)
        yield part, (windows.reshape(len(windows), *shape), *beside)
