"""One pass over a series, in blocks: its steps proved regular, its gaps found, its moments and fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .errors import Refused
from .job import Scaling, SeriesSection
from .readers import Block, open_reader
from .times import Clock, TimeAxis


@dataclass(frozen=True)
class Survey:
    """What one pass over the series proves and finds.

    missing: the runs `[start, stop)` of steps that lack a finite value in some feature, in order.
    mean, std, largest (by absolute value): per feature, over its finite values, in the series' own units.
    fingerprint: of times and values, whatever the format they came in.
    """

    features: tuple[str, ...]
    steps: int
    axis: TimeAxis
    missing: tuple[tuple[int, int], ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    largest: tuple[float, ...]
    fingerprint: str

    def require_fits(self, dtype: str, scaling: Scaling | None) -> None:
        """Refuse values that would overflow in the run's dtype."""
        limit = float(np.finfo(dtype).max)
        for i, name in enumerate(self.features):
            mean, std = (scaling.mean[i], scaling.std[i]) if scaling else (0.0, 1.0)
            if (self.largest[i] + abs(mean)) / std > limit:
                raise Refused(
                    f"series column {name!r}",
                    given=f"values up to {self.largest[i]:.3g}",
                    allowed=f"at most {limit:.3g}, what {dtype} holds",
                    remedy="mark such values as missing, or set run.dtype",
                )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Survey:
        return cls(
            features=tuple(content["features"]),
            steps=content["steps"],
            axis=TimeAxis(**content["axis"]),
            missing=tuple((start, stop) for start, stop in content["missing"]),
            mean=tuple(content["mean"]),
            std=tuple(content["std"]),
            largest=tuple(content["largest"]),
            fingerprint=content["fingerprint"],
        )


def survey(section: SeriesSection) -> Survey:
    """Read the series once, in blocks. Raises `Refused` for anything a run could not rely on."""
    reader = open_reader(section.path, section.time, section.features)
    if section.scaling:
        section.scaling.require(len(reader.features))
    content, sums = Content(section), _Sums(len(reader.features))
    for block in reader.blocks():
        content.add(block)
        sums.add(block.values)
    if not sums.steps:
        raise Refused("series.path", given=f"{section.path} (no steps)", allowed="one step or more", remedy="fill it")
    mean, std, largest = sums.mean_std_largest()
    axis, missing = content.clock.axis, tuple(sums.missing)
    return Survey(reader.features, sums.steps, axis, missing, mean, std, largest, content.fingerprint)


class Content:
    """What a series holds, block by block: its times, proved regular, and its values."""

    def __init__(self, section: SeriesSection) -> None:
        self.clock = Clock(section)
        self._times, self._values = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def add(self, block: Block) -> None:
        times = self.clock.read(block)
        self._times.update(times.tobytes() if times is not None else b"")
        alike = np.where(np.isnan(block.values), np.nan, block.values) + 0.0  # one NaN, one zero
        self._values.update(alike.tobytes())

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self._times.digest() + self._values.digest(), digest_size=16).hexdigest()


class _Sums:
    """Running moments and gaps over blocks of values."""

    def __init__(self, features: int) -> None:
        self.steps = 0
        self.missing: list[tuple[int, int]] = []
        self._count, self._mean, self._squares, self._largest = np.zeros((4, features))

    def add(self, values: np.ndarray) -> None:
        finite = np.isfinite(values)
        self._add_gaps(~finite.all(axis=1))
        with np.errstate(over="ignore", invalid="ignore"):  # what no dtype of ours holds
            self._add_moments(np.where(finite, values, 0.0), finite)
        self.steps += len(values)

    def _add_gaps(self, gap: np.ndarray) -> None:
        edges = np.flatnonzero(np.diff(gap.astype(np.int8), prepend=0, append=0)) + self.steps
        runs = [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
        if runs and self.missing and self.missing[-1][1] == runs[0][0]:
            runs[0] = (self.missing.pop()[0], runs[0][1])
        self.missing += runs

    def _add_moments(self, values: np.ndarray, finite: np.ndarray) -> None:
        """Chan, Golub & LeVeque's pairwise update (1983): no cancellation, whatever the offset."""
        count = finite.sum(axis=0)
        total = self._count + count
        mean = values.sum(axis=0) / np.maximum(count, 1)
        shift = mean - self._mean
        squares = (np.where(finite, values - mean, 0.0) ** 2).sum(axis=0)
        self._squares += squares + shift**2 * self._count * count / np.maximum(total, 1)
        self._mean += shift * count / np.maximum(total, 1)
        self._count = total
        self._largest = np.maximum(self._largest, np.abs(values).max(axis=0, initial=0.0))

    def mean_std_largest(self) -> tuple[tuple[float, ...], ...]:
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        return tuple(tuple(map(float, column)) for column in (self._mean, std, self._largest))
