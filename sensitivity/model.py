"""What a model maps windows to: shapes and names as facts, and the target as a function."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import tensorflow as tf

from .backward import backward
from .errors import Refused
from .fitness import Unfit
from .heads import Selection, heads, joined, labels, require_batched, require_floating, select, steps_and_channels
from .job import WindowsSection
from .layers import keras, steps_folded
from .precision import said
from .recurrence import Recurrence, recurrence
from .tracing import traced
from .walks import ScanFacts, Walk, of_all_lags, of_last_lags


@dataclass(frozen=True)
class CallFacts:
    """What a kernel needs to know of one call of the model.

    input_shape, target_shape: of one window and its target, without the batch axis, as the model has them.
    parameters: number of weights. activations: numbers that a forward pass computes for one window.
    recurrent: (steps, units) of each recurrent layer.
    scan: what walking back through a causal recurrent model takes; None for others, and `no_scan` says why.
    max_lag: the Jacobian is wanted of lags up to it alone; None: of all.
    selection: the outputs that it is wanted of, which `target_shape` is the shape of.
    smooth: the derivative has no jumps, as far as the graph's operations tell (a ReLU's has one).
    operations: in the graph of the forward pass; an unrolled loop has thousands.
    only_gradient, together, linear: what the backward pass allows, as `Backward` says.
    lost: what of the model as it was given is not kept, such as its half precision.
    """

    input_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
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
    only_gradient: str = field(default="", kw_only=True)
    together: int | None = field(default=None, kw_only=True)
    linear: bool = field(default=True, kw_only=True)
    lost: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def target_size(self) -> int:
        """Numbers of output per window: the rows of its Jacobian."""
        return math.prod(self.target_shape)

    @property
    def source_size(self) -> int:
        """Numbers of input per window: the columns of its Jacobian."""
        return math.prod(self.input_shape)

    @property
    def lags(self) -> int:
        """Lags that the Jacobian keeps."""
        return self.input_shape[0] if self.max_lag is None else min(self.max_lag + 1, self.input_shape[0])

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of one output's derivative, as it is given and stored: the newest lags last."""
        return self.input_shape if self.max_lag is None else (self.lags, *self.input_shape[1:])

    @property
    def kept_size(self) -> int:
        return math.prod(self.kept_shape)

    @property
    def by_output_step(self) -> bool:
        """Whether lags count back from each output's own step, not from the window's last one."""
        every_step = self.scan is not None and self.scan.outputs > 0 and len(self.target_shape) == 2
        return every_step and self.max_lag is not None

    @property
    def output_at(self) -> Sequence[int]:
        """The window's steps that outputs are of, where the model has one at each: rising."""
        chosen = self.selection.steps if len(self.target_shape) == 2 else self.selection.channels
        return range(self.input_shape[0]) if chosen is None else chosen

    def walk(self, rows: int) -> Walk:
        """How a scan walks back for so many outputs a call."""
        steps, features = self.input_shape[0], self.source_size // self.input_shape[0]
        if self.scan is None:
            raise ValueError(f"no scan serves this model: {self.no_scan}")
        if not self.scan.outputs or (rows < self.target_size and not self.by_output_step):
            return Walk("whole", steps)
        at, count = self.output_at, rows // self.scan.outputs
        if not self.by_output_step:
            return of_all_lags(self.scan, steps, features, at)
        before = min(self.lags - 1, at[0] if count == len(at) else steps - count)
        return of_last_lags(self.scan, self.lags, features, count, before, apart=at[-1] - at[0] >= len(at))

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ModelFacts(CallFacts):
    """The same with names: input `(lag, feature)` or flat, target `(output_step, output)`; what a plan needs."""

    length: int
    features: int
    output_steps: int
    outputs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ModelFacts:
        reason = "a run of an earlier version"
        content = {"scan": None, "no_scan": reason, "max_lag": None, "selection": {}, **content}
        lists = {name: tuple(content[name]) for name in ("input_shape", "target_shape", "outputs")}
        lists["recurrent"] = tuple(map(tuple, content["recurrent"]))
        lists["lost"] = tuple(content.get("lost", ()))
        chosen = {name: None if part is None else tuple(part) for name, part in content["selection"].items()}
        known = {part.name for part in fields(ScanFacts)} == set(content["scan"] or ())
        scan = ScanFacts(**content["scan"]) if known else None
        if content["scan"] and not known:
            content["no_scan"] = reason
        return cls(**{**content, **lists, "scan": scan, "selection": Selection(**chosen)})


@dataclass(frozen=True)
class Target:
    """What is differentiated: `target(windows (batch, *input_shape)) -> (batch, *target_shape)`."""

    model: keras.Model
    facts: CallFacts
    of: str = "output"

    @functools.cached_property
    def recurrence(self) -> Recurrence:
        """The model as one causal cell, proved once for all kernels of this target."""
        return recurrence(self.model, self.facts.input_shape, self.of, self.facts.dtype)

    def folded(self) -> contextlib.AbstractContextManager[None]:
        """Within, steps are samples of one batch to `TimeDistributed` layers, where gradients are linear: where one is
        clipped, it is clipped step by step.
        """
        return steps_folded(self.model) if self.facts.linear else contextlib.nullcontext()

    def __call__(self, windows: tf.Tensor) -> tf.Tensor:
        # No `training=`: it would override what a model was built with, and hide it from the audit.
        return self.facts.selection.of(joined(heads(self.model, self.model(windows), self.of)))


def describe(
    model: keras.Model,
    windows: WindowsSection,
    features: int,
    *,
    of: str = "output",
    dtype: str = "float32",
    **wanted: Any,
) -> ModelFacts:
    """The model's facts for windows of `features` columns. Raises `Refused` where model and windows disagree.

    wanted: `max_lag`, `output_steps` and `outputs`, as in a job file.
    """
    declared = _declared_input(model)
    length = _window_length(declared, windows, features)
    flat = declared is not None and len(declared) == 1
    call, steps, names = _run_once(model, (length * features,) if flat else (length, features), of, dtype, **wanted)
    chosen = call.selection
    outputs = names if chosen.channels is None else tuple(names[channel] for channel in chosen.channels)
    steps = steps if chosen.steps is None else len(chosen.steps)
    return ModelFacts(**vars(call), length=length, features=features, output_steps=steps, outputs=outputs)


def describe_call(model: keras.Model, input_shape: tuple[int, ...], *, of: str, dtype: str, **wanted: Any) -> CallFacts:
    """The facts of a call on `(batch, *input_shape)`, whatever its axes mean; `wanted` as for `describe`."""
    return _run_once(model, input_shape, of, dtype, **wanted)[0]


def _run_once(
    model: keras.Model,
    shape: tuple[int, ...],
    of: str,
    dtype: str,
    max_lag: int | None = None,
    output_steps: Any = None,
    outputs: Any = None,
) -> tuple[CallFacts, int, tuple[str, ...]]:
    """The facts, and all the steps and names of its outputs."""
    seen = traced(model, tf.zeros((2, *shape), dtype))
    found = heads(model, seen.output, of)
    require_floating(found)
    require_batched(found, 2)
    shapes = {name: steps_and_channels(head) for name, head in found.items()}
    steps = next(iter(shapes.values()))[0]
    names = labels({name: channels for name, (_, channels) in shapes.items()})
    selection = select(steps, names, output_steps, outputs)
    target_shape = tuple(selection.of(joined(found)).shape[1:])

    def target(windows: tf.Tensor) -> tf.Tensor:
        return selection.of(joined(heads(model, model(windows), of)))

    back = backward(model, target, shape, dtype, seen.operations)
    scan, no_scan = (None, back.only_gradient) if back.only_gradient else _scan(model, shape, of, dtype, target_shape)
    facts = CallFacts(
        input_shape=shape,
        target_shape=target_shape,
        scan=scan,
        no_scan=no_scan,
        max_lag=max_lag,
        selection=selection,
        parameters=model.count_params(),
        activations=seen.activations,
        recurrent=seen.recurrent,
        smooth=seen.smooth,
        operations=len(seen.operations),
        dtype=dtype,
        lost=said(model),
        **vars(back),
    )
    _require_lags(facts, steps)
    return facts, steps, names


def _require_lags(facts: CallFacts, output_steps: int) -> None:
    """Refuse a `max_lag` where lags have no meaning."""
    if facts.max_lag is None:
        return
    if len(facts.input_shape) < 2:
        raise Refused(
            "sensitivity.max_lag",
            given=f"{facts.max_lag}, and a model that takes a flat input",
            allowed="models that take (batch, lag, feature)",
            remedy="leave it out, or wrap the model in one that takes (lag, feature) and reshapes",
        )
    every_step = len(facts.target_shape) == 2 and output_steps == facts.input_shape[0] > 1
    if every_step and facts.scan is None:
        raise Refused(
            "sensitivity.max_lag",
            given=f"{facts.max_lag}, and a model whose outputs at every step may see later ones: {facts.no_scan}",
            allowed="models of recurrent layers going forward, or with outputs of one step",
            remedy="leave it out",
        )


def _scan(
    model: keras.Model, shape: tuple[int, ...], of: str, dtype: str, target_shape: tuple[int, ...]
) -> tuple[ScanFacts | None, str]:
    try:
        return recurrence(model, shape, of, dtype).facts(target_shape), ""
    except Unfit as reason:
        return None, str(reason)
    except Exception as error:  # whatever a user's layer raises when it is called out of its place
        return None, f"the model's graph cannot be taken apart ({type(error).__name__}: {str(error)[:100]})"


def _declared_input(model: keras.Model) -> tuple[int | None, ...] | None:
    """The shape of one window as the model declares it; None where a subclassed model declares nothing."""
    inputs = getattr(model, "inputs", None) or []
    if len(inputs) > 1:
        raise Refused(
            "model.path",
            given=f"a model with {len(inputs)} inputs",
            allowed="a model with one input, the window",
            remedy="wrap it in a model that holds the other inputs fixed",
        )
    if not inputs:
        return None
    if "float" not in inputs[0].dtype:
        raise Refused(
            "model.path",
            given=f"an input of {inputs[0].dtype}",
            allowed="floating-point inputs: there is no derivative by others",
            remedy="give the part of the model that begins with numbers, after a lookup or an embedding",
        )
    shape = tuple(inputs[0].shape[1:])
    if len(shape) not in (1, 2):
        raise Refused(
            "model.path",
            given=f"an input of shape {('batch', *shape)}",
            allowed="(batch, lag, feature), or (batch, lag × feature)",
            remedy="wrap the model in one that takes (lag, feature) and reshapes",
        )
    return shape


def _window_length(declared: tuple[int | None, ...] | None, windows: WindowsSection, features: int) -> int:
    length = windows.length
    if declared is None or (len(declared) == 2 and declared[0] is None):
        _refuse_features(declared, features)
        if length is None:
            raise Refused(
                "windows.length",
                given="nothing, and the model takes windows of any length",
                allowed="a whole number of steps",
                remedy="set windows.length to the length the model was trained on",
            )
        return length
    if len(declared) == 1:
        return _flat_length(declared[0], length, features)
    _refuse_features(declared, features)
    if length not in (None, declared[0]):
        raise Refused(
            "windows.length",
            given=length,
            allowed=f"{declared[0]}, the model's input length",
            remedy="set it so, or drop it",
        )
    return int(declared[0] or 0)


def _refuse_features(declared: tuple[int | None, ...] | None, features: int) -> None:
    if declared is not None and declared[-1] not in (None, features):
        raise Refused(
            "series.features",
            given=f"{features} features",
            allowed=f"{declared[-1]}, as the model takes",
            remedy="name the columns the model was trained on, in its order, as series.features",
        )


def _flat_length(size: int | None, length: int | None, features: int) -> int:
    if length is None and features == 1 and size is not None:
        return size
    if length is None or (size is not None and length * features != size):
        raise Refused(
            "windows.length",
            given=f"{length or 'nothing'} with {features} features",
            allowed=f"length × features = {size}, the size of the model's flat input (oldest step first)",
            remedy="set windows.length, and series.features to the columns the model was trained on",
        )
    return length
