"""Kernels that `jacobian` keeps with their model, which of them serve, and whether they are right."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import keras
import numpy as np

from .engine import Tuned
from .facts import CallFacts
from .job import SensitivitySection
from .layers import leaf_layers
from .model import Target, shaped_call
from .probes import TOLERANCE, Probe
from .products.product import Product
from .setting import Choice
from .tuning import CHECKED

Thing = TypeVar("Thing")
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

    def serves(self, windows: int, most: int, call: int) -> bool:
        """It fits `call` bytes, is not much too large for so few windows, and was not chosen for want of memory,
        windows or time that are there by now.
        """
        size = self.engine.setting.windows_per_call
        if self.engine.call_bytes > call or size > MOST_FILLED * windows:
            return False
        if self.choice.by == "given":
            return most <= self.most
        changed = self.engine.setting.bare != self.choice.setting.bare
        short = changed or LARGER * self.choice.call_bytes > self.call
        seconds = windows / (self.choice.windows_per_second or math.inf)
        return (
            most <= self.most
            and not (short and call >= 2 * self.call)
            and not (seconds > WORTH_TIMING and windows >= 10 * self.windows)
        )


@dataclass
class Served:
    """A target, and its kernels by the most windows that they take at once. proved: what each was proved right with."""

    target: Target
    kernels: dict[int, Found] = field(default_factory=dict)
    proved: MutableMapping[Tuned, State] = field(default_factory=WeakKeyDictionary)

    def serving(self, windows: int, most: int, call: int) -> Found | None:
        """A kernel that serves so many windows, with `call` bytes for a call, if there is one."""
        return next((found for found in self.kernels.values() if found.serves(windows, most, call)), None)

    def keep(self, found: Found, source: np.ndarray) -> None:
        """A kernel that trials have just proved right with these windows."""
        self.kernels[found.most] = found
        self.proved[found.engine] = State.of(found.engine, source)

    def is_right(self, engine: Tuned, source: np.ndarray) -> bool:
        """Whether the numbers that a kernel has just given are the model's still, which a few windows show where
        weights have changed, or where numbers are much larger than before. A layer may work in another way then.
        """
        before, state = self.proved[engine], State.of(engine, source)
        if state.weights == before.weights and state.largest <= before.largest:
            return True
        if state.weights != before.weights or state.largest > MUCH_LARGER * before.largest:
            few = np.ascontiguousarray(source[np.argsort(_sizes(source))[-CHECKED:]])
            if not Probe.of(engine.target, few).error(engine(few)[1]) <= TOLERANCE:
                return False
        self.proved[engine] = state
        return True


@dataclass
class Asked:
    """What is asked of a model, and how each product of it is served. plain: before any product. whole: the model as
    far as asked, in what it is wrapped in. unreached: of outputs that do not depend on the source, in words. store:
    what else is kept with the model.
    """

    store: Kept
    wanted: SensitivitySection
    plain: CallFacts
    whole: keras.Model
    unreached: tuple[str, ...] = ()
    products: dict[tuple[Any, ...], Served] = field(default_factory=dict)

    def served(self, product: Product) -> Served:
        """The target of a product, with the kernels that were found for it. Raises `Refused` where it has none."""
        form = product.form
        if form not in self.products:
            facts = shaped_call(self.plain, product)
            self.products[form] = Served(Target(self.whole, facts, self.wanted.of, product, weighs=True))
        return self.products[form]


@dataclass
class Kept:
    """What lives and dies with a model: facts, and what was asked, by shape and by what asked for it.

    dtype: that it computes in. made_of: what it was made of. models: what it is wrapped in, or cut from it, by how.
    taken: what was asked of plain arrays, by their shape and by the arguments as they were given.
    """

    dtype: str = "float32"
    made_of: tuple[Any, ...] = ()
    facts: dict[Any, CallFacts] = field(default_factory=dict)
    models: dict[Any, keras.Model] = field(default_factory=dict)
    asked: dict[Any, Asked] = field(default_factory=dict)
    taken: dict[Any, Asked] = field(default_factory=dict)

    def forget(self) -> None:
        self.taken.clear()
        self.facts.clear()
        self.models.clear()
        self.asked.clear()


@dataclass(frozen=True)
class State:
    """What a kernel was called with. weights: what tells whether they are the same. largest: number of all windows so
    far.
    """

    weights: bytes
    largest: float

    @classmethod
    def of(cls, engine: Tuned, source: np.ndarray) -> State:
        """Of a kernel's last call, and of all numbers of these windows, NaN apart."""
        flat = source.ravel()
        return cls(engine.sums, max(0.0, float(np.fmax.reduce(flat)), -float(np.fmin.reduce(flat))))


def _sizes(source: np.ndarray) -> np.ndarray:
    """The largest number of each window, NaN apart: (batch)"""
    flat = source.reshape(len(source), math.prod(source.shape[1:]))
    return np.maximum(np.fmax.reduce(flat, 1, initial=0.0), -np.fmin.reduce(flat, 1, initial=0.0))


def kept_or_made(kept: dict[Any, Thing], key: Any, make: Callable[[], Thing]) -> Thing:
    """What was made before, or is made now."""
    if key not in kept:
        kept[key] = make()
    return kept[key]


def kept_with(model: keras.Model) -> Kept:
    """What is kept with a model as long as it is made of the same layers and weights."""
    store, now = getattr(model, _ATTRIBUTE, None), _made_of(model)
    if store is None or len(now) != len(store.made_of) or any(map(operator.is_not, now, store.made_of)):
        dtypes = {str(layer.dtype_policy.variable_dtype) for layer in leaf_layers(model) or [model]}
        store = Kept("float64" if "float64" in dtypes else "float32", now)
        object.__setattr__(model, _ATTRIBUTE, store)  # past Keras' tracking: this is no part of the model
    return store


def _made_of(model: keras.Model) -> tuple[Any, ...]:
    """Its layers and their own weights, as they are now."""
    parts: list[Any] = []
    for layer in model._flatten_layers():
        parts.append(layer)
        parts += layer._trainable_variables
        parts += layer._non_trainable_variables
    return tuple(parts)
