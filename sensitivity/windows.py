"""Window geometry: which steps of a series each window is, and which windows gaps touch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Windows:
    """Window geometry: window i is the steps `[i × stride, i × stride + length)`, named by its last step."""

    steps: int
    length: int
    stride: int = 1

    @property
    def count(self) -> int:
        return max(0, (self.steps - self.length) // self.stride + 1)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The steps that windows `[start, stop)` touch."""
        return start * self.stride, (stop - 1) * self.stride + self.length

    def last_steps(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) * self.stride + self.length - 1

    def skipped(self, missing: tuple[tuple[int, int], ...], start: int, stop: int) -> np.ndarray:
        """Which of windows `[start, stop)` touch a missing step: bool `(window)`."""
        first, last = np.clip(self._touched(missing), start, stop) - start
        change = np.zeros(stop - start + 1, np.int64)
        np.add.at(change, first, 1)
        np.add.at(change, last, -1)
        return np.cumsum(change[:-1]) > 0

    def skipped_count(self, missing: tuple[tuple[int, int], ...]) -> int:
        first, last = self._touched(missing)
        reached = np.maximum.accumulate(np.concatenate([[0], last]))[:-1]
        return int(np.maximum(0, last - np.maximum(first, reached)).sum())

    def _touched(self, missing: tuple[tuple[int, int], ...]) -> np.ndarray:
        """For each run of missing steps, the windows `[first, last)` that touch it: int64 `(2, run)`."""
        start, stop = np.array(missing, np.int64).reshape(-1, 2).T
        first = np.maximum(0, -(-(start - self.length + 1) // self.stride))
        return np.stack([first, np.maximum(first, np.minimum(self.count, (stop - 1) // self.stride + 1))])

    def cut(self, values: np.ndarray) -> np.ndarray:
        """A view `(window, lag, feature)` of consecutive steps `(step, feature)`, oldest lag first."""
        view = np.lib.stride_tricks.sliding_window_view(values, self.length, axis=0)
        return view[:: self.stride].swapaxes(1, 2)
