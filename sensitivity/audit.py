"""Proofs on the model before a run: Jacobians of single windows exist, and the kernel computes them.

`batch_jacobian` gives numbers for any model, and they mean nothing where the samples of a batch influence
each other or where the model answers differently each time. `audit` refuses such a model with the layer's
name, and then compares the kernel with an independent vector-Jacobian product and with a central
difference in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .errors import Refused, gist
from .heads import require_batched
from .layers import as_graph, calls_wrapped, leaf_layers, steps_folded
from .loading import cast
from .model import Target
from .packing import LOSS, innermost, rewrapped
from .probes import TOLERANCE, Probe, Seen, contracted, jvp, last_rows, relative_error, require_agreement

SAMPLES = 5
COUPLING_TOLERANCE = 1e-6
TINY = 1e-30
_HALF = 0.05  # of the largest number, where they are of half precision
_FEW_STEPS = 50  # that Keras calls one by one
_STEP = 1e-5  # of a central difference in float64, in units of each input's spread


@dataclass(frozen=True)
class Audit:
    """Figures of one audit, each relative to the largest entry compared.

    predict_error: the kernel's predictions against what `model.predict` computes; None where an inner layer is the
    target, and where `predict` fails outside of a graph, which `predict_failed` says.
    vjp_error, jvp_error: kernel against plain products with random vectors in the run's dtype; the second is None
    where an operation has no forward mode, and for products that are no Jacobian.
    difference_error: kernel against a central difference in float64; None where the model has no float64 twin, and
    where the product is no derivative.
    A large one of the last two is reported, not refused: a model may replace its gradient on purpose.
    largest: the Jacobian's largest finite entry on these windows. not_finite: entries that are NaN or infinite.
    """

    predict_error: float | None
    vjp_error: float
    jvp_error: float | None
    difference_error: float | None
    largest: float
    not_finite: int
    predict_failed: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def audit(target: Target, kernel: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], windows: np.ndarray) -> Audit:
    """Compare `kernel` with independent products on a few real windows `(n, …)`, n ≥ 1. Raises `Refused`.

    The model is one that `require_independent` lets pass: products cannot tell a Jacobian that is meaningless.
    """
    samples = few(windows).reshape(-1, *target.facts.input_shape)
    seen = Seen.of(target.facts, len(samples))
    with failures_refused("differentiated"):
        predictions, derived = kernel(samples)
        probe = Probe.of(target, samples)
    predict_error, predict_failed = require_as_predicted(target, samples, predictions)
    vjp_error = probe.error(derived)
    require_agreement(f"a {target.product.name}", vjp_error)
    rows = seen.rows(derived)
    is_jacobian = target.product.is_linear and target.facts.rows_of == "outputs"
    jvp_error = _jvp_error(target, samples, rows, seen) if is_jacobian else None
    finite = np.abs(derived[np.isfinite(derived)])
    difference = None
    if target.product.is_linear:
        difference = _difference_error(target, samples, probe.vectors, contracted(probe.vectors, rows), seen)
    largest, not_finite = float(finite.max(initial=0.0)), int(derived.size - finite.size)
    return Audit(predict_error, vjp_error, jvp_error, difference, largest, not_finite, predict_failed)


def few(windows: np.ndarray) -> np.ndarray:
    """`SAMPLES` windows spread over those given; where there are fewer, repeated with a little noise."""
    picked = np.ascontiguousarray(windows[np.linspace(0, len(windows) - 1, SAMPLES).round().astype(int)])
    if len(np.unique(_flat(picked), axis=0)) == SAMPLES:
        return picked
    return (picked + 0.01 * _spread(picked) * _noise(picked.shape)).astype(windows.dtype)


def require_independent(target: Target, samples: np.ndarray) -> None:
    """Refuse a model that is stateful, that answers differently each time, or whose samples influence each other.

    samples: `SAMPLES` windows, no two the same. One is exchanged for another: the others' outputs must not move.
    """
    require_stateless(target.model)
    with failures_refused("called"):
        layers = _Layers(target)
        first = layers(samples)
        require_batched({target.of: first[-1]}, SAMPLES)
        for again in (layers, _Layers(target)):  # in a graph of its own, too: a layer may draw while it is traced
            _require_same(layers.names, first, again(samples), slice(None), _DIFFERENT, _RANDOM)
        for sample in range(SAMPLES):
            moved = samples.copy()
            moved[sample] = samples[(sample + 1) % SAMPLES]
            others = np.delete(np.arange(SAMPLES), sample)
            _require_same(layers.names, first, layers(moved), others, _INFLUENCE, _COUPLED)
        _require_foldable(target, samples)


# ---- what `model.predict` computes -------------------------------------------------------------------


def require_as_predicted(
    target: Target, samples: np.ndarray, found: np.ndarray | None = None
) -> tuple[float | None, str]:
    """How far predictions are from what `model.predict` gives for the samples, by the largest entry; None where that is
    not known, and why. Raises `Refused` where they differ.

    found: predictions of the samples `(sample, *target_shape)`; None: what the target gives.
    """
    if target.of not in ("output", LOSS, *(getattr(innermost(target.model), "output_names", None) or [])):
        return None, ""
    twin = replace(target, model=rewrapped(target.model, _Predicting))
    try:
        expected = twin(tf.constant(samples)).numpy()
    except Exception as failure:  # a model of a graph alone: what it raises outside of one is its own
        return None, gist(failure)
    found = as_graph(target)(tf.constant(samples)).numpy() if found is None else found
    error = relative_error(found.reshape(expected.shape), expected)
    if error > TOLERANCE:
        raise Refused(
            "model.path",
            given=f"a model whose call differs from its predict by {error:.1e} of the largest prediction",
            allowed=f"models whose call and predict agree to {TOLERANCE:.0e}, as the call is differentiated",
            remedy="move what predict or predict_step adds into the model's call",
        )
    return error, ""


def predicts_in_its_own_way(model: keras.Model, *parts: str) -> bool:
    """Whether the model's class has a `predict`, or one of the `parts` of it, that is not Keras' own."""
    parts = ("predict", "make_predict_function", *parts)
    return any(getattr(type(model), part) is not getattr(keras.Model, part) for part in parts)


class _Predicting:
    """A model that gives what its `predict` gives, outside of graphs. Keras' own `predict` is its `predict_step`, which
    costs less when it is called alone.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def __call__(self, windows: Any, training: bool = False) -> Any:
        if not predicts_in_its_own_way(self._model):
            return self._model.predict_step((windows,))
        given = keras.tree.map_structure(lambda part: part.numpy(), windows)
        return keras.tree.map_structure(tf.constant, self._model.predict(given, verbose=0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextlib.contextmanager
def failures_refused(what: str) -> Iterator[None]:
    """What a model raises on its own series is the model's fault, and no traceback of ours."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            "model.path",
            given=f"a model that fails when {what} on windows of the series ({gist(error)})",
            allowed="a model that takes the windows of its series and has a gradient there",
            remedy="check the series against what the model was trained on, series.scaling first",
            in_python="check these windows against what the model was trained on, their scale first",
        ) from error


_DIFFERENT = "answers differently each time it is called"
_INFLUENCE = "lets the samples of a batch influence each other"
_RANDOM = "call dropout and noise layers without training=True"
_COUPLED = (
    "let the layer work on each sample alone: BatchNormalization without training=True, "
    "no reduction over the batch axis"
)


def require_stateless(model: keras.Model) -> None:
    """Refuse a model with a layer that is built to remember earlier batches."""
    for layer in leaf_layers(model):
        if getattr(layer, "stateful", False):
            raise _refused(
                f"layer {layer.name!r}",
                "keeps its state from one batch to the next",
                "build the layer with stateful=False",
            )


def _require_same(
    names: list[str], one: list[np.ndarray], other: list[np.ndarray], rows: Any, what: str, remedy: str
) -> None:
    """Refuse when the model's output (the last entry) moved; name the first layer that put out something else."""
    if not _moved(one[-1], other[-1], rows):
        return
    culprits = [name for name, a, b in zip(names, one, other, strict=False) if _moved(a, b, rows)]
    raise _refused(culprits[0], what, remedy)


def _moved(one: np.ndarray, other: np.ndarray, rows: Any) -> bool:
    if one.shape != other.shape:
        return True
    if one.ndim == 0 or len(one) != SAMPLES or one.dtype.kind != "f":
        return False
    if (np.isnan(one[rows]) != np.isnan(other[rows])).any():
        return True
    scale = max(float(np.nanmax(np.abs(one), initial=0.0)), TINY)
    return bool(np.nanmax(np.abs(one[rows] - other[rows]), initial=0.0) > COUPLING_TOLERANCE * scale)


class _Layers:
    """A target as one graph that tells what goes into and comes out of every layer, in the order of calls.

    names: of these values, and of the target itself, the last.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.names: list[str] = []
        self._function = as_graph(self._traced)

    def __call__(self, samples: np.ndarray) -> list[np.ndarray]:
        return [value.numpy() for value in self._function(tf.constant(samples))]

    def _traced(self, samples: tf.Tensor) -> list[tf.Tensor]:
        self.names, values = [], []

        def record(name: str, found: Any) -> None:
            for part in keras.tree.flatten(found):
                if _is_of(part, samples.graph) and part.dtype.is_floating:
                    self.names.append(name)
                    values.append(part)

        def wrap(layer: keras.Layer, call: Any) -> Any:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                record(f"something before layer {layer.name!r}", args)
                result = call(*args, **kwargs)
                record(f"layer {layer.name!r}", result)
                return result

            return recorded

        with self._target.folded(), calls_wrapped(leaf_layers(self._target.model), wrap):
            final = self._target(samples)
        self.names.append(f"model {self._target.model.name!r}")
        return [*values, final]


def _require_foldable(target: Target, samples: np.ndarray) -> None:
    """Refuse a `TimeDistributed` layer that gives something else where all steps are samples of one batch."""
    folded = [layer for layer in leaf_layers(target.model) if type(layer) is keras.layers.TimeDistributed]
    called: list[tuple[keras.Layer, Any]] = []

    def traced(samples: tf.Tensor) -> list[tuple[Any, ...]]:
        values = []
        called.clear()

        def wrap(layer: keras.Layer, call: Any) -> Any:
            def noted(inputs: tf.Tensor, training: Any = None, mask: Any = None) -> tf.Tensor:
                result = call(inputs, training=training, mask=mask)
                if _is_of(result, samples.graph):
                    called.append((layer, training))
                    values.append(tuple(x if x is None else x[:, :_FEW_STEPS] for x in (inputs, mask, result)))
                return result

            return noted

        with steps_folded(target.model), calls_wrapped(folded, wrap):
            target(samples)
        return values

    values = as_graph(traced)(tf.constant(samples)) if folded and target.facts.linear else []
    for (layer, training), (inputs, mask, found) in zip(called, values, strict=True):
        alone = type(layer).call(layer, inputs, training=training, mask=mask)
        tolerance = TOLERANCE if found.dtype.size > 2 else _HALF
        if not relative_error(found.numpy().astype(float), alone.numpy().astype(float)) <= tolerance:
            raise _refused(f"layer {layer.name!r}", _INFLUENCE, _COUPLED)


def _is_of(part: Any, graph: Any) -> bool:
    """Whether it is a tensor of that graph, and of none within, such as a loop's."""
    return isinstance(part, tf.Tensor) and getattr(part, "graph", None) is graph


def _refused(culprit: str, what: str, remedy: str) -> Refused:
    return Refused(
        "model.path",
        given=f"{culprit} {what}",
        allowed="models that map each window to its output alone, the same each time",
        remedy=remedy,
    )


def _jvp_error(target: Target, samples: np.ndarray, rows: np.ndarray, seen: Seen) -> float | None:
    """Of the kernel's product with a random direction, in units of each input's spread; None without forward mode.

    rows: `(sample, target_size, kept_size)`.
    """
    if not target.facts.linear:
        return None
    direction = seen.directions(_direction(target, samples, seed=2).astype(samples.dtype))
    try:
        expected = _flat(seen.vectors(jvp(target, samples, direction)))
    except Exception:  # an operation that has a gradient and no forward mode: each says so in words of its own
        return None
    return relative_error(np.einsum("nrs,ns->nr", rows, seen.steps(direction)), expected)


def _difference_error(
    target: Target, samples: np.ndarray, vector: np.ndarray, product: np.ndarray, seen: Seen
) -> float | None:
    """vectorᵀ · Jacobian · direction against (f(x + h·direction) − f(x − h·direction)) / 2h in float64.

    The median over samples: a kink of a ReLU between the two points spoils one sample, a wrong Jacobian all.
    """
    try:
        facts = replace(target.facts, dtype="float64", source=target.facts.source.alone)
        twin = replace(target, model=cast(target.model, "float64"), facts=facts)
        direction = seen.directions(_direction(target, samples, seed=1))
        given = [tf.constant(part, "float64") for part in (samples, *target.product.beside(facts, len(samples)))]

        def moved(step: tf.Tensor, *given: tf.Tensor) -> tf.Tensor:
            return last_rows(twin, given, twin.product.source(twin, given) + step * direction)

        with steps_folded(twin.model):
            call = as_graph(moved)
            ahead, behind = (call(tf.constant(sign * _STEP, "float64"), *given).numpy() for sign in (1, -1))
    except Exception:  # no float64 twin: a custom class, or an op without a float64 kernel
        return None
    expected = _flat((ahead - behind) * _flat(vector)).sum(axis=1) / (2 * _STEP)
    found = (product * seen.steps(direction)).sum(axis=1)
    scale = float(np.abs(expected).max()) or 1.0
    error = float(np.median(np.abs(found - expected)) / scale)
    return error if np.isfinite(error) else None


def _direction(target: Target, samples: np.ndarray, seed: int) -> np.ndarray:
    """At random, `(sample, …)` as what rows are differentiated by: of the input in units of each one's spread."""
    facts, random = target.facts, np.random.default_rng(seed)
    if facts.rows_of == "directions":
        return random.standard_normal((len(samples), *facts.turned_shape))
    noise = random.standard_normal((len(samples), *facts.source.shape))
    return _spread(facts.source.of(samples)) * noise if facts.source.kind == "input" else noise


def _spread(samples: np.ndarray) -> np.ndarray:
    """Each feature's standard deviation over the samples `(feature)`, 1 where it does not vary."""
    axes = tuple(range(samples.ndim - 1))
    std = samples.astype(np.float64).std(axis=axes)
    return np.where(std > 0, std, 1.0)


def _noise(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(2).standard_normal(shape)


def _flat(array: np.ndarray) -> np.ndarray:
    """`(sample, …)` → `(sample, all the rest)`."""
    return array.reshape(len(array), -1)
