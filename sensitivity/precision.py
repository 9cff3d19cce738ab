"""Models of half precision, which are computed in full: their derivatives would be noise in the third digit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .layers import keras

_CAST_FROM = "_sensitivity_cast_from"


def half_policies(model: keras.Model) -> list[str]:
    """The policies of its layers, and of models within it, that compute in float16 or bfloat16, or keep weights so."""
    policies = [layer.dtype_policy for layer in model._flatten_layers()]
    return sorted({p.name for p in policies if "float16" in f"{p.compute_dtype} {p.variable_dtype}"})


def note(model: keras.Model, policies: list[str], dtype: str) -> None:
    """Keep with a model what it was cast from."""
    named = f"policy is {policies[0]}" if len(policies) == 1 else f"policies are {' and '.join(policies)}"
    lost = (f"computed in {dtype}: the model's {named}",) if policies else ()
    object.__setattr__(model, _CAST_FROM, lost)  # past Keras' tracking


def said(model: keras.Model) -> tuple[str, ...]:
    """What was lost by casting the model, in words."""
    return getattr(model, _CAST_FROM, ())


@contextlib.contextmanager
def default_policy(dtype: str) -> Iterator[None]:
    """Within, layers whose configuration names no dtype are built with this one."""
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy(dtype)
        yield
    finally:
        keras.config.set_dtype_policy(before)
