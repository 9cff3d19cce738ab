"""The mean Jacobian of a window with noise: what of a derivative holds in the neighbourhood.

D. Smilkov et al., "SmoothGrad: removing noise by adding noise", 2017. The noise is normal, the same for all windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..facts import CallFacts
from ..variables import Dims
from .paths import OfInput, Points, in_parts, summed
from .product import Fetch, Found

if TYPE_CHECKING:
    from ..engine import Tuned
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..record import Record

SAMPLES, NOISE = 32, 0.1  # the second: of a feature's standard deviation


@dataclass(frozen=True)
class SmoothGradients(OfInput):
    """noise: `(sample, *source)`, as the model takes it."""

    name: ClassVar[str] = "smooth_gradients"
    long_name: ClassVar[str] = (
        "mean derivative of the output with respect to the input with noise, per unit of the series' features"
    )
    noise: np.ndarray = field(compare=False)

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> SmoothGradients:
        cls.require_input(facts)
        shape = tuple(size for _, size in facts.source_dims)
        spread = (NOISE if wanted.noise is None else wanted.noise) * record.std / record.scale
        return cls(noise_of(wanted.samples or SAMPLES, spread, wanted.seed or 0, shape))

    def shaped(self, facts: CallFacts) -> CallFacts:
        return replace(super().shaped(facts), points=len(self.noise) + 1)

    def constants(self, target: Dims, source: Dims) -> dict[str, tuple[Dims, np.ndarray]]:
        return {"noise": ((("sample", len(self.noise)), *source), self.noise)}

    def computed(self, engine: Tuned, fetch: Fetch, count: int) -> Iterator[Found]:
        samples = len(self.noise)
        noise = self.noise.reshape(samples, *engine.target.facts.source.shape)
        points = Points(np.ones(samples), noise, np.full(samples, 1 / samples)).and_window()
        for done, given in in_parts(engine, fetch, count):
            found, predictions = summed(engine, given, points)
            yield done, {self.name: found, "prediction": predictions[:, -1]}


def noise_of(samples: int, std: np.ndarray, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Normal noise `(samples, *shape)` of that standard deviation by feature; its mean over the samples is zero."""
    noise = np.random.default_rng(seed).standard_normal((samples, *shape))
    half = samples // 2
    noise[half : 2 * half] = -noise[:half]
    return noise * std
