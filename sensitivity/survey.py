"""One pass over a series, in blocks: its steps proved regular, its gaps found, its moments and fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .errors import Refused
from .moments import Extremes, Moments
from .readers import Block, open_reader
from .sections import SeriesSection
from .times import Clock, TimeAxis
from .windows import Windows


@dataclass(frozen=True)
class Site:
    """One of a panel's records: its name, its number of steps, and the time of the first."""

    name: str
    steps: int
    first: float | int


@dataclass(frozen=True)
class Survey:
    """What one pass over the series proves and finds.

    Steps are numbered through all sites, one after another. axis: the times of a series without sites, and the rule
    that every site's follow from its own first time on. missing: the runs `[start, stop)` of steps that lack a finite
    value in some feature, in order. mean, std, largest (by absolute value), extremes: per feature, over its finite
    values, in the series' own units. fingerprint: of sites, times and values, whatever the format they came in.
    grouped: the source has its sites one after another. beside: columns that are read for a loss, behind the features;
    `largest` is of these, too, and whether numbers are `whole`, and some `negative`. label_missing: runs of steps that
    lack a label or a weight.
    """

    features: tuple[str, ...]
    steps: int
    axis: TimeAxis
    missing: tuple[tuple[int, int], ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    largest: tuple[float, ...]
    fingerprint: str
    sites: tuple[Site, ...] = ()
    grouped: bool = True
    beside: tuple[str, ...] = ()
    label_missing: tuple[tuple[int, int], ...] = ()
    whole: tuple[bool, ...] = ()
    negative: tuple[bool, ...] = ()
    extremes: tuple[Extremes, ...] = ()

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The step at which each site begins."""
        return (0, *np.cumsum([site.steps for site in self.sites[:-1]]).tolist())

    @cached_property
    def gaps(self) -> np.ndarray:
        """`missing` as an array: int64 `(run, 2)`."""
        return np.array(self.missing, np.int64).reshape(-1, 2)

    @cached_property
    def label_gaps(self) -> np.ndarray:
        """`label_missing` as an array: int64 `(run, 2)`."""
        return np.array(self.label_missing, np.int64).reshape(-1, 2)

    @property
    def columns(self) -> tuple[str, ...]:
        """All that are read."""
        return *self.features, *self.beside

    @cached_property
    def _begin(self) -> np.ndarray:
        return np.array(self.starts, np.int64)

    def windows(self, length: int, stride: int) -> Windows:
        return Windows(self.steps, length, stride, self.starts)

    def site_of(self, steps: np.ndarray) -> np.ndarray:
        """The names of the sites that `steps` `(n)` are of, `(n)`."""
        return np.array([site.name for site in self.sites], object)[self._place(steps)]

    def times(self, steps: np.ndarray) -> np.ndarray:
        """Labels of `steps` `(n)`, in ascending order: int64, float64 or datetime64[us] `(n)`."""
        if not self.sites:
            return self.axis.at(steps)
        found, first = np.unique(self._place(steps), return_index=True)
        axes = [replace(self.axis, first=self.sites[site].first) for site in found]
        parts = zip(axes, found, np.split(steps, first[1:]), strict=True)
        return np.concatenate([axis.at(part - self.starts[site]) for axis, site, part in parts])

    def _place(self, steps: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._begin, steps, side="right") - 1

    def require_fits(self, dtype: str, section: SeriesSection) -> None:
        """Refuse columns that would overflow in the run's dtype, scaled as the model and its loss take them."""
        limit, largest = float(np.finfo(dtype).max), dict(zip(self.columns, self.largest, strict=True))
        for name, mean, std in section.scaled(self.features):
            if (largest[name] + abs(mean)) / std > limit:
                raise Refused(
                    f"series column {name!r}",
                    given=f"values up to {largest[name]:.3g}" + ("" if std == 1 else f", divided by {std:.3g}"),
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
            missing=_runs(content["missing"]),
            mean=tuple(content["mean"]),
            std=tuple(content["std"]),
            largest=tuple(content["largest"]),
            fingerprint=content["fingerprint"],
            sites=tuple(Site(**site) for site in content.get("sites", ())),
            grouped=content.get("grouped", True),
            beside=tuple(content.get("beside", ())),
            label_missing=_runs(content.get("label_missing", ())),
            whole=tuple(content.get("whole", ())),
            negative=tuple(content.get("negative", ())),
            extremes=tuple(Extremes(**one) for one in content.get("extremes", ())),
        )


def _runs(content: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) for start, stop in content)


def survey(section: SeriesSection) -> Survey:
    """Read the series once, in blocks. Raises `Refused` for anything a run could not rely on."""
    reader = open_reader(section)
    if section.scaling:
        section.scaling.require(len(reader.features) - len(section.beside))
    features = reader.features[: len(reader.features) - len(section.beside)]
    content, moments = Content(section, reader.features), Moments(len(reader.features))
    for block in reader.blocks():
        content.add(block)
        moments.add(block.values)
    if not content.steps:
        raise Refused("series.path", given=f"{section.path} (no steps)", allowed="one step or more", remedy="fill it")
    _require_values(section, reader.features, moments.count, content.steps)
    mean, std, largest = moments.mean_std_largest()
    return Survey(
        features=features,
        steps=content.steps,
        axis=content.axis,
        missing=content.missing,
        mean=mean[: len(features)],
        std=std[: len(features)],
        largest=largest,
        fingerprint=content.fingerprint,
        sites=content.sites,
        grouped=content.grouped,
        beside=section.beside,
        label_missing=content.label_missing,
        whole=moments.whole,
        negative=moments.negative,
        extremes=moments.extremes[: len(features)],
    )


def _require_values(section: SeriesSection, columns: Sequence[str], count: np.ndarray, steps: int) -> None:
    """Refuse columns without a single finite value: with them no window would be whole."""
    empty = [name for name, values in zip(columns, count.tolist(), strict=True) if not values]
    if empty:
        raise Refused(
            "series.labels" if {*empty} <= {*section.beside} else "series.features",
            given=f"{', '.join(map(repr, empty))}, of which all {steps:,} values are missing",
            allowed="columns with one value or more; a window with a missing value is skipped",
            remedy="fill the column, or leave it out of the series and of the model",
        )


@dataclass
class _Record:
    """What the blocks of one site hold: so many features, and labels in those columns."""

    clock: Clock
    features: int
    labels: tuple[int, ...]
    steps: int = 0
    missing: list[tuple[int, int]] = field(default_factory=list)
    label_missing: list[tuple[int, int]] = field(default_factory=list)
    times: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    values: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, block: Block) -> None:
        times = self.clock.read(block)
        self.times.update(times.tobytes() if times is not None else b"")
        alike = np.where(np.isnan(block.values), np.nan, block.values) + 0.0  # one NaN, one zero
        self.values.update(alike.tobytes())
        finite = np.isfinite(block.values)
        self._add_gaps(self.missing, ~finite[:, : self.features].all(axis=1))
        self._add_gaps(self.label_missing, ~finite[:, list(self.labels)].all(axis=1))
        self.steps += len(block.values)

    def _add_gaps(self, runs: list[tuple[int, int]], gap: np.ndarray) -> None:
        edges = np.flatnonzero(np.diff(gap.astype(np.int8), prepend=0, append=0)) + self.steps
        found = [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
        if found and runs and runs[-1][1] == found[0][0]:
            found[0] = (runs.pop()[0], found[0][1])
        runs += found


class Content:
    """What a series holds, block by block: its sites, their times, proved regular, and their values."""

    def __init__(self, section: SeriesSection, columns: Sequence[str]) -> None:
        self._section, self._features = section, len(columns) - len(section.beside)
        of_loss = (*(section.labels or ()), *([section.weights] if section.weights else ()))
        self._labels = tuple(columns.index(name) for name in of_loss)
        self._records: dict[str | None, _Record] = {}
        self._last: str | None = None
        self.grouped = True

    def add(self, block: Block) -> None:
        record = self._records.get(block.site)
        if record is None:
            record = self._records[block.site] = _Record(Clock(self._section, block.site), self._features, self._labels)
        elif block.site != self._last:
            self.grouped = False
        self.grouped &= not block.mixed
        self._last = block.site
        record.add(block)

    @property
    def steps(self) -> int:
        return sum(record.steps for record in self._records.values())

    @property
    def axis(self) -> TimeAxis:
        """The rule of all sites' times, with the first one's first time. Raises `Refused` where they follow several."""
        axes = {site: record.clock.axis for site, record in self._records.items()}
        longest = max(self._records, key=lambda site: self._records[site].steps)
        for site, record in self._records.items():
            if not _follows(axes[site], axes[longest], record.steps):
                raise Refused(
                    "series.time",
                    given=f"site {site!r} with times {_told(axes[site])},\nsite {longest!r} {_told(axes[longest])}",
                    allowed="one step for all sites: a lag is so many steps",
                    remedy="bring them to one step, or run those of each step as a job of their own",
                )
        return replace(axes[longest], first=next(iter(axes.values())).first)

    @property
    def sites(self) -> tuple[Site, ...]:
        named = {name: record for name, record in self._records.items() if name is not None}
        return tuple(Site(name, record.steps, record.clock.axis.first) for name, record in named.items())

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        return self._through_sites([record.missing for record in self._records.values()])

    @property
    def label_missing(self) -> tuple[tuple[int, int], ...]:
        return self._through_sites([record.label_missing for record in self._records.values()])

    def _through_sites(self, runs: list[list[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        begin = 0
        for record, own in zip(self._records.values(), runs, strict=True):
            found += [(begin + start, begin + stop) for start, stop in own]
            begin += record.steps
        return tuple(found)

    @property
    def fingerprint(self) -> str:
        digests = [
            (b"" if site is None else site.encode() + b"\0") + record.times.digest() + record.values.digest()
            for site, record in self._records.items()
        ]
        return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _follows(axis: TimeAxis, rule: TimeAxis, steps: int) -> bool:
    """Whether so many times of one axis are those of the rule from the same first time on."""
    if (axis.kind, axis.step, axis.calendar) == (rule.kind, rule.step, rule.calendar):
        return True
    same_first = replace(rule, first=axis.first)
    tolerance = 1e-6 * abs(rule.step) if rule.kind == "number" else 0

    def agree(which: np.ndarray) -> bool:
        there, expected = (np.asarray(one.at(which), float) for one in (axis, same_first))
        return bool((np.abs(there - expected) <= tolerance).all())

    return axis.kind == rule.kind and agree(np.array([steps - 1])) and agree(np.arange(steps))


def _told(axis: TimeAxis) -> str:
    if axis.calendar is not None:
        return f"every {axis.calendar} (pandas' word)"
    step = np.timedelta64(int(axis.step), "us").astype(object) if axis.kind == "datetime" else axis.step
    return f"{step} apart" if axis.kind != "index" else "numbered"
