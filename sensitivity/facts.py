"""What kernels and plans need to know of a model, what is asked of it, and what comes out: numbers, no model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .heads import Selection
from .labels import Labels
from .packing import Packing, part_of_json
from .parts import Part, of_parts, put_in_parts, substituted_in_parts
from .variables import INPUT_DIMS, LAYER_DIMS, TARGET_DIMS, WEIGHTS_DIMS, Dims, Variable, variables_of
from .walks import ScanFacts, Walk, of_all_lags, of_last_lags
from .windows import Gaps

if TYPE_CHECKING:
    from .survey import Survey

RowsOf = Literal["outputs", "vectors", "directions", "derivatives"]
Way = Literal["together", "side by side", "one by one"]
AtSteps = Literal["no", "causal", "acausal"]


@dataclass(frozen=True)
class Weight:
    """A model's weight: `layer/variable`, and its own shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Source:
    """What is differentiated by: a window ("input"), what a layer gives ("layer"), or weights ("weights").

    name: as it was asked for. shape: of one window's, without the batch axis; of several weights `(parameter,)`.
    parts: of an input that is a part of the window, where it is: see `of_parts`. weights: one after another. way: how
    samples get weights of their own: all at once by layers that know how, by pfor over samples, or by a loop.
    """

    kind: Literal["input", "layer", "weights"]
    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    weights: tuple[Weight, ...] = ()
    way: Way | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, windows: Any) -> Any:
        """An input's part `(batch, *shape)` of windows `(batch, *input_shape)`, NumPy's or TensorFlow's."""
        return of_parts(windows, self.parts)

    def put(self, windows: Any, values: Any) -> Any:
        """The windows with `values` `(batch, *shape)` there."""
        return put_in_parts(windows, self.parts, values)

    def substituted(self, windows: Any, values: Any) -> Any:
        """The same as a model takes them, in a graph. Nothing else of the windows depends on the values."""
        return substituted_in_parts(windows, self.parts, values)

    @property
    def alone(self) -> Source:
        """The same in the plainest way, one sample after the other, to be compared with."""
        return self if self.way is None else replace(self, way="one by one")

    @property
    def loops(self) -> tuple[tuple[int, int], ...]:
        """As recurrent layers of no units: the loop over samples."""
        return ((1, 0),) if self.way == "one by one" else ()

    @property
    def parameters(self) -> Iterator[str]:
        """Names of all numbers of the weights: `lstm/kernel[0,3]`."""
        for weight in self.weights:
            yield from (f"{weight.name}[{','.join(map(str, place))}]" for place in np.ndindex(weight.shape))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Source:
        weights = tuple(Weight(one["name"], tuple(one["shape"])) for one in content.get("weights", ()))
        parts = tuple(map(part_of_json, content.get("parts", ())))
        return cls(**{**content, "shape": tuple(content["shape"]), "parts": parts, "weights": weights})


@dataclass(frozen=True, kw_only=True)
class CallFacts:
    """What a kernel needs to know of one call of the model.

    input_shape, target_shape: of one window and its target, without the batch axis, as the model has them.
    source: what it is differentiated by.
    parameters: number of weights. activations: numbers that a forward pass computes for one window.
    recurrent: (steps, units) of each recurrent layer.
    scan: what walking back through a causal recurrent model takes; None for others, and `no_scan` says why.
    max_lag: derivatives are wanted of lags up to it alone; None: of all.
    selection: the outputs that they are wanted of, which `target_shape` is the shape of.
    smooth: the derivative has no jumps, as far as the graph's operations tell (a ReLU's has one).
    operations: in the graph of the forward pass; an unrolled loop has thousands.
    only_gradient, together, linear, only_first: what the backward pass allows, as `Backward` says.
    no_pfor: why pfor is never to be tried; empty where it may be.
    lost: what of the model as it was given is not kept, such as its half precision.
    unreached: a sentence for each output that does not depend on the source.
    packing: where a window holds what the model takes, unless it takes the window itself.

    A product is made of `rows`: the numbers that are differentiated, each of which gives a derivative of `row_shape`.
    rows_of: the target's own numbers are rows; or their sums, weighted by vectors; or directions, whose derivatives
    are of the target's shape; or derivatives, which are differentiated once more. group: rows that one call may share.
    points: how often a window is differentiated, about. indivisible: a call takes all rows of its windows.
    """

    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    source: Source
    parameters: int
    activations: int
    recurrent: tuple[tuple[int, int], ...]
    scan: ScanFacts | None
    no_scan: str
    max_lag: int | None
    selection: Selection
    smooth: bool
    operations: int
    dtype: str
    product: str = "jacobian"
    rows_of: RowsOf = "outputs"
    rows: int = 0
    row_shape: tuple[int, ...] = ()
    group: int = 0
    block_shape: tuple[int, ...] = ()
    points: int = 1
    indivisible: bool = False
    only_gradient: str = ""
    together: int | None = None
    linear: bool = True
    only_first: str = ""
    lost: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    packing: Packing | None = None
    no_pfor: str = ""

    @property
    def target_size(self) -> int:
        """Numbers of output per window."""
        return math.prod(self.target_shape)

    @property
    def turned_shape(self) -> tuple[int, ...]:
        """Of what products are turned by, one number for each of the target's; of a single number `(1,)`."""
        return self.target_shape or (1,)

    @property
    def has_loops_alone(self) -> bool:
        """Whether no recurrent layer with units is known, but loops, such as a SavedModel's."""
        own = self.recurrent[: len(self.recurrent) - len(self.source.loops)]
        return bool(own) and not any(units for _, units in own)

    @property
    def input_size(self) -> int:
        """Numbers of a window."""
        return math.prod(self.input_shape)

    @property
    def source_size(self) -> int:
        """Numbers that it is differentiated by, per window."""
        return self.source.size

    @property
    def row_size(self) -> int:
        return math.prod(self.row_shape)

    def windows_summed(self, samples: int) -> int:
        """Windows whose points go through calls of so many samples together: so many that the last call, which may be
        filled up, hardly counts.
        """
        return min(samples, -(-_CALLS_SUMMED * samples // self.points)) if self.points > 1 else samples

    @property
    def lags(self) -> int:
        """Steps of the source that derivatives keep."""
        steps = self.source.shape[0] if self.source.shape else 1
        return steps if self.max_lag is None else min(self.max_lag + 1, steps)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of one number's derivative by the source, as it is given and stored: the newest lags last."""
        return self.source.shape if self.max_lag is None else (self.lags, *self.source.shape[1:])

    @property
    def kept_size(self) -> int:
        return math.prod(self.kept_shape)

    @property
    def by_output_step(self) -> bool:
        """Whether lags count back from each output's own step, not from the window's last one."""
        every_step = self.scan is not None and self.scan.outputs > 0 and len(self.target_shape) == 2
        return every_step and self.max_lag is not None and self.rows_of == "outputs"

    @property
    def output_at(self) -> Sequence[int]:
        """The source's steps that outputs are of, where the model has one at each: rising."""
        chosen = self.selection.steps if len(self.target_shape) == 2 else self.selection.channels
        return range(self.source.shape[0]) if chosen is None else chosen

    def firsts(self, rows: int) -> Iterator[int]:
        """The first rows of calls of so many each, which do all; a group's last call overlaps the one before."""
        for begin in range(0, self.rows, self.group):
            yield from (begin + min(start, self.group - rows) for start in range(0, self.group, rows))

    def walk(self, rows: int) -> Walk:
        """How a scan walks back for so many rows a call."""
        steps, features = self.source.shape[0], self.source_size // self.source.shape[0]
        if self.scan is None:
            raise ValueError(f"no scan serves this model: {self.no_scan}")
        along = self.scan.outputs and self.rows_of == "outputs"
        if not along or (rows < self.target_size and not self.by_output_step):
            return Walk("whole", steps)
        at, count = self.output_at, rows // self.scan.outputs
        if not self.by_output_step:
            return of_all_lags(self.scan, steps, features, at)
        before = min(self.lags - 1, at[0] if count == len(at) else steps - count)
        return of_last_lags(self.scan, self.lags, features, count, before, apart=at[-1] - at[0] >= len(at))

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class ModelFacts(CallFacts):
    """The same with names: input `(lag, feature)` or flat, target `(output_step, output)`; what a plan needs.

    variables: of the store, the product first. labels: that the loss is of, where one is differentiated. at_steps:
    whether each output step is a step of the source: "causal" where it depends on inputs up to that step alone,
    "acausal" where it may depend on later ones, "no" for others, such as steps of the future.
    """

    length: int
    features: int
    output_steps: int
    outputs: tuple[str, ...]
    variables: tuple[Variable, ...]
    labels: Labels | None = None
    at_steps: AtSteps = "no"

    @property
    def step_lags(self) -> tuple[int, ...]:
        """How far each output's own step lies back from the source's last one; empty where outputs are not at steps."""
        return () if self.at_steps == "no" else tuple(self.source.shape[0] - 1 - step for step in self.output_at)

    @property
    def window_bytes(self) -> int:
        """Of one window in the store, before compression."""
        return sum(variable.size for variable in self.variables) * self.itemsize

    @property
    def target_dims(self) -> Dims:
        """Of a target in the store, with their sizes."""
        return tuple(zip(TARGET_DIMS, (self.output_steps, len(self.outputs)), strict=True))

    @property
    def source_dims(self) -> Dims:
        """Of a derivative by the source, with their sizes."""
        if self.source.kind == "input":
            lags = self.lags
            if len(self.source.shape) < 2:  # a flat window, or what is taken at its last step alone
                lags = self.length if self.source.size == self.length * self.features else 1
            return tuple(zip(INPUT_DIMS, (lags, self.kept_size // lags), strict=True))
        if self.source.kind == "weights":
            return tuple(zip(WEIGHTS_DIMS, (self.source_size,), strict=True))
        steps = self.lags if len(self.source.shape) > 1 else 1
        return tuple(zip(LAYER_DIMS, (steps, self.kept_size // steps), strict=True))

    @property
    def source_columns(self) -> slice:
        """Those of the features that the source has, where it is an input."""
        parts = [part for part in self.source.parts if part.steps is not None]
        return slice(parts[-1].start, parts[-1].stop) if parts else slice(0, self.features)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ModelFacts:
        content = {**_of_earlier_versions(content), **content}
        lists = {name: tuple(content[name]) for name in ("input_shape", "target_shape", "outputs", *_SHAPES)}
        lists |= {name: tuple(content.get(name, ())) for name in ("lost", "unreached")}
        lists["recurrent"] = tuple(map(tuple, content["recurrent"]))
        chosen = {name: None if part is None else tuple(part) for name, part in content["selection"].items()}
        source = Source.from_json(content["source"])
        known = {part.name for part in fields(ScanFacts)} == set(content["scan"] or ())
        scan = ScanFacts(**content["scan"]) if known else None
        if content["scan"] and not known:
            content["no_scan"] = _EARLIER
        own: dict[str, Any] = {
            "scan": scan,
            "selection": Selection(**chosen),
            "source": source,
            "variables": variables_of(content),
        }
        own |= {"packing": Packing.from_json(content.get("packing")), "labels": Labels.from_json(content.get("labels"))}
        return cls(**{**content, **lists, **own})

    def missing(self, survey: Survey) -> Gaps:
        """The steps for want of which windows are not computed."""
        return survey.gaps if self.labels is None else self.labels.missing(survey)


_CALLS_SUMMED = 8
_EARLIER = "a run of an earlier version"
_SHAPES = ("row_shape", "block_shape")


def _of_earlier_versions(content: dict[str, Any]) -> dict[str, Any]:
    """What runs from before there were products and sources have in common."""
    shape, target, max_lag = content["input_shape"], content["target_shape"], content.get("max_lag")
    kept = shape if max_lag is None else [min(max_lag + 1, shape[0]), *shape[1:]]
    size = math.prod(target)
    return {
        **{"scan": None, "no_scan": _EARLIER, "max_lag": None, "selection": {}},
        "source": {"kind": "input", "name": "input", "shape": shape},
        **{"rows": size, "group": size, "row_shape": kept, "block_shape": [*target, *kept]},
    }
