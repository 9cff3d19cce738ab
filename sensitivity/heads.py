"""A model's outputs: found in whatever structure it returns, chosen by name, joined into one target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from .errors import Refused, suggested
from .layers import keras, leaf_layers


@dataclass(frozen=True)
class Selection:
    """Of a target's steps and channels, the numbers of those that are wanted, rising; None: all."""

    steps: tuple[int, ...] | None = None
    channels: tuple[int, ...] | None = None

    def of(self, target: tf.Tensor) -> tf.Tensor:
        """`(batch[, step][, channel])` → the same of those that are wanted"""
        if self.steps is not None:
            target = tf.gather(target, self.steps, axis=1)
        return self.channels_of(target)

    def heads(self, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        """Names of the outputs that something is wanted of. shapes: of each, its steps and channels."""
        found, first = [], 0
        for name, (_, channels) in shapes.items():
            if self.channels is None or any(first <= channel < first + channels for channel in self.channels):
                found.append(name)
            first += channels
        return found

    def channels_of(self, target: tf.Tensor) -> tf.Tensor:
        """The same of any steps: the last axis alone is chosen from."""
        return target if self.channels is None else tf.gather(target, self.channels, axis=-1)


def select(steps: int, names: Sequence[str], wanted_steps: Any, wanted_names: Any) -> Selection:
    """What is wanted of a target of so many steps and channels of these names: numbers (from the end, where negative)
    or a slice such as "10:" of steps, numbers or names of channels; None: all. Raises `Refused`.
    """
    return Selection(_selected_steps(steps, wanted_steps), _selected_channels(names, wanted_names))


def _selected_steps(steps: int, wanted: Any) -> tuple[int, ...] | None:
    if wanted is None:
        return None
    if isinstance(wanted, str):
        start, stop, step = (int(part) if part else None for part in (wanted + "::").split(":")[:3])
        found = tuple(range(steps))[slice(start, stop, step)]
    else:
        found = tuple(step + steps if step < 0 else step for step in wanted)
    if not _rises(found, steps):
        raise Refused(
            "sensitivity.output_steps",
            given=f"{wanted!r}, of a model with {steps} output step{'s' if steps > 1 else ''}",
            allowed=f"numbers from 0 to {steps - 1}, or from the end, -{steps} to -1, rising, each once; or a slice of "
            'them such as "10:" or "::24"',
            remedy="leave it out for all steps",
        )
    return None if len(found) == steps else found


def _selected_channels(names: Sequence[str], wanted: Any) -> tuple[int, ...] | None:
    if wanted is None:
        return None
    found = tuple(names.index(name) if name in names else name for name in wanted)
    if not _rises(found, len(names)):
        raise Refused(
            "sensitivity.outputs",
            given=f"{list(wanted)!r}",
            allowed=f"{', '.join(names)}, or their numbers from 0, in the model's order, each once",
            remedy=suggested(wanted, names, "leave it out for all outputs"),
        )
    return None if len(found) == len(names) else found


def _rises(numbers: tuple[Any, ...], count: int) -> bool:
    """Whether they are one or more numbers below `count`, rising."""
    inside = all(isinstance(number, int) and 0 <= number < count for number in numbers)
    return bool(numbers) and inside and all(a < b for a, b in zip(numbers, numbers[1:], strict=False))


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
        allowed=f'"output" (all of {", ".join(names)}), one of these, or an inner layer ({", ".join(_inner(model))})',
        remedy=suggested(of, ["output", *names, *_inner(model)], "set sensitivity.of to one of these"),
    )


def _inner(model: keras.Model) -> list[str]:
    return list(dict.fromkeys(layer.name for layer in leaf_layers(model)))


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


def require_batched(heads: dict[str, Any], windows: int) -> None:
    """Refuse outputs that are not one or more numbers of each of so many windows."""
    for name, head in heads.items():
        shape = tuple(head.shape)
        if shape[:1] != (windows,) or 0 in shape:
            raise Refused(
                "model.path",
                given=f"output {name!r} of shape {shape} for {windows} windows",
                allowed=f"({windows}), ({windows}, output) or ({windows}, output_step, output), each 1 or more",
                remedy="keep the batch as the output's first axis, without a reduction over it",
            )


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


def labels(channels: dict[str, int]) -> tuple[str, ...]:
    """A name for each channel of each head, after the head; numbered throughout where two would be the same."""
    names = [name if count == 1 else f"{name}_{i}" for name, count in channels.items() for i in range(count)]
    return tuple(names if len(set(names)) == len(names) else (f"output_{i}" for i in range(len(names))))


def require_floating(heads: dict[str, Any]) -> None:
    for name, head in heads.items():
        if not (isinstance(head, tf.Tensor) and head.dtype.is_floating):
            dtype = getattr(head, "dtype", None)
            raise Refused(
                "sensitivity.of",
                given=f"output {name!r} ({type(head).__name__}{f' of {dtype.name}' if dtype else ''})",
                allowed="floating-point tensors: others have no derivative",
                remedy="name another output, or end the model before it rounds or chooses",
            )
