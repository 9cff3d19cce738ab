"""How a batch of windows is differentiated: one module a kernel, one signature.

A kernel module has `why_not(facts, *, pfor, xla) -> str | None`, the reason it cannot serve a model in that way, and
`build(target, setting)`, a function from what is given, windows `(batch, *input_shape)` and what the product takes
beside them, and the number of the first row to

    prediction  (batch, *target_shape)   the target itself, from the same forward pass
    block       (batch, rows, *source)   ∂ rows / ∂ source, for `outputs_per_call` rows of the product from the first on

A kernel may give all lags where `max_lag` keeps the newest: the others are cut off.

Shapes are static, `batch` is `windows_per_call`: nothing is traced twice, and recurrent loops run 1.4 to 2.7 times
faster than with an open batch, since their lists then have shapes that TensorFlow knows.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import tensorflow as tf

from ..facts import CallFacts
from ..layers import as_graph, leaf_layers
from ..model import Target
from ..setting import Setting
from . import batch_jacobian, forward, gradient, scan

KERNELS: dict[str, ModuleType] = {
    "gradient": gradient,
    "batch_jacobian": batch_jacobian,
    "forward": forward,
    "scan": scan,
}

__all__ = ["KERNELS", "compile_kernel", "pfor_fallbacks", "signature", "why_not"]


def why_not(name: str, facts: CallFacts, *, pfor: bool = False, xla: bool = False) -> str | None:
    """Why the kernel `name` cannot serve the model so, by pfor or a loop, by XLA or not; None where it can."""
    if facts.only_gradient and name != "gradient":
        return facts.only_gradient
    if facts.by_output_step and name != "scan":
        return "max_lag counts back from each output's own step, which the scan alone does"
    if pfor and facts.no_pfor and name in ("batch_jacobian", "forward"):
        return facts.no_pfor
    return KERNELS[name].why_not(facts, pfor=pfor, xla=xla)


def compile_kernel(target: Target, setting: Setting) -> tf.types.experimental.PolymorphicFunction:
    """The kernel as one `tf.function` of one static shape `(windows_per_call, *input_shape)`. It also gives sums of
    weights where the target asks for them.
    """
    kernel = KERNELS[setting.kernel].build(target, setting)

    def traced(first: tf.Tensor, *given: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with _cudnn(target, setting.use_cudnn), target.folded():
            prediction, block = kernel(given, first)
            found = prediction, target.product.finished(target, given, block)
            return (*found, _sums_of_weights(target)) if target.with_weight_sums else found

    return as_graph(traced, input_signature=signature(target, setting), jit_compile=setting.xla or None)


def signature(target: Target, setting: Setting) -> tuple[tf.TensorSpec, ...]:
    """What a compiled kernel takes: the number of the first row, windows, and what the product takes beside them."""
    facts, windows = target.facts, setting.windows_per_call
    shapes = [facts.input_shape, *(beside.shape[1:] for beside in target.product.beside(facts, 1))]
    return tf.TensorSpec((), "int32"), *(tf.TensorSpec((windows, *shape), facts.dtype) for shape in shapes)


def _sums_of_weights(target: Target) -> tf.Tensor:
    """A number of each weight of floating point, which tells whether it is the same as before: uᵀ·W·v with random
    numbers u and v that are always the same ones. Signs and places of a weight's numbers count.
    """
    weights = [tf.convert_to_tensor(weight) for weight in target.model.weights]
    sums = [_bilinear(tf.cast(weight, target.facts.dtype)) for weight in weights if weight.dtype.is_floating]
    return tf.concat(sums, 0) if sums else tf.zeros((0, 1), target.facts.dtype)


def _bilinear(weight: tf.Tensor) -> tf.Tensor:
    """`(1, 1)`. Of few numbers u is 1; of many, v is as long as the last axis, so that it takes little memory."""
    size = weight.shape.num_elements()
    if size is None:
        return tf.reshape(tf.nn.l2_loss(weight), (1, 1))
    columns = size if size <= _FEW_NUMBERS else max(weight.shape[-1], 1)
    random = np.random.default_rng(size)
    v = tf.constant(random.standard_normal((columns, 1)), weight.dtype)
    by_row = tf.matmul(tf.reshape(weight, (size // max(columns, 1), columns)), v)
    if by_row.shape[0] == 1:
        return by_row
    return tf.matmul(tf.constant(random.standard_normal((1, by_row.shape[0])), weight.dtype), by_row)


_FEW_NUMBERS = 1 << 14


@contextlib.contextmanager
def _cudnn(target: Target, wanted: bool) -> Iterator[None]:
    """Within, recurrent layers take cuDNN where they can, or never: pfor would run its operations one by one."""
    layers = [layer for layer in leaf_layers(target.model) if hasattr(layer, "use_cudnn")]
    before = [layer.use_cudnn for layer in layers]
    try:
        for layer in layers:
            layer.use_cudnn = "auto" if wanted else False
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.use_cudnn = value


@contextlib.contextmanager
def pfor_fallbacks() -> Iterator[set[str]]:
    """Within, gathers the operations that pfor cannot vectorise and loops over: it tells debuggers only."""
    logger, found = tf.get_logger(), set[str]()

    class Gather(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told = _FALLBACK.search(record.getMessage())
            if told:
                found.add(told[1])

    handler, level, kept = Gather(), logger.level, logger.handlers
    propagate = logger.propagate
    try:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.DEBUG)
        yield found
    finally:
        logger.handlers, logger.propagate = kept, propagate
        logger.setLevel(level)


_FALLBACK = re.compile(r"Using a while_loop for converting (\w+)")
