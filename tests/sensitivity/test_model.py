from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sensitivity.errors import Refused
from sensitivity.facts import ModelFacts
from sensitivity.loading import cast, load_file, load_model
from sensitivity.model import Target, describe
from sensitivity.sections import ModelSection, WindowsSection
from tests.conftest import sequential
from tests.describing import describe_call

MODULE = """
import keras
from keras import layers

class Twice(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.hidden = layers.Dense(units)
        self.flat = layers.Flatten()
    def call(self, windows):
        return 2 * self.flat(self.hidden(windows))

def subclassed():
    return Twice(3)

def nothing():
    return None

def broken():
    raise OSError("no weights here")
"""


def lstm(**options):
    return sequential((None, 3), layers.LSTM(4, **options), layers.Dense(2))


@pytest.mark.parametrize(
    ("model", "length", "shape", "steps", "outputs"),
    [
        (lambda: lstm(), 5, (5, 3), 1, ("output_0", "output_1")),
        (lambda: lstm(return_sequences=True), 5, (5, 3), 5, ("output_0", "output_1")),
        (lambda: sequential((4, 3), layers.Flatten(), layers.Dense(1)), None, (4, 3), 1, ("output",)),
        (lambda: sequential((12,), layers.Dense(1)), 4, (12,), 1, ("output",)),
        (lambda: sequential((4, 3), layers.Flatten(), layers.Dense(1), layers.Reshape(())), 4, (4, 3), 1, ("output",)),
    ],
)
def test_shapes_and_names(model, length, shape, steps, outputs):
    facts = describe(model(), WindowsSection(length=length), 3)
    assert (facts.input_shape, facts.output_steps, facts.outputs) == (shape, steps, outputs)
    assert facts.target_size == steps * len(outputs)
    assert ModelFacts.from_json(facts.to_json()) == facts


def two_headed(steps: int | None = None):
    source = keras.Input((4, 3))
    hidden = layers.LSTM(3, return_sequences=steps is not None)(source)
    last = layers.Flatten()(source)
    return keras.Model(
        source, {"flow": layers.Dense(2, name="flow")(hidden), "heat": layers.Dense(1, name="heat")(last)}
    )


@pytest.mark.parametrize("unroll", [False, True])
def test_what_a_loop_puts_out_is_counted_at_every_step(unroll):
    model = sequential((20, 3), layers.LSTM(4, return_sequences=True, unroll=unroll), layers.Dense(2))
    facts = describe_call(model, (20, 3), of="output", dtype="float32")
    calls = 20 if unroll else 21  # a loop's shapes are known by one call of its cell
    assert facts.activations == calls * 3 * 4 + 20 * 4 + 20 * 2


def test_a_loop_has_the_steps_of_what_it_is_given():
    parts = [layers.LSTM(4), layers.RepeatVector(50), layers.GRU(3, return_sequences=True)]
    facts = describe_call(sequential((8, 2), *parts), (8, 2), of="output", dtype="float32")
    assert facts.recurrent == ((8, 4), (50, 3))
    assert facts.activations == 9 * 3 * 4 + 4 + 50 * 4 + 51 * 2 * 3 + 50 * 3
    flat = sequential((60,), layers.Reshape((20, 3)), layers.LSTM(4))
    assert describe_call(flat, (60,), of="output", dtype="float32").recurrent == ((20, 4),)


class Weight(layers.Layer):
    num_heads = None  # a name of its own

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:])

    def call(self, inputs):
        return self.table


class Table(keras.Model):
    """Built by its first call alone, with a layer whose output is no tensor of the graph."""

    def __init__(self):
        super().__init__()
        self.positions, self.head = Weight(), layers.Dense(2)

    @tf.function
    def call(self, windows):
        return {"sum": self.head(windows + self.positions(windows))}


def test_a_layer_may_give_its_weight():
    facts = describe_call(Table(), (6, 2), of="sum", dtype="float32")
    assert facts.target_shape == (6, 2)
    assert facts.activations == 6 * 2 // 2 + 6 * 2  # the weight is there once


def test_outputs_of_a_dict_keep_their_names_and_order():
    source = keras.Input((4, 3))
    flat = layers.Flatten()(source)
    model = keras.Model(source, {"z": layers.Dense(2)(flat), "a": layers.Dense(1)(flat)})
    assert describe(model, WindowsSection(), 3).outputs == ("z_0", "z_1", "a")
    assert describe(model, WindowsSection(), 3, of="z").target_size == 2
    windows = np.ones((2, 4, 3), "float32")
    target = Target(model, describe(model, WindowsSection(), 3))(windows)
    np.testing.assert_array_equal(target[:, 0, 2:], model(windows)["a"])


def test_several_outputs_stand_side_by_side():
    model = two_headed()
    facts = describe(model, WindowsSection(), 3)
    windows = np.random.default_rng(0).standard_normal((2, 4, 3)).astype("float32")
    both = model(windows)
    assert facts.outputs == ("flow_0", "flow_1", "heat")
    assert facts.target_shape == (1, 3)
    expected = np.concatenate([both["flow"], both["heat"]], axis=1)
    np.testing.assert_allclose(Target(model, facts)(windows)[:, 0], expected, rtol=1e-6)
    one = describe(model, WindowsSection(), 3, of="heat")
    assert one.outputs == ("heat",)
    np.testing.assert_allclose(Target(model, one, "heat")(windows), both["heat"], rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "windows", "features", "of", "key"),
    [
        (lstm, {}, 3, "output", "windows.length"),
        (lstm, {"length": 5}, 2, "output", "series.features"),
        (lambda: sequential((4, 3), layers.Flatten()), {"length": 5}, 3, "output", "windows.length"),
        (lambda: sequential((12,), layers.Dense(1)), {"length": 5}, 3, "output", "windows.length"),
        (lambda: sequential((12,), layers.Dense(1)), {}, 3, "output", "windows.length"),
        (lambda: sequential((4, 3, 1), layers.Flatten()), {}, 3, "output", "model.path"),
        (lambda: sequential((4, 3), layers.Reshape((2, 2, 3))), {}, 3, "output", "model.path"),
        (lambda: two_headed(4), {}, 3, "output", "sensitivity.of"),
        (two_headed, {}, 3, "rain", "sensitivity.of"),
        (
            lambda: sequential((4, 3), layers.Lambda(lambda x: keras.ops.argmax(x, -1))),
            {},
            3,
            "output",
            "sensitivity.of",
        ),
        (
            lambda: keras.Model([a := keras.Input((4, 3)), b := keras.Input((4, 3))], a + b),
            {},
            3,
            "output",
            "model.inputs",
        ),
    ],
)
def test_what_does_not_fit_the_windows_is_refused(model, windows, features, of, key):
    with pytest.raises(Refused) as refusal:
        describe(model(), WindowsSection(**windows), features, of=of)
    assert refusal.value.key == key


@pytest.fixture
def module(tmp_path):
    (tmp_path / "my_models.py").write_text(MODULE)
    return tmp_path


def test_a_function_gives_a_subclassed_model(module):
    model = load_model(ModelSection(path="my_models:subclassed"), str(module))
    facts = describe(model, WindowsSection(length=2), 3)
    assert facts.target_size == 6


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("my_models:nothing", "NoneType"),
        ("my_models:broken", "no weights here"),
        ("my_models:absent", "absent"),
        ("not_there:x", "not_there"),
    ],
)
def test_a_function_that_gives_no_model_is_refused(module, path, part):
    with pytest.raises(Refused, match=part):
        load_model(ModelSection(path=path), str(module))


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "junk.keras").write_bytes(b"junk")
    with pytest.raises(Refused) as refusal:
        load_file(tmp_path / "junk.keras")
    assert refusal.value.key == "model.path"


def test_code_stored_in_a_file_is_refused_by_the_layers_name(tmp_path):
    source = keras.Input((4, 3))
    keras.Model(source, layers.Lambda(lambda x: 2 * x, name="doubled")(source)).save(tmp_path / "m.keras")
    with pytest.raises(Refused, match="'doubled' is a Lambda"):
        load_file(tmp_path / "m.keras")


def test_cast_keeps_the_function():
    model = two_headed()
    twin = cast(model, "float64")
    windows = np.random.default_rng(0).standard_normal((2, 4, 3))
    assert twin(windows)["flow"].dtype == "float64"
    np.testing.assert_allclose(twin(windows)["flow"], model(windows.astype("float32"))["flow"], rtol=1e-5, atol=1e-6)
    assert cast(model, "float32") is model
