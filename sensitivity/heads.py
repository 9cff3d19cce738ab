"""A model's outputs: found in whatever structure it returns, chosen by name, joined into one target."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .errors import Refused
from .layers import keras


def heads(model: keras.Model, result: Any, of: str) -> dict[str, Any]:
    """Output name → tensor, those that `of` names: all for "output", else one."""
    if isinstance(result, dict):  # in its own order: flattening would sort it
        parts, names = list(result.values()), list(result)
    else:
        parts, names = keras.tree.flatten(result), list(getattr(model, "output_names", None) or [])
    if len(names) != len(parts) or len(set(names)) != len(names):
        names = [f"output_{i}" for i in range(len(parts))]
    named = dict(zip(names, parts, strict=True))
    if of == "output":
        return {"output": parts[0]} if len(parts) == 1 else named
    if of in named:
        return {of: named[of]}
    raise Refused(
        "sensitivity.of",
        given=f"{of!r}",
        allowed=f'"output" (all of {", ".join(names)}), or one of these',
        remedy="set sensitivity.of to one of these",
    )


def joined(heads: dict[str, tf.Tensor]) -> tf.Tensor:
    """One head as it is; several as `(batch, output_step, output)`, one after another along `output`."""
    if len(heads) == 1:
        return next(iter(heads.values()))
    shapes = {name: steps_and_channels(head) for name, head in heads.items()}
    if len({steps for steps, _ in shapes.values()}) > 1:
        raise Refused(
            "sensitivity.of",
            given="all outputs, of different lengths: "
            + ", ".join(f"{name} has {steps} steps" for name, (steps, _) in shapes.items()),
            allowed="outputs with the same number of steps, or one of them",
            remedy=f"set sensitivity.of to one of {', '.join(shapes)}",
        )
    return tf.concat([tf.reshape(head, (-1, *shapes[name])) for name, head in heads.items()], axis=-1)


def steps_and_channels(head: Any) -> tuple[int, int]:
    shape = tuple(head.shape[1:])
    if len(shape) > 2:
        raise Refused(
            "model.path",
            given=f"an output of shape {('batch', *shape)}",
            allowed="(batch), (batch, output) or (batch, output_step, output)",
            remedy="end the model with a Reshape to (output_step, output)",
        )
    return (shape[0] if len(shape) == 2 else 1), (shape[-1] if shape else 1)


def labels(name: str, channels: int) -> list[str]:
    return [name] if channels == 1 else [f"{name}_{i}" for i in range(channels)]


def require_floating(heads: dict[str, Any]) -> None:
    for name, head in heads.items():
        if not (tf.is_tensor(head) and head.dtype.is_floating):
            raise Refused(
                "sensitivity.of",
                given=f"output {name!r} of {getattr(head, 'dtype', type(head).__name__)}",
                allowed="floating-point tensors: others have no derivative",
                remedy="name another output, or end the model before it rounds or chooses",
            )
