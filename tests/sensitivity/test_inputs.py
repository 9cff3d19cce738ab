"""Models of several inputs: every product by each of them, against float64 tapes; and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.declared import windows_taken
from sensitivity.errors import Refused
from sensitivity.loading import cast
from sensitivity.parts import Part, of_parts, put_in_parts
from sensitivity.sections import WindowsSection
from tests.conftest import worst

RANDOM = np.random.default_rng(5)
WEATHER = RANDOM.standard_normal((5, 6, 2)).astype("float32")
SITE = RANDOM.standard_normal((5, 3)).astype("float32")
GIVEN = {"weather": WEATHER, "site": SITE}
CLOSE = 1e-5


def two_inputs() -> keras.Model:
    """An LSTM of the weather with what a site is beside it at every step."""
    weather, site = keras.Input((6, 2), name="weather"), keras.Input((3,), name="site")
    states = layers.LSTM(3, return_sequences=True, name="inner")(weather)
    both = layers.Concatenate()([states, layers.RepeatVector(6)(site)])
    model = keras.Model([weather, site], layers.Dense(2)(layers.GRU(3, name="gru")(both)))
    random = np.random.default_rng(1)
    model.set_weights([random.uniform(-0.5, 0.5, weight.shape) for weight in model.get_weights()])
    return model


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return two_inputs()


@pytest.fixture(scope="module", params=GIVEN)
def wrt(request) -> str:
    return request.param


class Exact:
    """The model in float64 as a function of one input, the other as given."""

    def __init__(self, model: keras.Model, wrt: str) -> None:
        self.model, self.wrt, self.given = cast(model, "float64"), wrt, GIVEN[wrt].astype("float64")

    def call(self, source: tf.Tensor, windows: np.ndarray | None = None) -> tf.Tensor:
        which = np.arange(len(source)) if windows is None else windows
        every = {name: tf.constant(values[which], "float64") for name, values in GIVEN.items()}
        return self.model({**every, self.wrt: source})

    def jacobian(self, source: np.ndarray, windows: np.ndarray | None = None) -> np.ndarray:
        given = tf.constant(source)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(given)
            found = self.call(given, windows)
        return tape.batch_jacobian(found, given, experimental_use_pfor=False).numpy()

    @cached_property
    def by_source(self) -> np.ndarray:
        return self.jacobian(self.given)

    @cached_property
    def hessian(self) -> np.ndarray:
        """By central differences of gradients: `(batch, output, size, size)`."""
        count, size = len(self.given), self.given[0].size
        steps = 1e-5 * np.eye(size).reshape(size, 1, *self.given.shape[1:])
        again = np.tile(np.arange(count), size)
        ahead, behind = (
            self.jacobian((self.given + sign * steps).reshape(-1, *self.given.shape[1:]), again) for sign in (1, -1)
        )
        return np.einsum("inoj->noij", ((ahead - behind) / 2e-5).reshape(size, count, 2, size))


@pytest.fixture(scope="module")
def exact(model, wrt) -> Exact:
    return Exact(model, wrt)


def test_jacobian(model, wrt, exact):
    assert worst(sensitivity.jacobian(model, GIVEN, wrt=wrt), exact.by_source) < CLOSE


def test_inputs_in_order(model, wrt, exact):
    assert worst(sensitivity.jacobian(model, [WEATHER, SITE], wrt=wrt), exact.by_source) < CLOSE


def test_in_float64(model, wrt, exact):
    """Nothing on the way is rounded to single precision, where a layer is cut out, too."""
    given = {name: RANDOM.standard_normal(values.shape) for name, values in GIVEN.items()}
    source = tf.constant(given[wrt])
    for of, last in (("output", exact.model), ("gru", cut_at(exact.model, "gru"))):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(source)
            found = last({name: tf.constant(values) for name, values in given.items()} | {wrt: source})
        expected = tape.batch_jacobian(found, source, experimental_use_pfor=False).numpy()
        assert worst(sensitivity.jacobian(exact.model, given, wrt=wrt, of=of), expected) < 1e-12


def cut_at(model: keras.Model, name: str) -> keras.Model:
    return keras.Model(model.inputs, model.get_layer(name).output)


def test_vjp(model, wrt, exact):
    vectors = RANDOM.standard_normal((2, 2))
    found = sensitivity.vjp(model, GIVEN, vectors, wrt=wrt)
    assert worst(found, np.einsum("vo,no...->nv...", vectors, exact.by_source)) < CLOSE


def test_jvp(model, wrt, exact):
    directions = RANDOM.standard_normal((2, *GIVEN[wrt].shape[1:]))
    expected = np.einsum("nos,ds->nod", exact.by_source.reshape(5, 2, -1), directions.reshape(2, -1))
    assert worst(sensitivity.jvp(model, GIVEN, directions, wrt=wrt), expected) < CLOSE


def test_hessian(model, wrt, exact):
    found = sensitivity.hessian(model, GIVEN, wrt=wrt)
    assert found.shape == (5, 2, *GIVEN[wrt].shape[1:] * 2)
    assert worst(found.reshape(exact.hessian.shape), exact.hessian) < CLOSE


def test_hvp(model, wrt, exact):
    direction = RANDOM.standard_normal((1, *GIVEN[wrt].shape[1:]))
    expected = np.einsum("noij,j->noi", exact.hessian, direction.ravel())
    found = sensitivity.hvp(model, GIVEN, direction, wrt=wrt)
    assert worst(found.reshape(expected.shape), expected) < CLOSE


def test_gradient_norm(model, wrt, exact):
    expected = np.linalg.norm(exact.by_source.reshape(5, 2, -1), axis=-1)
    assert worst(sensitivity.gradient_norm(model, GIVEN, wrt=wrt), expected) < CLOSE


def test_gram(model, wrt, exact):
    rows = exact.by_source.reshape(5, 2, -1)
    assert worst(sensitivity.gram(model, GIVEN, wrt=wrt), np.einsum("noi,npi->nop", rows, rows)) < CLOSE


def test_integrated_gradients_add_up_with_the_other_input_as_it_is(model, wrt, exact):
    found, report = sensitivity.integrated_gradients(model, GIVEN, wrt=wrt, report=True)
    change = exact.call(tf.constant(exact.given)) - exact.call(tf.zeros_like(exact.given))
    assert report.beside["completeness_error"].max() <= 0.01
    assert worst(found.reshape(5, 2, -1).sum(-1), change.numpy()) < 0.01


def test_smooth_gradients(model, wrt, exact):
    found = sensitivity.smooth_gradients(model, GIVEN, wrt=wrt, noise=1e-6, samples=2)
    assert worst(found, exact.by_source) < CLOSE


def test_expected_gradients_of_one_baseline(model, wrt, exact):
    """One baseline has one share: a half."""
    baseline = np.ones_like(exact.given[:1])
    found = sensitivity.expected_gradients(model, GIVEN, baseline, wrt=wrt)
    middle = exact.jacobian(0.5 * (exact.given + baseline))
    assert worst(found, middle * (exact.given - baseline)[:, None]) < CLOSE


def test_the_newest_lags_of_one_input(model):
    every = sensitivity.jacobian(model, GIVEN, wrt="weather")
    assert worst(sensitivity.jacobian(model, GIVEN, wrt="weather", max_lag=2), every[:, :, -3:]) < CLOSE


def test_an_inner_layer(model):
    found = sensitivity.jacobian(model, GIVEN, wrt="inner")
    exact = cast(model, "float64")
    states = exact.get_layer("inner")(tf.constant(WEATHER, "float64"))
    rest = exact.layers[-3:]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(states)
        both = tf.concat([states, tf.repeat(tf.constant(SITE, "float64")[:, None], 6, 1)], -1)
        outputs = rest[2](rest[1](both))
    assert worst(found, tape.batch_jacobian(outputs, states, experimental_use_pfor=False).numpy()) < CLOSE


def test_of_an_inner_layer(model):
    """What comes before the site does not depend on it."""
    by_weather = sensitivity.jacobian(model, GIVEN, of="inner", wrt="weather")
    assert by_weather.shape == (5, 6, 3, 6, 2)
    assert np.abs(by_weather).max() > 0
    with pytest.raises(Refused, match="does not depend on it"):
        sensitivity.jacobian(model, GIVEN, of="inner", wrt="site")


def test_the_only_input_has_its_name():
    source = keras.Input((6, 2), name="rain")
    single = keras.Model(source, layers.Dense(1)(layers.Flatten()(source)))
    np.testing.assert_array_equal(
        sensitivity.jacobian(single, WEATHER, wrt="rain"), sensitivity.jacobian(single, WEATHER)
    )
    np.testing.assert_array_equal(sensitivity.jacobian(single, {"rain": WEATHER}, wrt="rain").shape, (5, 1, 6, 2))


@pytest.mark.parametrize("by", ["place", "key"])
@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_inputs_without_names_of_their_own(by):
    """Of a list they are called as their layers, of a dict by its keys, which need not be the tensors' names."""
    rain, sites = keras.Input((6, 2)), keras.Input((3,))
    joined = layers.Concatenate()([layers.LSTM(3)(rain), sites])
    given = [rain, sites] if by == "place" else {"rain": rain, "a site": sites}
    model = keras.Model(given, layers.Dense(2)(joined))
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((4, *part.shape[1:])).astype("float32") for part in (rain, sites)]
    windows = arrays if by == "place" else dict(zip(given, arrays, strict=True))
    name = model.layers[0].name if by == "place" else "rain"
    source, beside = map(tf.constant, arrays)
    with tf.GradientTape() as tape:
        tape.watch(source)
        found = model([source, beside] if by == "place" else {"rain": source, "a site": beside})
    assert worst(sensitivity.jacobian(model, windows, wrt=name), tape.batch_jacobian(found, source).numpy()) < 1e-5


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_an_inner_layer_of_a_model_with_keys_of_its_own():
    rain, sites = keras.Input((6, 2)), keras.Input((3,))
    inner = layers.Dense(4, name="inner")(layers.Concatenate()([layers.Flatten()(rain), sites]))
    model = keras.Model({"rain": rain, "site": sites}, layers.Dense(2)(inner))
    windows = {"rain": WEATHER, "site": WEATHER[:, :3, 0]}
    found = sensitivity.jacobian(model, windows, wrt="rain", of="inner")
    kernel = model.get_layer("inner").kernel.numpy()[:12]
    np.testing.assert_allclose(found.reshape(len(WEATHER), 4, 12)[0], kernel.T, rtol=1e-5)


def test_inputs_of_one_shape_keep_the_order_of_their_keys():
    second, first = keras.Input((6, 2), name="z"), keras.Input((6, 2), name="a")
    found = layers.Flatten()(second**2 - first)
    model = keras.Model(OrderedDict(z=second, a=first), found)
    windows = {"z": WEATHER, "a": WEATHER + 1}
    by_z = sensitivity.jacobian(model, windows, wrt="z").reshape(len(WEATHER), 12, 12)
    by_a = sensitivity.jacobian(model, windows, wrt="a").reshape(len(WEATHER), 12, 12)
    np.testing.assert_allclose(by_z, 2 * WEATHER.reshape(-1, 12, 1) * np.eye(12), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_a, np.broadcast_to(-np.eye(12), by_a.shape), atol=1e-6)


def test_numbers_of_classes_are_an_input_that_is_no_source():
    kind, weather = keras.Input((), dtype="int32", name="kind"), keras.Input((6, 2), name="weather")
    both = layers.Concatenate()([layers.Flatten()(weather), layers.Embedding(3, 2)(kind)])
    model = keras.Model({"kind": kind, "weather": weather}, layers.Dense(2, "tanh")(both))
    given = {"weather": WEATHER, "kind": np.array([0, 1, 2, 1, 0])}
    with pytest.raises(Refused, match="whole numbers"):
        sensitivity.jacobian(model, given, wrt="kind")
    source = tf.constant(WEATHER)
    with tf.GradientTape() as tape:
        tape.watch(source)
        outputs = model({"weather": source, "kind": tf.constant(given["kind"])})
    expected = tape.batch_jacobian(outputs, source).numpy()
    assert worst(sensitivity.jacobian(model, given, wrt="weather"), expected) < CLOSE


class Subclassed(keras.Model):
    """It declares no inputs."""

    def __init__(self):
        super().__init__()
        self.near, self.far = layers.Dense(2, "tanh"), layers.Dense(2)

    def call(self, inputs):
        recent, whole = inputs
        return self.near(keras.ops.reshape(recent, (-1, 4))) + self.far(whole[:, -1])


@pytest.mark.parametrize("several", [tuple, list])
def test_a_subclassed_model_takes_a_tuple(several):
    model = Subclassed()
    recent = WEATHER[:, -2:]
    found = sensitivity.jacobian(model, several([recent, WEATHER]), wrt="input_0")
    source = tf.constant(recent)
    with tf.GradientTape() as tape:
        tape.watch(source)
        outputs = model((source, tf.constant(WEATHER)))
    assert worst(found, tape.batch_jacobian(outputs, source).numpy()) < CLOSE


@pytest.mark.parametrize(
    ("given", "wrt", "said"),
    [
        ([WEATHER, SITE], "input", "several inputs[\\s\\S]*weather"),
        ({}, "weather", "inputs none"),
        ([WEATHER, [[1.0], [1.0, 2.0]]], "weather", "site"),
        (WEATHER, "weather", "2 inputs"),
        ({"weather": WEATHER}, "weather", "inputs weather"),
        ([WEATHER, SITE[:3]], "weather", "3 of site"),
        ([WEATHER, SITE[:, 0]], "weather", "as input 'site'"),
        ([WEATHER, SITE], "rain", "rain"),
    ],
)
def test_what_is_refused(model, given, wrt, said):
    with pytest.raises(Refused, match=said):
        sensitivity.jacobian(model, given, wrt=wrt)


def test_lags_of_what_has_no_steps_are_refused(model):
    with pytest.raises(Refused, match="without steps"):
        sensitivity.jacobian(model, GIVEN, wrt="site", max_lag=1)


def test_an_input_may_be_called_labels():
    labels, other = keras.Input((2,), name="labels"), keras.Input((3,), name="other")
    model = keras.Model([labels, other], layers.Dense(2, "tanh")(layers.Concatenate()([labels, other])))
    first, known = WEATHER[:, 0], WEATHER[:, 1]
    found = sensitivity.jacobian(model, [first, SITE], wrt="other", of="loss", labels=known, loss="mse")
    source = tf.constant(SITE)
    with tf.GradientTape() as tape:
        tape.watch(source)
        loss = tf.reduce_mean((model([tf.constant(first), source]) - known) ** 2, 1)
    assert worst(found, tape.gradient(loss, source).numpy()) < CLOSE


def test_numbers_that_would_be_rounded_are_refused():
    number, weather = keras.Input((1,), dtype="int64", name="number"), keras.Input((6, 2), name="weather")
    even = layers.Lambda(lambda n: keras.ops.cast(n % 2, "float32"))(number)
    model = keras.Model([number, weather], layers.Dense(1)(layers.Concatenate()([layers.Flatten()(weather), even])))
    numbers = np.arange(5)[:, None] + 2**24
    with pytest.raises(Refused, match=r"16,777,220[\s\S]*float64"):
        sensitivity.jacobian(model, {"number": numbers, "weather": WEATHER}, wrt="weather")


# ---- parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [np.asarray, tf.constant], ids=["numpy", "tensorflow"])
@pytest.mark.parametrize(
    "part",
    [
        Part("newest", 1, 3, (2, 2), steps=2),
        Part("last", 0, 1, (1,), steps=1),
        Part("all", 0, 4, (5, 4), steps=5),
        Part("flat", 1, 3, (10,), steps=5),
    ],
    ids=lambda part: part.name,
)
def test_a_part_is_cut_and_put_back(part: Part, convert: Callable):
    windows = convert(RANDOM.standard_normal((3, 5, 4)))
    values = convert(RANDOM.standard_normal((3, *part.shape)))
    changed = part.put(windows, values)
    np.testing.assert_array_equal(part.of(changed), values)
    back = part.put(changed, part.of(windows))
    np.testing.assert_array_equal(back, windows)


def test_a_part_of_a_part():
    windows = RANDOM.standard_normal((2, 12))
    whole, newest = Part("window", 1, 9, (4, 2)), Part("newest", 1, 2, (3, 1), steps=3)
    np.testing.assert_array_equal(of_parts(windows, [whole, newest]), windows[:, [4, 6, 8], None])
    changed = put_in_parts(windows, [whole, newest], np.zeros((2, 3, 1)))
    np.testing.assert_array_equal(changed, np.where(np.isin(np.arange(12), [4, 6, 8]), 0, windows))


# ---- in a job ----------------------------------------------------------------------------------------


def test_an_input_is_its_columns_of_the_newest_steps(model):
    columns = {"weather": ["rain", "heat"], "site": ["area", "slope", "height"]}
    length, shape, packing = windows_taken(model, WindowsSection(), 5, columns)
    assert (length, shape) == (6, (6, 5))
    assert packing is not None
    assert packing.inputs == (Part("weather", 0, 2, (6, 2), 6), Part("site", 2, 5, (3,), 1))


@pytest.mark.parametrize(
    ("columns", "length", "key"),
    [
        (None, None, "model.inputs"),
        ({"weather": ["rain", "heat"]}, None, "model.inputs"),
        ({"weather": ["rain"], "site": ["area", "slope", "height"]}, None, "model.inputs.weather"),
        ({"weather": ["rain", "heat"], "site": ["area"]}, None, "model.inputs.site"),
        ({"weather": ["rain", "heat"], "site": ["area", "slope", "height"]}, 5, "windows.length"),
        ({"weather": ["rain", "heat"], "site": ["area", "slope", "height"]}, 7, "windows.length"),
    ],
)
def test_columns_that_do_not_fit_are_refused(model, columns, length, key):
    with pytest.raises(Refused) as refusal:
        windows_taken(model, WindowsSection(length=length), 5, columns)
    assert refusal.value.key == key
