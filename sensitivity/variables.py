"""The arrays of a run's store: what each is called, its dims after `time`, and how it is cut into chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Dims = tuple[tuple[str, int], ...]
TARGET_DIMS = ("output_step", "output")
INPUT_DIMS = ("lag", "feature")
LAYER_DIMS = ("source_step", "unit")
WEIGHTS_DIMS = ("parameter",)
OF_INPUT = "derivative of the output with respect to the input, per unit of the series' features"
PREDICTION = "output of the model"


@dataclass(frozen=True)
class Variable:
    """dims: after time, with their sizes. long_name: in words. cut: the number of the dim that a window too large for
    one chunk is cut along.
    """

    name: str
    dims: Dims
    long_name: str = ""
    cut: int = 0

    @property
    def dim_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.dims)

    @property
    def size(self) -> int:
        """Numbers of a window."""
        return math.prod(self.shape)

    @property
    def cut_size(self) -> int:
        """Of the dim that it may be cut along."""
        return self.shape[self.cut] if self.dims else 1

    def chunk(self, length: int) -> tuple[int, ...]:
        """A chunk's shape after time, with so many of the dim that it is cut along."""
        return tuple(length if number == self.cut else size for number, size in enumerate(self.shape))

    def keys(self, time: int, length: int) -> Iterator[str]:
        """The keys of its chunks at that place along time, in `results.zarr`."""
        for part in range(-(-self.cut_size // length)):
            yield f"{self.name}/{self.key(time, part)}"

    def key(self, time: int, part: int) -> str:
        places = (part if number == self.cut else 0 for number in range(len(self.dims)))
        return ".".join(map(str, ("c", time, *places)))


def variables_of(model: dict[str, Any]) -> tuple[Variable, ...]:
    """As `job.json` has them, of which the first is the product, in chunks; the others are one chunk a shard."""
    if "variables" in model:
        return tuple(
            Variable(**{**one, "dims": tuple((name, size) for name, size in one["dims"])}) for one in model["variables"]
        )
    steps, outputs = model["output_steps"], len(model["outputs"])  # of an earlier version
    lags = model["length"] if model.get("max_lag") is None else min(model["max_lag"] + 1, model["length"])
    target = tuple(zip(TARGET_DIMS, (steps, outputs), strict=True))
    source = tuple(zip(INPUT_DIMS, (lags, model["features"]), strict=True))
    return Variable("jacobian", (*target, *source), OF_INPUT), Variable("prediction", target, PREDICTION)
