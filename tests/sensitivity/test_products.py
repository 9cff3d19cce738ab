"""Every product against float64 tapes, on models of each kind; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.errors import Refused
from sensitivity.loading import cast
from sensitivity.products.integrated_gradients import lobatto
from sensitivity.products.smooth_gradients import noise_of
from tests.conftest import in_training, sequential, tape_jacobian, worst

WINDOWS = np.random.default_rng(3).standard_normal((5, 6, 2)).astype("float32")
RANDOM = np.random.default_rng(4)
CLOSE = 1e-5


def two_outputs() -> keras.Model:
    inputs = keras.Input((6, 2))
    state = layers.GRU(3, name="inner")(inputs)
    model = keras.Model(
        inputs, {"flow": layers.Dense(1, name="flow")(state), "snow": layers.Dense(2, name="snow")(state)}
    )
    return with_weights(model)


def with_weights(model: keras.Model) -> keras.Model:
    random = np.random.default_rng(1)
    model.set_weights([random.uniform(-0.5, 0.5, weight.shape) for weight in model.get_weights()])
    return model


def flat(name: str) -> list:
    return [layers.Flatten(), layers.Dense(4, "tanh", name=name), layers.Dense(2)]


MODELS = {
    "dense": lambda: sequential((6, 2), *flat("inner")),
    "one output": lambda: sequential((6, 2), layers.Flatten(), layers.Dense(4, "tanh", name="inner"), layers.Dense(1)),
    "conv": lambda: sequential(
        (6, 2), layers.Conv1D(3, 3, activation="tanh", name="inner"), layers.Flatten(), layers.Dense(2)
    ),
    "lstm": lambda: sequential(
        (6, 2), layers.LSTM(4, return_sequences=True, name="inner"), layers.LSTM(3), layers.Dense(1)
    ),
    "every step": lambda: sequential((6, 2), layers.GRU(3, return_sequences=True, name="inner"), layers.Dense(2)),
    "bidirectional": lambda: sequential(
        (6, 2),
        layers.Bidirectional(layers.LSTM(2, return_sequences=True), name="inner"),
        layers.Flatten(),
        layers.Dense(1),
    ),
    "two outputs": two_outputs,
}


@dataclass(frozen=True)
class Reference:
    """A model, and its derivatives by float64 tapes."""

    model: keras.Model

    @cached_property
    def exact(self) -> keras.Model:
        return cast(self.model, "float64")

    def call(self, source: tf.Tensor, *, moved: tf.Tensor | None = None) -> tf.Tensor:
        """`(batch, *target)`, with what layer `inner` gives moved."""
        found = self.exact(source) if moved is None else source
        for layer in () if moved is None else self.exact.layers:
            found = layer(found) + moved if layer.name == "inner" else layer(found)
        return tf.concat(list(found.values()), -1)[:, None] if isinstance(found, dict) else found

    def jacobian(self, windows: np.ndarray = WINDOWS, *, inner: bool = False) -> np.ndarray:
        given = tf.constant(windows, "float64")
        shape = self.exact.get_layer("inner").output.shape[1:]
        source = tf.zeros((len(windows), *shape), "float64") if inner else given
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(source)
            found = self.call(given, moved=source) if inner else self.call(source)
            rows = tf.reshape(found, (len(windows), -1))
        derived = tape.batch_jacobian(rows, source, experimental_use_pfor=False)
        return derived.numpy().reshape(*found.shape, *source.shape[1:])

    @cached_property
    def target(self) -> tuple[int, ...]:
        return tuple(self.call(tf.constant(WINDOWS, "float64")).shape[1:])

    @cached_property
    def by_input(self) -> np.ndarray:
        return self.jacobian()

    @cached_property
    def hessian(self) -> np.ndarray:
        """By central differences of the gradients: to 1e-9 in float64."""
        steps = 1e-5 * np.eye(12).reshape(12, 1, 6, 2)
        ahead, behind = (
            self.jacobian((WINDOWS + sign * steps).reshape(60, 6, 2)).reshape(12, 5, -1, 12) for sign in (1, -1)
        )
        rows = np.einsum("jnri->nrij", (ahead - behind) / 2e-5)
        return rows.reshape(5, *self.target, 6, 2, 6, 2)


@pytest.fixture(scope="module", params=MODELS)
def reference(request) -> Reference:
    return Reference(MODELS[request.param]())


def test_vjp(reference):
    vectors = RANDOM.standard_normal((3, *reference.target))
    found = sensitivity.vjp(reference.model, WINDOWS, vectors)
    rows = reference.by_input.reshape(5, -1, 6, 2)
    assert worst(found, np.einsum("kr,nrlf->nklf", vectors.reshape(3, -1), rows)) < CLOSE
    found = sensitivity.vjp(reference.model, WINDOWS, "mean")
    assert worst(found[:, 0], rows.mean(1)) < CLOSE
    found = sensitivity.vjp(reference.model, WINDOWS, "last")
    last = reference.by_input[:, -1] if reference.target == (6, 2) else reference.by_input
    assert worst(found[:, 0], last.reshape(5, -1, 6, 2).sum(1)) < CLOSE


def test_vjp_by_vectors_of_each_window_on_the_kept_kernel(reference):
    sensitivity.vjp(reference.model, WINDOWS, np.ones((2, *reference.target)))
    vectors = RANDOM.standard_normal((5, 2, *reference.target))
    found, report = sensitivity.vjp(reference.model, WINDOWS, vectors, report=True)
    assert report.reused
    assert (
        worst(found, np.einsum("nkr,nrlf->nklf", vectors.reshape(5, 2, -1), reference.by_input.reshape(5, -1, 6, 2)))
        < CLOSE
    )


def test_jvp(reference):
    directions = RANDOM.standard_normal((2, 6, 2))
    found = sensitivity.jvp(reference.model, WINDOWS, directions)
    assert found.shape == (5, *reference.target, 2)
    assert worst(found, np.einsum("n...lf,klf->n...k", reference.by_input, directions)) < CLOSE


def test_gram(reference):
    found = sensitivity.gram(reference.model, WINDOWS)
    assert found.shape == (5, *reference.target, *reference.target)
    rows = reference.by_input.reshape(5, -1, 12)
    assert worst(found.reshape(5, *[rows.shape[1]] * 2), rows @ rows.swapaxes(1, 2)) < CLOSE


def test_gradient_norm(reference):
    found = sensitivity.gradient_norm(reference.model, WINDOWS)
    assert worst(found, np.sqrt((reference.by_input**2).sum((-1, -2)))) < CLOSE


def test_hessian(reference):
    found = sensitivity.hessian(reference.model, WINDOWS)
    assert found.shape == reference.hessian.shape
    assert worst(found, reference.hessian) < CLOSE
    square = found.reshape(5, -1, 12, 12)
    assert np.abs(square - square.swapaxes(-1, -2)).max() < 1e-6 * np.abs(square).max()


def test_hvp(reference):
    directions = RANDOM.standard_normal((2, 6, 2))
    found = sensitivity.hvp(reference.model, WINDOWS, directions)
    assert worst(found, np.einsum("n...lfmg,kmg->n...klf", reference.hessian, directions)) < CLOSE


def test_by_what_an_inner_layer_gives(reference):
    if len(reference.exact.outputs) > 1:
        found = sensitivity.jacobian(reference.model, WINDOWS, wrt="inner", of="flow")
        inner = keras.Model(reference.exact.inputs, reference.exact.get_layer("inner").output)
        kernel = reference.exact.get_layer("flow").kernel.numpy()  # the layer's own: linear in what it is given
        assert inner.output_shape == (None, 3)
        assert worst(found, np.broadcast_to(kernel.T, (5, 1, 3))) < CLOSE
        return
    assert worst(sensitivity.jacobian(reference.model, WINDOWS, wrt="inner"), reference.jacobian(inner=True)) < CLOSE


def test_of_what_an_inner_layer_gives(reference):
    inner = Reference(keras.Model(reference.model.inputs, reference.model.get_layer("inner").output))
    assert worst(sensitivity.jacobian(reference.model, WINDOWS, of="inner"), inner.jacobian()) < CLOSE


def test_integrated_gradients(reference):
    baseline = 0.1 * np.ones((6, 2))
    nodes, weights = lobatto(5)
    at = [reference.jacobian(baseline + node * (WINDOWS - baseline)) for node in nodes]
    change = (WINDOWS - baseline).reshape(5, *(1,) * len(reference.target), 6, 2)
    expected = change * sum(weight * part for weight, part in zip(weights, at, strict=True))
    found = sensitivity.integrated_gradients(reference.model, WINDOWS, baseline, steps=5)
    assert worst(found, expected) < CLOSE
    found, report = sensitivity.integrated_gradients(reference.model, WINDOWS, "mean", report=True)
    mean = np.broadcast_to(WINDOWS.mean((0, 1)), WINDOWS.shape)
    change = (reference.call(tf.constant(WINDOWS)) - reference.call(tf.constant(mean))).numpy()
    assert np.abs(found.sum((-1, -2)) - change).max() < 0.01 * np.abs(change).max()
    assert report.beside["completeness_error"].max() <= 0.01
    assert (report.beside["steps"] >= 8).all()


def test_smooth_gradients(reference):
    noise = noise_of(4, 0.5 * WINDOWS.std((0, 1)), 7, (6, 2))
    expected = np.mean([reference.jacobian(WINDOWS + one) for one in noise], 0)
    found = sensitivity.smooth_gradients(reference.model, WINDOWS, noise=0.5, samples=4, seed=7)
    assert worst(found, expected) < CLOSE


def test_expected_gradients(reference):
    baselines = RANDOM.standard_normal((6, 6, 2))
    shares = (np.random.default_rng(2).permutation(6) + 0.5) / 6
    rank = len(reference.target)
    terms = [
        (WINDOWS - baseline).reshape(5, *(1,) * rank, 6, 2)
        * reference.jacobian(baseline + share * (WINDOWS - baseline))
        for baseline, share in zip(baselines, shares, strict=True)
    ]
    found = sensitivity.expected_gradients(reference.model, WINDOWS, baselines, seed=2)
    assert worst(found, np.mean(terms, 0)) < CLOSE


def test_points_of_one_window_are_windows_of_a_call():
    model, random = MODELS["dense"](), np.random.default_rng(0)
    baselines = random.standard_normal((300, 6, 2)).astype("float32")
    whole, report = sensitivity.expected_gradients(model, WINDOWS[:1], baselines, report=True)
    assert report.setting.windows_per_call == 301
    assert worst(sensitivity.expected_gradients(model, WINDOWS, baselines)[:1], whole) < CLOSE
    _, report = sensitivity.integrated_gradients(model, WINDOWS[:1], steps=40, report=True)
    assert report.setting.windows_per_call == 40
    _, report = sensitivity.smooth_gradients(model, WINDOWS[:1], samples=40, report=True)
    assert report.setting.windows_per_call == 41


def test_nothing_is_its_own_baseline():
    model = sequential((5, 2), layers.LSTM(3))
    with pytest.raises(Refused, match="windows that are all the same"):
        sensitivity.expected_gradients(model, np.zeros((1, 5, 2)))


def test_expected_gradients_from_one_baseline_are_integrated_by_the_midpoint():
    reference = Reference(MODELS["dense"]())
    baseline = np.full((1, 6, 2), 0.2)
    expected = (WINDOWS - baseline)[:, None] * reference.jacobian((WINDOWS + baseline) / 2)
    assert worst(sensitivity.expected_gradients(reference.model, WINDOWS, baseline), expected) < CLOSE


# ---- closed forms, kernels and precision --------------------------------------------------------------


def test_of_a_linear_model_attributions_are_exact_and_the_hessian_is_zero():
    model = sequential((6, 2), layers.Flatten(), layers.Dense(1))
    weights = model.get_weights()[0].reshape(6, 2)
    assert np.abs(sensitivity.hessian(model, WINDOWS)).max() == 0
    found, report = sensitivity.integrated_gradients(model, WINDOWS, report=True)
    assert worst(found[:, 0], WINDOWS * weights) < 1e-6
    assert (report.beside["steps"] == 8).all()


def test_of_a_quadratic_model_the_hessian_is_its_matrix():
    matrix = np.random.default_rng(0).standard_normal((12, 12)).astype("float32")
    inputs = keras.Input((6, 2))
    form = layers.Lambda(lambda x: tf.einsum("ni,ij,nj->n", tf.reshape(x, (-1, 12)), matrix, tf.reshape(x, (-1, 12))))
    model = keras.Model(inputs, layers.Reshape((1,))(form(inputs)))
    found = sensitivity.hessian(model, WINDOWS).reshape(5, 12, 12)
    assert worst(found, np.broadcast_to(matrix + matrix.T, found.shape)) < 1e-6


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        *(("lstm", chosen) for chosen in ({}, {"max_lag": 2})),
        *(("every step", chosen) for chosen in ({}, {"max_lag": 2}, {"output_steps": [1, 4], "outputs": [1]})),
    ],
)
def test_the_scan_sums_outputs_by_vectors_on_its_way(name, chosen):
    model = MODELS[name]()
    vectors = np.random.default_rng(0).standard_normal((2, *((6, 2) if name == "every step" else (1,))))
    kept = vectors[:, [1, 4], 1:] if "output_steps" in chosen else vectors
    found = sensitivity.vjp(model, WINDOWS, kept, kernel="scan", **chosen)
    if "output_steps" in chosen:
        vectors = np.zeros_like(vectors)
        vectors[:, [1, 4], 1:] = kept
    rows = Reference(model).by_input.reshape(5, -1, 6, 2)
    expected = np.einsum("kr,nrlf->nklf", vectors.reshape(2, -1), rows)
    lags = chosen.get("max_lag", 5) + 1
    assert worst(found, expected[:, :, -lags:]) < CLOSE


@pytest.mark.parametrize("name", ["one output", "lstm"])
def test_a_float64_model_is_exact(name):
    model = cast(MODELS[name](), "float64")
    reference = Reference(model)
    assert worst(sensitivity.hessian(model, WINDOWS), reference.hessian) < 1e-6
    directions = np.ones((1, 6, 2))
    assert worst(sensitivity.jvp(model, WINDOWS, directions)[..., 0], reference.by_input.sum((-1, -2))) < 1e-10


def test_rows_of_a_hessian_are_computed_as_they_fit():
    reference = Reference(MODELS["dense"]())
    from sensitivity.engine import Tuned
    from sensitivity.model import described_call, shaped_call, target_of
    from sensitivity.products.hessian import Hessian
    from sensitivity.setting import Setting

    plain = described_call(reference.model, (6, 2), of="output", wrt="input", dtype="float32")
    target = target_of(reference.model, shaped_call(plain, Hessian()), "output", Hessian())
    engine = Tuned(target, Setting("batch_jacobian", 2, outputs_per_call=5))
    assert list(target.facts.firsts(5)) == [0, 5, 7, 12, 17, 19]
    assert worst(engine(WINDOWS)[1], reference.hessian) < CLOSE


def test_the_batch_jacobian_is_the_diagonal_of_the_full_one_and_there_is_none_where_samples_meet():
    """The cases of TensorFlow's guide to advanced automatic differentiation."""
    source = np.random.default_rng(0).standard_normal((7, 5)).astype("float32")
    model = sequential((5,), layers.Dense(8, "elu"), layers.Dense(6, "elu"))
    given = tf.constant(source)
    with tf.GradientTape() as tape:
        tape.watch(given)
        found = model(given)
    full = tape.jacobian(found, given).numpy()
    assert full.shape == (7, 6, 7, 5)
    assert worst(sensitivity.jacobian(model, source), np.einsum("bxby->bxy", full)) < CLOSE
    inputs = keras.Input((5,))
    hidden = in_training(layers.BatchNormalization(name="meeting"))(layers.Dense(8, "elu")(inputs))
    with pytest.raises(Refused, match="meeting"):
        sensitivity.jacobian(keras.Model(inputs, layers.Dense(6)(hidden)), source)


class Compiled(keras.Model):
    """Calls its layers in a function that keeps its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = layers.Dense(3, "tanh", name="inner"), layers.Dense(1)
        self.whole = tf.function(lambda windows: self.outer(self.inner(tf.reshape(windows, (-1, 12)))))

    def call(self, windows):
        return self.whole(windows)


def test_a_layer_in_a_function_of_its_own_is_no_source_and_no_silent_zero():
    with pytest.raises(Refused, match="of its own"):
        sensitivity.jacobian(Compiled(), WINDOWS, wrt="inner")
    with pytest.raises(Refused, match="of its own"):
        sensitivity.jacobian(Compiled(), WINDOWS, of="inner")


def test_a_layer_of_another_branch_is_no_silent_zero_either():
    with pytest.raises(Refused, match="does not depend on"):
        sensitivity.jacobian(two_outputs(), WINDOWS, of="flow", wrt="snow")


def test_a_variance_has_second_derivatives():
    """Those of `tf.nn.moments` hold the mean constant, and nested tapes with it: here are central differences."""
    model = sequential(
        (6, 2), layers.Flatten(), layers.Dense(5, name="inner"), layers.LayerNormalization(), layers.Dense(1)
    )
    reference = Reference(model)
    assert worst(sensitivity.hessian(model, WINDOWS), reference.hessian) < CLOSE
    direction = RANDOM.standard_normal((1, 6, 2))
    expected = np.einsum("nolfmg,dmg->nodlf", reference.hessian, direction)
    assert worst(sensitivity.hvp(model, WINDOWS, direction), expected) < CLOSE


def test_a_variance_that_holds_its_mean_constant_has_none():
    """`moments` by a name of its own stays TensorFlow's; a gradient that is stopped elsewhere is meant so."""
    own = tf.nn.moments

    def normalized(x):
        mean, variance = own(x, [1], keepdims=True)
        return (x - mean) / tf.sqrt(variance + 1)

    model = sequential((6, 2), layers.Flatten(), layers.Lambda(normalized), layers.Dense(1))
    assert worst(sensitivity.jacobian(model, WINDOWS), tape_jacobian(model, WINDOWS)) < CLOSE
    with pytest.raises(Refused, match=r"tf\.nn\.moments"):
        sensitivity.hessian(model, WINDOWS)
    named = sequential((6, 2), layers.Flatten(), layers.Lambda(lambda x: own(x, [1], name="stats")[1]))
    with pytest.raises(Refused, match=r"tf\.nn\.moments"):
        sensitivity.hessian(named, WINDOWS)
    stopped = layers.Lambda(lambda x: x * tf.stop_gradient(x))
    model = sequential((6, 2), layers.Flatten(), stopped, layers.Dense(1))
    assert np.abs(sensitivity.hessian(model, WINDOWS)).max() == 0


class Within(keras.Model):
    """Normalizes in a `tf.function` of its own, which keeps its traces."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)
        self.variance = tf.function(lambda x: tf.nn.moments(x, [1], keepdims=True)[1], autograph=False)

    def call(self, windows):
        return self.variance(self.dense(layers.Flatten()(windows)))


def test_a_variance_that_was_traced_before_has_none():
    model = Within()
    assert sensitivity.jacobian(model, WINDOWS).shape == (len(WINDOWS), 1, 6, 2)
    with pytest.raises(Refused, match=r"traced before|by a name of its own, or in a tf\.function"):
        sensitivity.hessian(model, WINDOWS)


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda model: sensitivity.vjp(model, WINDOWS, np.ones(2)), r"vectors[\s\S]*\(vector, 2\)"),
        (lambda model: sensitivity.vjp(model, WINDOWS, "most"), "vectors"),
        (lambda model: sensitivity.jvp(model, WINDOWS, np.ones((6, 2))), r"directions\[None\]"),
        (lambda model: sensitivity.jvp(model, WINDOWS, [["a"]]), "directions"),
        (lambda model: sensitivity.integrated_gradients(model, WINDOWS, "median"), "baseline"),
        (lambda model: sensitivity.integrated_gradients(model, WINDOWS, np.ones(2)), "baseline"),
        (lambda model: sensitivity.integrated_gradients(model, WINDOWS, steps=1), "steps"),
        (lambda model: sensitivity.integrated_gradients(model, WINDOWS, max_lag=2), "max_lag"),
        (lambda model: sensitivity.smooth_gradients(model, WINDOWS, wrt="inner"), "wrt"),
        (lambda model: sensitivity.smooth_gradients(model, WINDOWS, samples=0), "samples"),
        (lambda model: sensitivity.jacobian(model, WINDOWS, wrt="outer"), r"wrt[\s\S]*flatten[\s\S]*inner"),
        (lambda model: sensitivity.jacobian(model, WINDOWS, wrt="inner", max_lag=1), "max_lag"),
        (lambda model: sensitivity.jacobian(model, WINDOWS, of="outer"), r"of[\s\S]*inner"),
        (lambda model: sensitivity.hessian(model, WINDOWS, kernel="scan"), "kernel"),
        (lambda model: sensitivity.hessian(model, WINDOWS, kernel="forward"), "kernel"),
        (lambda model: sensitivity.hessian(model, WINDOWS, max_lag=1), "max_lag"),
    ],
)
def test_bad_requests_are_refused(call, what):
    with pytest.raises(Refused, match=what):
        call(MODELS["dense"]())
