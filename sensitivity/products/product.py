"""What is computed of a target, window by window: the protocol of a product, one module each.

A product is made of rows: numbers of each window that are differentiated. A kernel differentiates them in any way it
knows, so a product says what the rows are and what becomes of their derivatives, and runs by all kernels, the tuner,
the store and the audit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import tensorflow as tf

from ..errors import Refused
from ..facts import CallFacts
from ..variables import Dims, Variable

if TYPE_CHECKING:
    from ..engine import Tuned
    from ..facts import ModelFacts
    from ..job import SensitivitySection
    from ..model import Target
    from ..record import Record

Given = Sequence[tf.Tensor]  # of a call: windows (batch, *input_shape), and what the product takes beside them
Arrays = tuple[np.ndarray, ...]
Fetch = Callable[[slice], Arrays]  # the same of some windows, as arrays
Found = tuple[slice, dict[str, np.ndarray]]  # windows that are done, and their numbers by variable


@dataclass(frozen=True)
class Product:
    """The Jacobian's way, which others follow but for what they say."""

    name: ClassVar[str]
    long_name: ClassVar[str]
    is_linear: ClassVar[bool] = True  # what becomes of the rows' derivatives

    # ---- made ---------------------------------------------------------------------------------------

    @classmethod
    def asked(cls, wanted: SensitivitySection, facts: ModelFacts, record: Record) -> Self:
        """As a job asks for it. Raises `Refused`."""
        return cls()

    def kept(self) -> dict[str, np.ndarray]:
        """What a run keeps of it: its fields as arrays, none of them of objects."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: np.array(value) for name, value in parts.items() if value is not None}

    @classmethod
    def again(cls, kept: Mapping[str, np.ndarray]) -> Self:
        """The same from what a run keeps."""
        large = {part.name for part in fields(cls) if not part.compare}
        return cls(**{name: value if name in large else _plain(value) for name, value in kept.items()})

    @property
    def form(self) -> tuple[Any, ...]:
        """The product with only the shapes of its arrays. Products of one form share kernels."""
        return self, *(np.shape(getattr(self, part.name)) for part in fields(self) if not part.compare)

    # ---- shapes ------------------------------------------------------------------------------------

    def shaped(self, facts: CallFacts) -> CallFacts:
        """The facts of a call with the product's rows and shapes. Raises `Refused` where there is no such product."""
        raise NotImplementedError

    def variables(self, target: Dims, source: Dims) -> tuple[Variable, ...]:
        """Those of the store beside the prediction, the product's own first."""
        raise NotImplementedError

    def labels(self) -> dict[str, Sequence[str]]:
        """Of dims of its own."""
        return {}

    def constants(self, target: Dims, source: Dims) -> dict[str, tuple[Dims, np.ndarray]]:
        """What of it stands in the store for readers to see: dims and numbers. Workers make it anew from `kept`."""
        return {}

    # ---- in a graph --------------------------------------------------------------------------------

    def beside(self, facts: CallFacts, windows: int) -> Arrays:
        """What a call takes beside its windows, `(windows, …)` each, where nothing else is given."""
        return ()

    def source(self, target: Target, given: Given) -> tf.Tensor:
        """What rows are differentiated by."""
        return target.start(given)

    def rows(
        self, target: Target, given: Given, source: tf.Tensor, first: tf.Tensor, count: int | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """prediction `(batch, *target_shape)`, and `count` rows from `first` on `(batch, count)`; None: all."""
        raise NotImplementedError

    def finished(self, target: Target, given: Given, block: tf.Tensor) -> tf.Tensor:
        """Derivatives of some rows `(batch, rows, *source)` as they leave the graph: `(batch, rows, *row_shape)`."""
        return newest(block, target.facts)

    def pushed(self, pulled: np.ndarray) -> np.ndarray | None:
        """A row's derivative `(batch, *source)` as the Jacobian is multiplied by it; None where it is not."""
        return None

    # ---- in NumPy ----------------------------------------------------------------------------------

    def computed(self, engine: Tuned, fetch: Fetch, count: int) -> Iterator[Found]:
        """The product of `count` windows, call by call, with `prediction`."""
        for done, (prediction, block) in engine.calls(fetch, count):
            yield done, {self.name: self.arranged(block), "prediction": prediction}

    def arranged(self, block: np.ndarray) -> np.ndarray:
        """`(windows, *block_shape)` as it is given and stored."""
        return block

    def in_units(self, values: dict[str, np.ndarray], std: np.ndarray) -> dict[str, np.ndarray]:
        """What was computed of scaled windows, `(window, *stored dims)`, as of windows in units of the series."""
        return {**values, self.name: values[self.name] / std}


def _plain(value: np.ndarray) -> Any:
    """A number, or a tuple."""
    return tuple(value.tolist()) if value.ndim else value.item()


def outputs(target: Target, prediction: tf.Tensor, first: tf.Tensor, count: int | None) -> tf.Tensor:
    """`(batch, *target_shape)` → `(batch, count)`, from output `first` on."""
    batch, size = prediction.shape[0], target.facts.target_size
    flat = tf.reshape(prediction, (batch, size))
    return flat if count is None else tf.slice(flat, [0, first], [batch, count])


def some(vectors: tf.Tensor, first: tf.Tensor, count: int | None) -> tf.Tensor:
    """`(batch, vector, …)` → `count` of them from `first` on; None: all."""
    return vectors if count is None else tf.gather(vectors, first + tf.range(count), axis=1)


def newest(block: tf.Tensor, facts: CallFacts) -> tf.Tensor:
    """`(batch, rows, *source)` → the same of the lags that are wanted: the newest, which are last"""
    return block if facts.max_lag is None else block[:, :, -facts.lags :]


def require_all_lags(product: str, facts: CallFacts) -> None:
    """Refuse a `max_lag` where all lags belong together."""
    if facts.max_lag is not None:
        raise Refused(
            "sensitivity.max_lag",
            given=f"{facts.max_lag} for {product}",
            allowed="jacobian, vjp and gradient_norm, of which lags may be left out",
            remedy="leave it out",
        )


def by_outputs(facts: CallFacts, product: str, row_shape: tuple[int, ...], **more: Any) -> CallFacts:
    """The facts of a product whose rows are the target's own numbers."""
    size = facts.target_size
    block_shape = (*facts.target_shape, *row_shape)
    return replace(
        facts,
        product=product,
        rows_of="outputs",
        rows=size,
        group=size,
        row_shape=row_shape,
        block_shape=block_shape,
        **more,
    )
