"""What a model maps windows to: shapes and names as facts, and the target as a function."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from .backward import backward
from .declared import Columns, require_whole, windows_taken
from .dependence import require_dependence
from .errors import Refused
from .facts import CallFacts, ModelFacts, Source
from .fitness import Unfit
from .heads import heads, joined, labels, require_batched, require_floating, select, steps_and_channels
from .job import Job
from .labels import labels_of
from .layers import keras, moments_exact, outputs_of, steps_folded
from .own_steps import at_steps
from .packing import LOSS, Packing, as_text, innermost
from .precision import said
from .products.jacobian import Jacobian
from .products.product import Product
from .recurrence import Recurrence, recurrence
from .saved_models import SavedModel
from .sections import WindowsSection
from .sources import INPUT, given_by_layer, layer_named, moved, source_named, with_output
from .survey import Survey
from .tracing import no_pfor, traced
from .variables import PREDICTION, Variable
from .walks import ScanFacts
from .weights import is_weights, weights_named, with_own_weights


@dataclass(frozen=True)
class Target:
    """What is differentiated: `target(windows (batch, *input_shape)) -> (batch, *target_shape)`, and what of it is
    wanted.

    with_weight_sums: whether a kernel also gives sums of all weights, which tell whether they changed between calls.
    """

    model: keras.Model
    facts: CallFacts
    of: str = "output"
    product: Product = Jacobian()
    with_weight_sums: bool = False

    @functools.cached_property
    def recurrence(self) -> Recurrence:
        """The model as one causal cell, proved once for all kernels of this target."""
        return _recurrence(self.model, self.facts.source, self.of, self.facts.dtype, self.facts.input_shape)

    def folded(self) -> contextlib.AbstractContextManager[None]:
        """Within, steps are samples of one batch to `TimeDistributed` layers, where gradients are linear: where one is
        clipped, it is clipped step by step.
        """
        return steps_folded(self.model) if self.facts.linear else contextlib.nullcontext()

    def __call__(self, windows: tf.Tensor) -> tf.Tensor:
        return self.facts.selection.of(joined(heads(self.model, outputs_of(self.model, windows), self.of)))

    def start(self, given: Sequence[tf.Tensor]) -> tf.Tensor:
        """Where the source is: an input itself; else how far a layer's output, or weights, are moved: 0."""
        source = self.facts.source
        if source.kind == "input":
            return source.of(given[0])
        return tf.zeros((given[0].shape[0], *source.shape), given[0].dtype)

    def walked_from(self, given: Sequence[tf.Tensor]) -> tf.Tensor:
        """What a scan begins with, `(batch, *source)`: the input, or what the inner layer gives."""
        layer = _layer_of(self.model, self.facts.source)
        return self.facts.source.of(given[0]) if layer is None else given_by_layer(self.model, layer, given[0])

    def at(self, given: Sequence[tf.Tensor], source: tf.Tensor) -> tf.Tensor:
        """The target `(batch, *target_shape)` with the source there."""
        with moments_exact() if self.facts.rows_of == "derivatives" else contextlib.nullcontext():
            return self._at(given, source)

    def _at(self, given: Sequence[tf.Tensor], source: tf.Tensor) -> tf.Tensor:
        if self.facts.source.kind == "input":
            prediction = self(self.facts.source.substituted(given[0], source))
        elif self.facts.source.kind == "weights":
            facts = self.facts
            order = 2 if facts.rows_of == "derivatives" else 1
            prediction = with_own_weights(
                self.model, facts.source, self, given[0], source, shape=facts.target_shape, order=order
            )
        else:
            with moved(self.model, self.facts.source, source):
                prediction = self(given[0])
        # What a SavedModel gives has as many samples as it says: any number.
        known = prediction.shape.is_fully_defined()
        return prediction if known else tf.ensure_shape(prediction, (given[0].shape[0], *self.facts.target_shape))


def target_of(model: keras.Model, facts: CallFacts, of: str, product: Product | None = None) -> Target:
    """The target that `facts` describe."""
    return Target(wrapped_and_cut(model, facts.packing, of), facts, of, product or Jacobian())


def wrapped_and_cut(model: keras.Model, packing: Packing | None, of: str) -> keras.Model:
    """The model that takes such windows, as far as `of`."""
    return with_output(packing.wrapped(model) if packing else model, of)


def described(
    model: keras.Model,
    windows: WindowsSection,
    features: int,
    *,
    of: str = "output",
    wrt: str = INPUT,
    dtype: str = "float32",
    columns: Columns | None = None,
    spread: tuple[np.ndarray, np.ndarray] | None = None,
    **wanted: Any,
) -> ModelFacts:
    """The model's facts for windows of `features` columns, by the source `wrt`, before any product.

    columns: of each of several inputs. spread: mean and standard deviation of each column, as the model takes them,
    where known. wanted: `max_lag`, `output_steps` and `outputs`, as in a job file. Raises
    `Refused` where model and windows differ.
    """
    length, shape, packing = windows_taken(model, windows, features, columns)
    call, steps, names = _run_once(model, shape, of, wrt, dtype, packing=packing, **wanted)
    chosen = call.selection
    target = target_of(model, call, of)
    own = at_steps(target.model, of, target.at, call, steps, spread)
    outputs = names if chosen.channels is None else tuple(names[channel] for channel in chosen.channels)
    steps = steps if chosen.steps is None else len(chosen.steps)
    more: dict[str, Any] = {"length": length, "features": features, "output_steps": steps, "outputs": outputs}
    return ModelFacts(**vars(call), **more, variables=(), at_steps=own)


def described_job(model: keras.Model, job: Job, survey: Survey) -> ModelFacts:
    """The facts of a job's model, and of the loss where one is asked for, before any product. Raises `Refused`."""
    asked, windows, features = job.sensitivity, job.windows, len(survey.features)
    how: dict[str, Any] = {"dtype": job.run.dtype, "columns": job.model.inputs, "spread": _spread(job, survey)}
    if asked.of != LOSS or job.series.labels is None:
        found = described(model, windows, features, of=asked.of, wrt=asked.wrt, **how, **asked.selection)
        require_whole(model, found.packing.inputs if found.packing else (), survey, job)
        return found
    plain = described(model, windows, features, wrt=asked.wrt, **how)
    require_whole(model, plain.packing.inputs if plain.packing else (), survey, job)
    chosen = select(plain.output_steps, plain.outputs, asked.output_steps, asked.outputs)
    target = tuple(chosen.of(tf.zeros((1, *plain.target_shape))).shape[1:])
    labels = labels_of(job.series, asked, survey, plain, chosen, target)
    window, own, *weights = labels.parts
    packing = Packing(
        inputs=plain.packing.inputs if plain.packing else (),
        loss=as_text(asked.loss),
        window=window,
        labels=own,
        weights=weights[0] if weights else None,
        selection=chosen,
    )
    shape = (labels.parts[-1].stop,)
    call, _, names = _run_once(model, shape, LOSS, asked.wrt, job.run.dtype, asked.max_lag, packing=packing)
    return ModelFacts(
        **vars(call),
        length=plain.length,
        features=features,
        output_steps=1,
        outputs=names,
        variables=(),
        labels=labels,
    )


def _spread(job: Job, survey: Survey) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each column of the windows, as the model takes them."""
    mean, std = np.array(survey.mean), np.array(survey.std)
    scaling = job.series.scaling
    if scaling is not None:
        mean, std = (mean - np.array(scaling.mean)) / np.array(scaling.std), std / np.array(scaling.std)
    return mean, np.where(std > 0, std, 1.0)


def describe(
    model: keras.Model, windows: WindowsSection, features: int, *, product: Product | None = None, **wanted: Any
) -> ModelFacts:
    """The same with a product; None: the Jacobian."""
    return shaped(described(model, windows, features, **wanted), product or Jacobian())


def shaped(facts: ModelFacts, product: Product) -> ModelFacts:
    """The facts of a call with a product's rows and shapes, and what of it is stored. Raises `Refused`."""
    asked = product.shaped(facts)
    stored = (
        *product.variables(facts.target_dims, facts.source_dims),
        Variable("prediction", facts.target_dims, PREDICTION),
    )
    return replace(_scanned(asked), variables=(stored[0], stored[-1], *stored[1:-1]))


def described_call(
    model: keras.Model, input_shape: tuple[int, ...], *, of: str, wrt: str, dtype: str, **wanted: Any
) -> CallFacts:
    """The facts of a call on `(batch, *input_shape)`, whatever its axes mean, by the source `wrt`, before any product:
    see `described`.
    """
    return _run_once(model, input_shape, of, wrt, dtype, **wanted)[0]


def shaped_call(facts: CallFacts, product: Product) -> CallFacts:
    """The facts of a call with a product's rows and shapes. Raises `Refused`."""
    return _scanned(product.shaped(facts))


def _scanned(facts: Any) -> Any:
    """Without a scan, where there is none for such rows. Raises `Refused` where nothing serves."""
    needs_more = facts.rows_of in ("directions", "derivatives") or facts.indivisible
    reason = facts.only_gradient and f"plain gradients alone: {facts.only_gradient}" if needs_more else ""
    if not reason and facts.rows_of == "derivatives" and facts.only_first:
        reason = f"first derivatives alone: {facts.only_first}"
    if reason:
        raise Refused(
            "sensitivity.product",
            given=f'"{facts.product}" of a model that has {reason}',
            allowed="jacobian, vjp, gradient_norm and attributions",
            remedy="ask for one of these, or save the model as .keras",
        )
    if facts.rows_of in ("outputs", "vectors"):
        return facts
    return replace(facts, scan=None, no_scan="it gives first derivatives, row by row")


def _run_once(
    model: keras.Model,
    shape: tuple[int, ...],
    of: str,
    wrt: str,
    dtype: str,
    max_lag: int | None = None,
    output_steps: Any = None,
    outputs: Any = None,
    packing: Packing | None = None,
) -> tuple[CallFacts, int, tuple[str, ...]]:
    """The facts, and all the steps and names of its outputs."""
    zeros, given = tf.zeros((2, *shape), dtype), model
    model = wrapped_and_cut(model, packing, of)
    seen = traced(model, zeros)
    found = heads(model, seen.output, of)
    require_floating(found)
    require_batched(found, 2)
    shapes = {name: steps_and_channels(head) for name, head in found.items()}
    steps = next(iter(shapes.values()))[0]
    names = labels({name: channels for name, (_, channels) in shapes.items()})
    selection = select(steps, names, output_steps, outputs)
    target_shape = tuple(selection.of(joined(found)).shape[1:])

    def target(windows: tf.Tensor) -> tf.Tensor:
        return selection.of(joined(heads(model, outputs_of(model, windows), of)))

    unreached: tuple[str, ...] = ()
    back = backward(model, target, shape, dtype, seen.operations)
    if is_weights(given, wrt):
        source = weights_named(model, wrt, target, zeros)
    else:
        source = source_named(model, wrt, zeros, given, packing)
        unreached = require_dependence(model, source, of, zeros, selection.heads(shapes), seen)
    scan, no_scan = None, back.only_gradient
    if not back.only_gradient:
        scan, no_scan = _scan(model, source, of, dtype, shape, target_shape)
    facts = Jacobian().shaped(
        CallFacts(
            input_shape=shape,
            target_shape=target_shape,
            source=source,
            scan=scan,
            no_scan=no_scan,
            max_lag=max_lag,
            selection=selection,
            parameters=model.count_params(),
            activations=seen.activations,
            recurrent=(*seen.recurrent, *source.loops),
            smooth=seen.smooth,
            operations=len(seen.operations),
            dtype=dtype,
            lost=said(given),
            unreached=unreached,
            no_pfor=no_pfor(seen),
            packing=packing,
            **vars(back),
        )
    )
    _require_lags(facts, steps)
    return facts, steps, names


def _require_lags(facts: CallFacts, output_steps: int) -> None:
    """Refuse a `max_lag` where lags have no meaning."""
    if facts.max_lag is None:
        return
    if facts.source.kind != "input":
        raise Refused(
            "sensitivity.max_lag",
            given=f'{facts.max_lag}, and derivatives by "{facts.source.name}"',
            allowed='lags of the input: wrt = "input"',
            remedy="leave it out",
        )
    if len(facts.source.shape) < 2:
        raise Refused(
            "sensitivity.max_lag",
            given=f"{facts.max_lag}, and a flat input, without steps",
            allowed="models that take (batch, lag, feature)",
            remedy="leave it out, or wrap the model in one that takes (lag, feature) and reshapes",
        )
    length = facts.source.shape[0]
    if facts.max_lag >= length:
        raise Refused(
            "sensitivity.max_lag",
            given=f"{facts.max_lag}, and windows of {length} steps",
            allowed=f"0 to {length - 1}, the oldest lag of a window",
            remedy="leave it out to keep all lags, or give longer windows",
        )
    every_step = len(facts.target_shape) == 2 and output_steps == facts.source.shape[0] > 1
    if every_step and facts.scan is None:
        raise Refused(
            "sensitivity.max_lag",
            given=f"{facts.max_lag}, and a model whose outputs at every step may see later ones: {facts.no_scan}",
            allowed="models of recurrent layers going forward, or with outputs of one step",
            remedy="leave it out",
        )


def _layer_of(model: keras.Model, source: Source) -> keras.Layer | None:
    """The inner layer that is a source."""
    return layer_named(model, source.name, "sensitivity.wrt", also="") if source.kind == "layer" else None


def _recurrence(model: keras.Model, source: Source, of: str, dtype: str, window: tuple[int, ...]) -> Recurrence:
    return recurrence(model, source.shape, of, dtype, _layer_of(model, source), name=source.name, window=window)


def _scan(
    model: keras.Model,
    source: Source,
    of: str,
    dtype: str,
    window: tuple[int, ...],
    target_shape: tuple[int, ...],
) -> tuple[ScanFacts | None, str]:
    if source.kind == "weights":
        return None, "it gives derivatives by the input, or by what a layer gives"
    if isinstance(innermost(model), SavedModel):
        return None, "a SavedModel has no layers to walk through"
    try:
        return _recurrence(model, source, of, dtype, window).facts(target_shape), ""
    except Unfit as reason:
        return None, str(reason)
    except Exception as error:  # whatever a user's layer raises when it is called out of its place
        return None, f"the model's graph cannot be taken apart ({type(error).__name__}: {str(error)[:100]})"
