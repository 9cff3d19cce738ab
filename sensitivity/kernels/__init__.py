"""How a batch of windows is differentiated: one module a kernel, one signature.

A kernel module has `why_not(facts) -> str | None`, the reason it cannot serve a model, and
`build(target, setting)`, a function from windows `(batch, *input_shape)` to

    prediction  (batch, *target_shape)               the target itself, from the same forward pass
    jacobian    (batch, *target_shape, *input_shape)  ∂ target / ∂ window

for the setting's `windows_per_call` windows: one static shape, so that it is traced once.
"""

from __future__ import annotations

import functools
from types import ModuleType

import tensorflow as tf

from ..model import CallFacts, Target
from ..plan import Setting
from . import batch_jacobian, gradient

KERNELS: dict[str, ModuleType] = {"gradient": gradient, "batch_jacobian": batch_jacobian}

__all__ = ["KERNELS", "compile_kernel", "why_not"]


def why_not(name: str, facts: CallFacts) -> str | None:
    """Why the kernel `name` cannot serve the model, or None where it can."""
    return KERNELS[name].why_not(facts)


def compile_kernel(target: Target, setting: Setting) -> tf.types.experimental.PolymorphicFunction:
    """The kernel as one `tf.function` of one static shape `(windows_per_call, *input_shape)`."""
    facts = target.facts
    signature = tf.TensorSpec((setting.windows_per_call, *facts.input_shape), facts.dtype)
    # TensorFlow counts traces by code object and warns; a partial has none, and each kernel is traced once.
    kernel = functools.partial(KERNELS[setting.kernel].build(target, setting))
    return tf.function(kernel, input_signature=[signature], jit_compile=setting.xla or None, autograph=False)
