"""Kernels that `jacobian` keeps with their model, which of them serve, and whether they are right."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import keras
import numpy as np

from .engine import Tuned
from .facts import CallFacts
from .job import SensitivitySection
from .layers import constants_of, leaf_layers
from .model import Target, shaped_call
from .probes import TOLERANCE, Probe
from .products.product import Product
from .setting import Choice
from .tuning import CHECKED

T = TypeVar("T")
_ATTRIBUTE = "_sensitivity_kernels"
WORTH_TIMING = 30.0  # seconds of work, where kernels were timed for a tenth of it: they are timed again
MOST_FILLED = 2  # a kernel takes at least half as many windows as a call of it has room for
MUCH_LARGER = 2  # times the numbers of windows are worth another look at a kernel's own
LARGER = 5  # times the bytes of a call are those of one of four times the windows


@dataclass
class Found:
    """A choice and its kernel, found for so many windows, all points of each counted, with `most` windows at once and
    `call` bytes for a call. proved: what the kernel was last proved right with.
    """

    choice: Choice
    engine: Tuned
    windows: int
    most: int
    call: int
    proved: State

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

    def is_right(self, source: np.ndarray) -> bool:
        """Whether the kernel's last results, of these windows, are right. It compares a few windows with plain reverse
        mode, but only where weights changed or windows are much larger than before: a layer may then work otherwise.
        """
        before, state = self.proved, State.of(self.engine, source)
        if state.weights == before.weights and state.largest <= before.largest:
            return True
        if state.weights != before.weights or state.largest > MUCH_LARGER * before.largest:
            few = np.ascontiguousarray(source[np.argsort(_sizes(source))[-CHECKED:]])
            if not Probe.of(self.engine.target, few).error(self.engine(few)[1]) <= TOLERANCE:
                return False
        self.proved = state
        return True


@dataclass
class TargetKernels:
    """A target, and its kernels by the most windows that they take at once."""

    target: Target
    kernels: dict[int, Found] = field(default_factory=dict)

    def serving(self, windows: int, most: int, call: int) -> Found | None:
        """A kernel that serves so many windows, with `call` bytes for a call, if there is one."""
        return next((found for found in self.kernels.values() if found.serves(windows, most, call)), None)


@dataclass
class Request:
    """What is asked of a model and of windows of one shape, and the kernels of each product of it.

    plain: before any product. whole: the model, wrapped and cut at `of`. store: what else is kept with the model.
    """

    store: Kept
    wanted: SensitivitySection
    plain: CallFacts
    whole: keras.Model
    products: dict[tuple[Any, ...], TargetKernels] = field(default_factory=dict)

    def of_product(self, product: Product) -> TargetKernels:
        """The target of a product, with the kernels that were found for it. Raises `Refused` where it has none."""
        form = product.form
        if form not in self.products:
            facts = shaped_call(self.plain, product)
            target = Target(self.whole, facts, self.wanted.of, product, with_weight_sums=True)
            self.products[form] = TargetKernels(target)
        return self.products[form]


@dataclass
class Kept:
    """What lives and dies with a model.

    dtype: in which the model computes. made_of: its layers and weights. facts: of the model, by what they depend on.
    models: that it is wrapped in or cut to, and its twin of full precision. requests: all that was asked.
    by_arguments: the requests of plain arrays, by the arrays' shape and dtype and the arguments as they were given.
    """

    dtype: str = "float32"
    made_of: tuple[Any, ...] = ()
    facts: dict[Any, CallFacts] = field(default_factory=dict)
    models: dict[Any, keras.Model] = field(default_factory=dict)
    requests: dict[Any, Request] = field(default_factory=dict)
    by_arguments: dict[Any, Request] = field(default_factory=dict)

    def forget(self) -> None:
        self.facts.clear()
        self.models.clear()
        self.requests.clear()
        self.by_arguments.clear()


@dataclass(frozen=True)
class State:
    """What a kernel was called with. weights: sums that tell whether they are the same. largest: number of all windows
    so far.
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


def kept_or_made(kept: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """What was made before, or is made now."""
    if key not in kept:
        kept[key] = make()
    return kept[key]


def kept_with(model: keras.Model) -> Kept:
    """What is kept with a model as long as it is made of the same layers and weights."""
    store, now = getattr(model, _ATTRIBUTE, None), made_of(model)
    if store is None or len(now) != len(store.made_of) or any(map(operator.is_not, now, store.made_of)):
        dtypes = {str(layer.dtype_policy.variable_dtype) for layer in leaf_layers(model) or [model]}
        store = Kept("float64" if "float64" in dtypes else "float32", now)
        object.__setattr__(model, _ATTRIBUTE, store)  # past Keras' tracking: this is no part of the model
    return store


def made_of(model: keras.Model) -> tuple[Any, ...]:
    """A model's layers with their own weights and constants, as they are now; one never called may have none yet.

    A layer that adapts to data, such as `Normalization`, holds its means as constants. Once it adapts again, they are
    other ones.
    """
    parts: list[Any] = []
    for layer in model._flatten_layers():
        parts.append(layer)
        parts += layer._trainable_variables
        parts += layer._non_trainable_variables
        if hasattr(layer, "finalize_state"):
            parts += constants_of(layer).values()
    return tuple(parts)
