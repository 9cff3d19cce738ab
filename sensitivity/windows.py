"""Window geometry: which steps of a series each window is, and which windows gaps touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Runs = np.ndarray | tuple[tuple[int, int], ...]  # runs `[start, stop)` of missing steps, in order


@dataclass(frozen=True)
class Missing:
    """Steps that lack a feature, and others that lack a label, which windows have at `spans` of steps after their last
    one, `(first, last)` each.
    """

    steps: Runs
    labels: Runs
    spans: tuple[tuple[int, int], ...]


Gaps = Runs | Missing


def spans_of(offsets: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rising numbers as spans of consecutive ones, `(first, last)` each."""
    firsts = [i for i in range(len(offsets)) if i == 0 or offsets[i] != offsets[i - 1] + 1]
    ends = [*firsts[1:], len(offsets)]
    return tuple((offsets[first], offsets[end - 1]) for first, end in zip(firsts, ends, strict=True))


@dataclass(frozen=True)
class Windows:
    """Every `stride`-th run of `length` consecutive steps of one site, named by its last step; sites one after another.

    Steps are numbered through all sites, and so are windows. starts: the step at which each site begins.
    """

    steps: int
    length: int
    stride: int = 1
    starts: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        return int(self._first[-1])

    @cached_property
    def per_site(self) -> np.ndarray:
        """Windows of each site: int64 `(site)`."""
        steps = np.diff([*self.starts, self.steps])
        return np.maximum(0, (steps - self.length) // self.stride + 1)

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.array(self.starts, np.int64)

    @cached_property
    def _first(self) -> np.ndarray:
        """The window that each site begins with, and their number: int64 `(site + 1)`."""
        return np.concatenate([[0], np.cumsum(self.per_site)])

    def _begin(self, windows: np.ndarray) -> np.ndarray:
        """The first step of each window."""
        site = np.searchsorted(self._first, windows, side="right") - 1
        return self._starts[site] + (windows - self._first[site]) * self.stride

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The steps from the first to the last that windows `[start, stop)` touch."""
        first, last = self._begin(np.array([start, stop - 1])).tolist()
        return first, last + self.length

    def last_steps(self, start: int, stop: int) -> np.ndarray:
        return self.last_steps_of(np.arange(start, stop))

    def last_steps_of(self, windows: np.ndarray) -> np.ndarray:
        return self._begin(windows) + self.length - 1

    def has_step(self, start: int, stop: int, ahead: int) -> np.ndarray:
        """Which of windows `[start, stop)` have so many steps of their own site after the last: bool `(window)`."""
        ends = np.array([*self.starts[1:], self.steps], np.int64)
        last = self.last_steps(start, stop)
        return last + ahead < ends[np.searchsorted(self._starts, last, side="right") - 1]

    def heads(self) -> np.ndarray:
        """The last steps of each site's first two windows: what all their times can be told from."""
        first = self._first[:-1][self.per_site > 0]
        second = np.minimum(first + 1, self._first[1:][self.per_site > 0] - 1)
        return self._begin(np.unique([first, second])) + self.length - 1

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Windows `[start, stop)` site by site: `(start, stop)`."""
        first, last = np.searchsorted(self._first, [start, stop - 1], side="right").tolist()
        borders = [start, *self._first[first:last].tolist(), stop]
        yield from ((i, j) for i, j in zip(borders, borders[1:], strict=False) if i < j)

    def near(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Windows `[start, stop)` as they are best read, `(start, stop)`: apart where many steps stand between two
        sites, of others that are too short for a window.
        """
        first, last = start, start
        for piece in self.pieces(start, stop):
            if last > first and self.span(*piece)[0] - self.span(first, last)[1] > self.length + self.stride:
                yield first, last
                first = piece[0]
            last = piece[1]
        yield first, last

    def skipped(self, missing: Gaps, start: int, stop: int) -> np.ndarray:
        """Which of windows `[start, stop)` touch a missing step: bool `(window)`."""
        first, last = np.clip(self._touched(missing), start, stop) - start
        change = np.zeros(stop - start + 1, np.int64)
        np.add.at(change, first, 1)
        np.add.at(change, last, -1)
        return np.cumsum(change[:-1]) > 0

    def skipped_count(self, missing: Gaps) -> int:
        first, last = self._touched(missing)
        reached = np.maximum.accumulate(np.concatenate([[0], last]))[:-1]
        return int(np.maximum(0, last - np.maximum(first, reached)).sum())

    def whole(self, missing: Gaps, most: int) -> np.ndarray:
        """Numbers of windows that touch no missing step, at most so many of them, evenly chosen: int64 `(window)`."""
        first, last = self._touched(missing)
        begin = np.maximum(first, np.maximum.accumulate(np.concatenate([[0], last]))[:-1])
        lost = np.concatenate([[0], np.cumsum(np.maximum(0, last - begin))])
        count = self.count - int(lost[-1])
        ranks = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(np.int64))
        return ranks + lost[np.searchsorted(begin - lost[:-1], ranks, side="right")]

    def _touched(self, missing: Gaps) -> np.ndarray:
        """The windows `[first, last)` that touch each run of missing steps, by their first: int64 `(2, run)`."""
        if not isinstance(missing, Missing):
            return self._touching(missing, 0, self.length - 1)
        found = [self._touching(missing.steps, 0, self.length - 1)]
        for first, last in missing.spans:
            span = self.length - 1 + first, self.length - 1 + last
            found += [self._touching(missing.labels, *span), self._beyond(span[1])]
        every = np.concatenate(found, axis=1)
        return every[:, np.argsort(every[0], kind="stable")]

    def _touching(self, runs: Runs, first: int, last: int) -> np.ndarray:
        """Windows that touch each run by steps `first` to `last` after their beginning: they may be after their end."""
        start, stop = np.asarray(runs, np.int64).reshape(-1, 2).T
        begin = self._begun_before(start - last)
        return np.stack([begin, np.maximum(begin, self._begun_before(stop - first))])

    def _beyond(self, last: int) -> np.ndarray:
        """Windows of each site of which that step after their beginning is after the site's end."""
        ends = np.array([*self.starts[1:], self.steps], np.int64)
        begin = np.clip(self._begun_before(ends - last), self._first[:-1], self._first[1:])
        return np.stack([begin, self._first[1:]])

    def _begun_before(self, steps: np.ndarray) -> np.ndarray:
        """How many windows begin before each of these steps."""
        site = np.maximum(0, np.searchsorted(self._starts, steps, side="right") - 1)
        own = -(-(steps - self._starts[site]) // self.stride)
        return self._first[site] + np.clip(own, 0, self.per_site[site])

    def cut(self, values: np.ndarray) -> np.ndarray:
        """A view `(window, lag, feature)` of consecutive steps `(step, feature)` of one site, oldest lag first."""
        view = np.lib.stride_tricks.sliding_window_view(values, self.length, axis=0)
        return view[:: self.stride].swapaxes(1, 2)

    def cut_span(self, values: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Windows `[start, stop)` out of the steps of their `span`: a view where they are of one site, else a copy."""
        offset = self.span(start, stop)[0]
        spans = [np.array(self.span(*piece)) - offset for piece in self.pieces(start, stop)]
        return joined([self.cut(values[first:last]) for first, last in spans])


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """The parts behind each other: a copy where there are several."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
