"""Kernels that `jacobian` keeps with their model, which of them serve, and whether they are right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .engine import Tuned
from .facts import CallFacts
from .probes import TOLERANCE, Probe
from .room import Room
from .setting import Choice
from .tuning import CHECKED

_ATTRIBUTE = "_sensitivity_kernels"
WORTH_TIMING = 30.0  # seconds of work, where kernels were timed for a tenth of it: they are timed again
MOST_FILLED = 2  # a kernel takes at least half as many windows as a call of it has room for
MUCH_LARGER = 2  # times the numbers of windows are worth another look at a kernel's own
LARGER = 5  # times the bytes of a call are those of one of four times the windows


@dataclass(frozen=True)
class Found:
    """A choice and its kernel, found for so many windows, all points of each counted, with `most` windows at once and
    `call` bytes for a call.
    """

    choice: Choice
    engine: Tuned
    windows: int
    most: int
    call: int

    def serves(self, windows: int, most: int, room: Room) -> bool:
        """It fits, is not much too large for so few windows, and was not chosen for want of memory, windows or time
        that are there by now.
        """
        size = self.engine.setting.windows_per_call
        if self.engine.call_bytes > room.call or size > MOST_FILLED * windows:
            return False
        if self.choice.by == "given":
            return most <= self.most
        changed = self.engine.setting.bare != self.choice.setting.bare
        short = changed or LARGER * self.choice.call_bytes > self.call
        seconds = windows / (self.choice.windows_per_second or math.inf)
        return (
            most <= self.most
            and not (short and room.call >= 2 * self.call)
            and not (seconds > WORTH_TIMING and windows >= 10 * self.windows)
        )


@dataclass
class Kept:
    """Facts and kernels by shape, living and dying with their model. proved: with which weights and numbers.
    models: what the model is wrapped in, or cut from it, by how.
    """

    facts: dict[Any, CallFacts] = field(default_factory=dict)
    kernels: dict[Any, dict[int, Found]] = field(default_factory=dict)
    proved: dict[Any, State] = field(default_factory=dict)
    models: dict[Any, keras.Model] = field(default_factory=dict)

    def is_right(self, key: Any, engine: Tuned, source: np.ndarray, state: State) -> bool:
        """Whether a kernel's numbers are the model's still, which a few windows show where weights have changed, or
        where numbers are much larger than before. A layer may work in another way then.
        """
        before = self.proved[key]
        if state.weights == before.weights and state.largest <= MUCH_LARGER * before.largest:
            return True
        by_size = np.argsort(_sizes(source))
        few = np.ascontiguousarray(source[by_size[-CHECKED:]])
        return Probe.of(engine.target, few).error(engine(few)[1]) <= TOLERANCE

    def forget(self) -> None:
        self.facts.clear()
        self.kernels.clear()
        self.proved.clear()
        self.models.clear()

    def model(self, key: Any, make: Callable[[], keras.Model]) -> keras.Model:
        """What was made of the model before, or is made now."""
        if key not in self.models:
            self.models[key] = make()
        return self.models[key]


@dataclass(frozen=True)
class State:
    """weights: what tells whether they are the same. largest: number of all windows so far."""

    weights: tuple[float, ...]
    largest: float

    @classmethod
    def of(cls, model: keras.Model, source: np.ndarray) -> State:
        weights = (_numbers(weight).astype("float32", copy=False).ravel() for weight in model.weights)
        sums = tuple(float(part) for weight in weights for part in (weight.sum(), np.dot(weight, weight)))
        return cls(sums, float(_sizes(source).max(initial=0.0)))

    def after(self, before: State | None) -> State:
        """With the numbers that the same weights were proved with before."""
        if before is None or before.weights != self.weights:
            return self
        return replace(self, largest=max(self.largest, before.largest))


def _numbers(weight: keras.Variable) -> np.ndarray:
    """A weight's, as `np.asarray` gives them in six times the time."""
    if not isinstance(getattr(weight.value, "handle", None), tf.Tensor):
        return np.asarray(weight)
    return tf.raw_ops.ReadVariableOp(resource=weight.value.handle, dtype=weight.value.dtype).numpy()


def _sizes(source: np.ndarray) -> np.ndarray:
    """The largest number of each window, NaN apart: (batch)"""
    flat = source.reshape(len(source), math.prod(source.shape[1:]))
    return np.maximum(np.fmax.reduce(flat, 1, initial=0.0), -np.fmin.reduce(flat, 1, initial=0.0))


def kept_with(model: keras.Model) -> Kept:
    store = getattr(model, _ATTRIBUTE, None)
    if store is None:
        store = Kept()
        object.__setattr__(model, _ATTRIBUTE, store)  # past Keras' tracking: this is no part of the model
    return store
