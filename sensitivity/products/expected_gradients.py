"""The mean of (x − x') ⊙ ∂f/∂x(x' + α(x − x')) over baselines x' and shares α: integrated gradients without the choice
of one baseline. Attributions add up, on average, to f(x) − E f(x').

G. Erion et al., "Improving performance of deep learning models with axiomatic attribution priors and expected
gradients", 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..errors import Refused
from ..facts import CallFacts
from ..variables import Dims
from .paths import OfInput, Points, in_parts, summed
from .product import Fetch, Found

if TYPE_CHECKING:
    from ..engine import Tuned
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..record import Record

SAMPLES = 64


@dataclass(frozen=True)
class ExpectedGradients(OfInput):
    """baselines: `(sample, *source)`, as the model takes them. Each is taken with a share of its own, of shares
    that are spread evenly over [0, 1].
    """

    name: ClassVar[str] = "expected_gradients"
    long_name: ClassVar[str] = "what an input adds to the output, on average over baselines"
    baselines: np.ndarray = field(compare=False)
    seed: int = 0

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> ExpectedGradients:
        cls.require_input(facts)
        return cls(apart(record.windows(wanted.samples or SAMPLES), "sensitivity.product"), wanted.seed or 0)

    def shaped(self, facts: CallFacts) -> CallFacts:
        return replace(super().shaped(facts), points=len(self.baselines) + 1)

    def constants(self, target: Dims, source: Dims) -> dict[str, tuple[Dims, np.ndarray]]:
        return {"baselines": ((("sample", len(self.baselines)), *source), self.baselines)}

    def computed(self, engine: Tuned, fetch: Fetch, count: int) -> Iterator[Found]:
        samples = len(self.baselines)
        if not samples:  # of no windows, which are the baselines of each other
            return
        shares = (np.random.default_rng(self.seed).permutation(samples) + 0.5) / samples
        baselines = self.baselines.reshape(samples, *engine.target.facts.source.shape)
        toward = (1 - shares).reshape(-1, *(1,) * (baselines.ndim - 1)) * baselines
        points = Points(shares, toward, np.full(samples, 1 / samples), baselines).and_window()
        for done, given in in_parts(engine, fetch, count):
            found, predictions = summed(engine, given, points)
            yield done, {self.name: found, "prediction": predictions[:, -1]}

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        return values


def apart(windows: np.ndarray, key: str) -> np.ndarray:
    """Windows `(sample, …)` that are taken as baselines of each other. Raises `Refused` where all are the same: of a
    window that is its own baseline all attributions are 0.
    """
    if len(windows) and (windows == windows[:1]).all():
        raise Refused(
            key,
            given=f"expected_gradients without baselines, and {len(windows)} windows that are all the same",
            allowed="windows that differ, which are the baselines of each other, or baselines",
            remedy="take more of the series",
            in_python="give baselines=, such as windows of the training data",
        )
    return windows
