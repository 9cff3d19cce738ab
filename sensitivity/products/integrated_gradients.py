"""(x − x') ⊙ ∫₀¹ ∂f/∂x(x' + α(x − x')) dα: what each input adds to f(x) − f(x').

M. Sundararajan, A. Taly and Q. Yan, "Axiomatic attribution for deep networks", 2017. The integral is taken by
Gauss–Lobatto's rule, whose first and last points are the baseline x' and the window x themselves: they tell whether the
attributions add up to f(x) − f(x') (completeness), and the number of points is doubled until they do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy.special import eval_legendre, roots_jacobi

from ..facts import CallFacts
from ..record import read_array, require_shape
from ..variables import Dims, Variable
from .paths import OfInput, Points, in_parts, summed
from .product import Fetch, Found

if TYPE_CHECKING:
    from ..engine import Tuned
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..record import Record

FEWEST, MOST = 8, 512  # points
COMPLETE = 0.01
_GROSS = 1e-3  # of all attributions' sizes: a difference below this share of them is not told from none


@dataclass(frozen=True)
class IntegratedGradients(OfInput):
    """baseline: `(*source)`, as the model takes it. steps: points on the path; None: as many as completeness to
    `COMPLETE` takes, `MOST` at most.

    `completeness_error` `(output_step, output)`: |Σ attributions − (f(x) − f(x'))|, by |f(x) − f(x')| or, where that is
    less, by a thousandth of Σ |attributions|. `steps`: how many points were taken.
    """

    name: ClassVar[str] = "integrated_gradients"
    long_name: ClassVar[str] = "what an input adds to the output, over what it is with the baseline"
    baseline: np.ndarray = field(compare=False)
    steps: int | None = None

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> IntegratedGradients:
        cls.require_input(facts)
        shape = tuple(size for _, size in facts.source_dims)
        given = "zero" if wanted.baseline is None else wanted.baseline
        return cls(_baseline(given, shape, record), wanted.steps)

    def shaped(self, facts: CallFacts) -> CallFacts:
        return replace(super().shaped(facts), points=self.steps or 4 * FEWEST)

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        error = "how far attributions are from adding up to the output's change, by that change"
        return (
            *super().variables(target, source),
            Variable("completeness_error", target, error),
            Variable("steps", (), "points on the path from the baseline to the window"),
        )

    def constants(self, target: Dims, source: Dims) -> dict[str, tuple[Dims, np.ndarray]]:
        return {"baseline": (source, self.baseline)}

    def computed(self, engine: Tuned, fetch: Fetch, count: int) -> Iterator[Found]:
        for done, given in in_parts(engine, fetch, count):
            windows, target = len(given[0]), engine.target.facts.target_shape
            values = {
                self.name: np.empty((windows, *engine.target.facts.block_shape), given[0].dtype),
                "prediction": np.empty((windows, *target), given[0].dtype),
                "completeness_error": np.empty((windows, *target), given[0].dtype),
                "steps": np.empty(windows, given[0].dtype),
            }
            points, left = self.steps or FEWEST, np.arange(windows)
            while left.size:
                found = self._with(points, engine, tuple(part[left] for part in given))
                for name, part in found.items():
                    values[name][left] = part
                errors = found["completeness_error"].reshape(len(left), -1).max(1)
                left = left[errors > COMPLETE] if self.steps is None and points < MOST else left[:0]
                points *= 2
            yield done, values

    def _with(self, count: int, engine: Tuned, given: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
        """All variables, by so many points."""
        baseline = self.baseline.astype(given[0].dtype).reshape(1, *engine.target.facts.source.shape)
        nodes, weights = lobatto(count)
        shifts = (1 - nodes).reshape(-1, *(1,) * (baseline.ndim - 1)) * baseline
        attributions, predictions = summed(engine, given, Points(nodes, shifts, weights, baseline))
        axes = tuple(range(predictions.ndim - 1, attributions.ndim))
        change = predictions[:, -1] - predictions[:, 0]
        gross = np.abs(attributions).sum(axes)
        scale = np.maximum(np.maximum(np.abs(change), _GROSS * gross), np.finfo(change.dtype).tiny)
        return {
            self.name: attributions,
            "prediction": predictions[:, -1],
            "completeness_error": np.abs(attributions.sum(axes) - change) / scale,
            "steps": np.full(len(given[0]), count, change.dtype),
        }

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        return values


def _baseline(given: str | int, shape: tuple[int, ...], record: Record) -> np.ndarray:
    """`(lag, feature)`, as the model takes it."""
    if isinstance(given, int):
        return record.window(given)
    if given in ("zero", "mean"):
        by_feature = record.mean if given == "mean" else np.zeros(len(record.features))
        return record.scaled(np.broadcast_to(by_feature, shape))
    key = "sensitivity.baseline"
    found = require_shape(read_array(given, key), shape, key, "one window")
    return record.scaled(found[0])


@functools.lru_cache(maxsize=16)
def lobatto(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on [0, 1], both ends among them, and their weights: exact for polynomials of degree 2·count − 3.

    M. Abramowitz and I. Stegun, "Handbook of mathematical functions", 25.4.32.
    """
    inner = roots_jacobi(count - 2, 1.0, 1.0)[0] if count > 2 else np.empty(0)
    nodes = np.concatenate([[-1.0], inner, [1.0]])
    weights = 2 / (count * (count - 1) * eval_legendre(count - 1, nodes) ** 2)
    return (nodes + 1) / 2, weights / 2
