"""Values of a model's graph that do not depend on what it is differentiated by: computed once, before any walk."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from .calls import Call, evaluate
from .layers import as_graph
from .parts import Part


@dataclass(frozen=True)
class Taken:
    """An input of the model as windows hold it. part: None where they are the input themselves."""

    part: Part | None
    dtype: str

    def of(self, windows: tf.Tensor) -> tf.Tensor:
        return tf.cast(windows if self.part is None else self.part.of(windows), self.dtype)


@dataclass(frozen=True)
class Held:
    """inputs: of the model, by number. calls: on these and what comes of them alone, in order."""

    inputs: dict[int, Taken]
    calls: tuple[Call, ...]

    def values(self, windows: tf.Tensor) -> dict[int, tf.Tensor]:
        """By number, `(batch, …)`."""
        found = {number: taken.of(windows) for number, taken in self.inputs.items()}
        evaluate(self.calls, found)
        return found

    def forms(self, window: tuple[int, ...], dtype: str) -> dict[int, tf.TensorSpec]:
        """Shapes and dtypes of the values of two windows of that shape, of those without a mask."""
        plain: list[int] = []

        def computed(windows: tf.Tensor) -> dict[int, tf.Tensor]:
            found = self.values(windows)
            plain.extend(number for number, value in found.items() if getattr(value, "_keras_mask", None) is None)
            return found

        graph = as_graph(computed).get_concrete_function(tf.TensorSpec((2, *window), dtype))
        return {number: spec for number, spec in graph.structured_outputs.items() if number in plain}
