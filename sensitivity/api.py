"""The same engine in one process, for notebooks: `jacobian(model, windows)`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from .audit import few, require_independent, require_stateless
from .errors import Refused
from .job import SensitivitySection, parse_bytes
from .loading import leaf_layers
from .machine import available_memory
from .model import CallFacts, Target, describe_call
from .tuning import Tuned, choose

_ATTRIBUTE = "_sensitivity_kernels"


def jacobian(model: keras.Model, windows: Any, memory: str | int | None = None, *, of: str = "output") -> np.ndarray:
    """∂ model(windows) / ∂ windows, window by window: `tape.batch_jacobian` that fits in memory.

    windows: `(batch, *source)`, usually `(batch, lag, feature)`; anything NumPy takes, in the model's units.
    memory: bytes to use above what the process has, as a number or "2GB"; None: half of what is available.
    of: "output", or the name of one of several outputs.

    Returns `(batch, *target, *source)` in the model's dtype, in units of the output per unit of the input; several
    outputs stand one after another along the target's last axis. The compiled kernel is kept with the model and
    serves further calls with the same shapes, with whatever weights the model then has.

    Raises `Refused` (a ValueError) for a model whose samples influence each other or that takes no such windows, and
    for a memory that a single window is projected not to fit; MemoryError where one does not after all.
    """
    dtype = _dtype(model)
    source = np.asarray(windows, dtype)
    if source.ndim < 2:
        raise Refused(
            "windows",
            given=f"an array of shape {source.shape}",
            allowed="(batch, lag, feature), or any shape that begins with the batch",
            remedy="add a batch axis: windows[None]",
        )
    store = _kept(model)
    facts = store.get((source.shape[1:], of, dtype))
    if facts is None:
        require_stateless(model)
        facts = describe_call(model, source.shape[1:], of=of, dtype=dtype)
        if len(source):
            require_independent(Target(model, facts, of), few(source))
            store[source.shape[1:], of, dtype] = facts
    if not len(source):
        return np.empty((0, *facts.target_shape, *facts.input_shape), dtype)
    return _kernel(store, Target(model, facts, of), _budget(memory), len(source))(source)[1]


def _kernel(store: dict[Any, Any], target: Target, memory: int, windows: int) -> Tuned:
    facts: CallFacts = target.facts
    at_most = 1 << (windows - 1).bit_length()  # the next power of two: other numbers of windows share the kernel
    setting = choose(SensitivitySection(), facts, memory, at_most, key="memory")
    key = (facts.input_shape, target.of, facts.dtype, setting)
    if key not in store:
        store[key] = Tuned(target, setting)
    return store[key]


class _Kept(dict[Any, Any]):
    """Kernels by shape, living and dying with their model."""


def _kept(model: keras.Model) -> _Kept:
    store = getattr(model, _ATTRIBUTE, None)
    if store is None:
        store = _Kept()
        object.__setattr__(model, _ATTRIBUTE, store)  # past Keras' tracking: this is no part of the model
    return store


def _budget(memory: str | int | None) -> int:
    if memory is None:
        return available_memory() // 2
    if isinstance(memory, str):
        return parse_bytes(memory)
    if memory <= 0:
        raise Refused("memory", given=memory, allowed="a positive number of bytes", remedy='write it as "2GB", say')
    return int(memory)


def _dtype(model: keras.Model) -> str:
    dtypes = {str(layer.dtype_policy.variable_dtype) for layer in leaf_layers(model)}
    return "float64" if "float64" in dtypes else "float32"
