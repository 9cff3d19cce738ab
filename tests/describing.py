"""The facts of a model as its Jacobian's kernels see it, without a job."""

from __future__ import annotations

from typing import Any

import keras

from sensitivity.facts import CallFacts
from sensitivity.model import described_call, shaped_call
from sensitivity.products.jacobian import Jacobian


def describe_call(model: keras.Model, input_shape: tuple[int, ...], *, of: str, dtype: str, **wanted: Any) -> CallFacts:
    """Of a call on `(batch, *input_shape)`, by the input. wanted: `max_lag`, `output_steps` and `outputs`."""
    return shaped_call(described_call(model, input_shape, of=of, wrt="input", dtype=dtype, **wanted), Jacobian())
