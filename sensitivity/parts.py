"""Parts of a window: where it holds what a model takes as one of several inputs, or what a loss takes beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Part:
    """Of windows `(batch[, step], column)`: columns `[start, stop)`, of the newest `steps` steps, as `(batch, *shape)`.

    steps: None where windows have no steps.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    steps: int | None = None

    def of(self, windows: Any) -> Any:
        """`(batch, *shape)` of NumPy's or TensorFlow's windows."""
        if isinstance(windows, SubstitutedWindows):
            return windows.values if self == windows.part else self.of(windows.windows)
        cut = windows[..., self.start : self.stop]
        cut = cut if self.steps is None else cut[:, windows.shape[1] - self.steps :]
        return _reshaped(cut, self.shape)

    def put(self, windows: Any, values: Any) -> Any:
        """The windows with `(batch, *shape)` in place of the part."""
        width, steps = self.stop - self.start, () if self.steps is None else (self.steps,)
        older = windows[:, :0] if self.steps is None else windows[:, : windows.shape[1] - self.steps]
        newest = windows if self.steps is None else windows[:, windows.shape[1] - self.steps :]
        between = _reshaped(values, (*steps, width))
        block = _joined([newest[..., : self.start], between, newest[..., self.stop :]], -1)
        return block if self.steps is None else _joined([older, block], 1)


@dataclass(frozen=True)
class SubstitutedWindows:
    """TensorFlow's windows in which one part has other values. All other parts are read from the original windows.

    values: `(batch, *shape)`; or such windows themselves, where a part of that part has other values.
    """

    windows: Any
    part: Part
    values: Any

    @property
    def dtype(self) -> Any:
        return self.windows.dtype

    @property
    def graph(self) -> Any:
        return self.windows.graph


def of_parts(windows: Any, parts: Sequence[Part]) -> Any:
    """The last part, each of which is a part of the one before."""
    for part in parts:
        windows = part.of(windows)
    return windows


def put_in_parts(windows: Any, parts: Sequence[Part], values: Any) -> Any:
    """The windows with `values` in place of the last part."""
    if not parts:
        return values
    return parts[0].put(windows, put_in_parts(parts[0].of(windows), parts[1:], values))


def substituted_in_parts(windows: Any, parts: Sequence[Part], values: Any) -> Any:
    """What a model takes for windows in which the last part has these values. Nothing else that it takes of the windows
    depends on the values.
    """
    if not parts:
        return values
    return SubstitutedWindows(windows, parts[0], substituted_in_parts(parts[0].of(windows), parts[1:], values))


def _reshaped(values: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(values, np.ndarray):
        return values.reshape(len(values), *shape)
    import tensorflow as tf

    return tf.reshape(values, (tf.shape(values)[0] if values.shape[0] is None else values.shape[0], *shape))


def _joined(values: list[Any], axis: int) -> Any:
    some = [part for part in values if part.shape[axis] != 0]
    if isinstance(some[0], np.ndarray):
        return np.concatenate(some, axis)
    import tensorflow as tf

    return tf.concat(some, axis)
