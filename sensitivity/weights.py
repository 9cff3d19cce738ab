"""Weights as a source: which of them are meant, and the target where every sample has weights of its own.

A kernel needs a source that carries the batch axis. So the source is δ, zero: how far the weights W + δ of each sample
are from the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NoReturn

import numpy as np
import tensorflow as tf

from .errors import Refused, gist, suggested
from .facts import Source, Way, Weight
from .layers import LOOPS, as_graph, calls_wrapped, input_names, keras, nodes_of, steps_folded
from .packing import drawn, innermost
from .weighed import is_known, weighed

WEIGHTS = "weights"
_TOLERANCE = 1e-4  # of the largest entry of each weight
_ROUNDING = 1e-6  # of the largest of all
_SAMPLES = 3
_NAMES = 20  # that are listed
Function = Callable[[tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class _Owned:
    """name: `layer/variable`, after the models and layers around it. layer: whose call takes the variable."""

    name: str
    variable: keras.Variable
    layer: keras.Layer

    @property
    def weight(self) -> Weight:
        return Weight(self.name, tuple(self.variable.shape))


def is_weights(model: keras.Model, wrt: str) -> bool:
    """Whether `wrt` means weights of a model, as it is given. An input or a layer may be called so: then "weights:*"
    means them.
    """
    if wrt != WEIGHTS:
        return wrt.startswith(f"{WEIGHTS}:")
    given = innermost(model)
    return WEIGHTS not in (
        *input_names(given),
        *(layer.name for layer in given._flatten_layers(include_self=False)),
    )


def weights_named(model: keras.Model, wrt: str, target: Function, zeros: tf.Tensor) -> Source:
    """What "weights" or "weights:PATTERN" means for a target of windows such as `zeros`. Raises `Refused`."""
    found = tuple(one.weight for one in _matching(model, wrt)) or _none(model, wrt)
    shape = found[0].shape if len(found) == 1 else (sum(weight.size for weight in found),)
    source = Source("weights", wrt, shape, weights=found, way="one by one")
    return _fastest(model, source, target, drawn(model, tuple(zeros.shape[1:]), zeros.dtype.name, _SAMPLES))


def meant(model: keras.Model, wrt: str) -> tuple[str, ...]:
    """The names of weights that `wrt` means as long as none is frozen, or no longer."""
    return tuple(one.name for one in _matching(model, wrt)) if is_weights(model, wrt) else ()


# ---- names -------------------------------------------------------------------------------------------


def _trained(model: keras.Model) -> list[_Owned]:
    return [one for one in _owned(model) if one.variable.trainable]


def _matching(model: keras.Model, wrt: str) -> list[_Owned]:
    pattern = wrt.partition(":")[2] if ":" in wrt else "*"
    return [one for one in _trained(model) if any(fnmatchcase(one.name, p) for p in (pattern, f"{pattern}/*"))]


def _none(model: keras.Model, wrt: str) -> NoReturn:
    names = [one.name for one in _trained(model)]
    if not names:
        raise Refused(
            "sensitivity.wrt",
            given=f'"{wrt}" of a model that has no trainable weights with names',
            allowed="models of Keras layers that are trained",
            remedy="save the model as .keras, with its weights trainable",
        )
    known = [f"weights:{part}" for name in names for part in (name, name.partition("/")[0])]
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    raise Refused(
        "sensitivity.wrt",
        given=f'"{wrt}"',
        allowed='"weights", or "weights:" with a pattern of their names: ' + ", ".join(names[:_NAMES]) + more,
        remedy=suggested(wrt, known, 'name a layer ("weights:lstm") or a pattern ("weights:dense*/kernel")'),
    )


def _owned(model: keras.Model) -> list[_Owned]:
    """Weights that are trained or were, each once, in the model's order; a name that is there already gets a number."""
    found: dict[int, _Owned] = {}
    names: dict[str, int] = {}
    for one in _within(innermost(model), (), None):
        if id(one.variable) not in found:
            count = names[one.name] = names.get(one.name, 0) + 1
            found[id(one.variable)] = one if count == 1 else replace(one, name=f"{one.name}_{count}")
    return list(found.values())


def _within(layer: keras.Layer, path: tuple[str, ...], caller: keras.Layer | None) -> Iterator[_Owned]:
    for variable in layer._trainable_variables:
        if isinstance(variable, keras.Variable) and "float" in variable.dtype:
            yield _Owned("/".join((*path, variable.name)), variable, caller or layer)
    for inner in layer.layers if isinstance(layer, keras.Sequential) else layer._layers:
        if isinstance(layer, keras.layers.RNN) and not isinstance(inner, keras.layers.StackedRNNCells):
            yield from _within(inner, path, layer)  # a cell's weights are its layer's
        else:
            yield from _within(inner, (*path, inner.name), None)


# ---- the target ----------------------------------------------------------------------------------------


def with_own_weights(
    model: keras.Model,
    source: Source,
    target: Function,
    windows: tf.Tensor,
    by: tf.Tensor,
    *,
    shape: Sequence[int],
    order: int = 1,
) -> tf.Tensor:
    """The target `(batch, *shape)` where each sample's weights are `by` (batch, *source.shape) more.

    order: of the derivatives by it that are wanted, 1 or 2.
    """
    owned = {one.name: one for one in _owned(model)}
    own = [(owned[weight.name], part) for weight, part in zip(source.weights, _parts(source, by), strict=True)]
    if source.way == "together":
        return _together(target, own, windows, order)
    values = [tf.convert_to_tensor(one.variable.value) for one, _ in own]

    def of_one(given: tuple[tf.Tensor, ...]) -> tf.Tensor:
        window, *more = given
        moved = [value + tf.cast(part, value.dtype) for value, part in zip(values, more, strict=True)]
        with keras.StatelessScope(state_mapping=[(one.variable, w) for (one, _), w in zip(own, moved, strict=True)]):
            return target(window[None])[0]

    given = (windows, *(part for _, part in own))
    if windows.shape[0] == 1:
        return of_one(tuple(part[0] for part in given))[None]
    if source.way == "side by side":
        return tf.vectorized_map(of_one, given, fallback_to_while_loop=False)
    return tf.map_fn(of_one, given, fn_output_signature=tf.TensorSpec(shape, windows.dtype), parallel_iterations=1)


def _together(target: Function, own: list[tuple[_Owned, tf.Tensor]], windows: tf.Tensor, order: int) -> tf.Tensor:
    by_layer: dict[int, dict[str, tf.Tensor]] = {}
    layers = {id(one.layer): one.layer for one, _ in own}
    for one, part in own:
        by_layer.setdefault(id(one.layer), {})[one.variable.name] = part
    with calls_wrapped(list(layers.values()), lambda layer, call: weighed(layer, call, by_layer[id(layer)], order)):
        return target(windows)


def _parts(source: Source, by: tf.Tensor) -> list[tf.Tensor]:
    """`(batch, *source.shape)` → `(batch, *shape)` of each weight"""
    if len(source.weights) == 1:
        return [by]
    parts = tf.split(by, [weight.size for weight in source.weights], 1)
    return [tf.reshape(part, (-1, *weight.shape)) for part, weight in zip(parts, source.weights, strict=True)]


# ---- what serves -----------------------------------------------------------------------------------------


def _fastest(model: keras.Model, source: Source, target: Function, windows: tf.Tensor) -> Source:
    """With the first way that gives what samples give alone. Raises `Refused` where the target has no derivative."""
    vectors = tf.constant(np.random.default_rng(1).standard_normal(target(windows).shape), windows.dtype)
    pulled = _alone(model, source, target, windows, vectors)
    alone = tf.concat([pulled(windows[i : i + 1], vectors[i : i + 1]) for i in range(_SAMPLES)], 0)
    ways: list[Way] = []
    if all(is_known(one.layer) for one in _matching(model, source.name)):
        ways.append("together")
    if not any(node.op in LOOPS for node in nodes_of(pulled.graph.as_graph_def())):
        ways.append("side by side")
    for way in ways:
        own = replace(source, way=way)
        try:
            with _quietly():
                found = as_graph(_pulled(model, own, target))(windows, vectors)
        except Exception:  # whatever pfor, or a layer that is called out of its place, raises
            continue
        if _agree(source, found, alone):
            return own
    return source


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what pfor tells of operations that it cannot take."""
    logger = tf.get_logger()
    before = logger.disabled
    try:
        logger.disabled = True
        yield
    finally:
        logger.disabled = before


def _pulled(model: keras.Model, source: Source, target: Function) -> Callable[..., tf.Tensor | None]:
    """vectorsᵀ · ∂ target / ∂ weights: windows, vectors `(batch, *target_shape)` → `(batch, *source.shape)` or None."""

    def pulled(windows: tf.Tensor, vectors: tf.Tensor) -> tf.Tensor | None:
        by = tf.zeros((windows.shape[0], *source.shape), windows.dtype)
        with tf.GradientTape(watch_accessed_variables=False) as tape, steps_folded(model):
            tape.watch(by)
            outputs = with_own_weights(model, source, target, windows, by, shape=vectors.shape[1:])
        return tape.gradient(outputs, by, vectors)

    return pulled


def _alone(
    model: keras.Model, source: Source, target: Function, windows: tf.Tensor, vectors: tf.Tensor
) -> tf.types.experimental.ConcreteFunction:
    """The same of one sample. Refuses weights that the target does not depend on: all would be zero."""
    reason = "does not depend on them, or has no gradient by them"
    try:
        function = as_graph(_pulled(model, source, target)).get_concrete_function(windows[:1], vectors[:1])
        if function.structured_outputs is not None:
            return function
    except Exception as error:  # whatever a layer raises that is given tensors for its variables
        reason = f"cannot be given other weights ({gist(error)})"
    raise Refused(
        "sensitivity.wrt",
        given=f'"{source.name}", of a target that {reason}',
        allowed="weights on the way from the input to the target",
        remedy="name others, or another target",
    )


def _agree(source: Source, found: tf.Tensor, expected: tf.Tensor) -> bool:
    """Weight by weight."""
    rounding = _ROUNDING * _largest(expected.numpy())
    parts = ([part.numpy() for part in _parts(source, one)] for one in (found, expected))
    return all(
        np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * _largest(other) + rounding, equal_nan=True)
        for one, other in zip(*parts, strict=True)
    )


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
