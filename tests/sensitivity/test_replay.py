"""Restored graphs, made again: the same numbers, and the gradients that the restored ones refuse."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity import replay, saved_models
from sensitivity.layers import as_graph
from sensitivity.loading import cast
from sensitivity.saved_models import SavedModel, load_saved_model
from tests.conftest import sequential, tape_jacobian, worst

WINDOWS = np.random.default_rng(0).standard_normal((3, 4, 2)).astype("float32")


def turned(x, most=None):
    """A state that is fed step by step."""
    steps = tf.transpose(x, (1, 0, 2))
    start = (tf.constant(0), tf.zeros_like(steps[0]))
    found = tf.while_loop(
        lambda step, _: step < 4,
        lambda step, state: (step + 1, tf.tanh(state + steps[step])),
        start,
        maximum_iterations=most,
    )
    return found[1]


def branched(x):
    positive = tf.reduce_sum(x) > -1e9
    return turned(tf.cond(positive, lambda: 2 * x, lambda: x))


@tf.function(autograph=False)
def called(x):
    return turned(x) ** 2


def renamed(x):
    """Operations whose inputs Python calls otherwise than their definition."""
    first, second = tf.split(turned(x), 2, axis=1)
    return tf.concat([tf.reduce_max(first, 1, keepdims=True), tf.expand_dims(tf.reduce_sum(second, 1), 1)], 1)


def in_a_loop(x):
    found = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y + turned(y[:, None] * x)), (0, x[:, 0]))
    return found[1]


def by_name(x):
    return {"b": turned(x), "a": [turned(2 * x)[:, :1]]}


FUNCTIONS = {
    "open": turned,
    "limited": lambda x: turned(x, most=3),
    "branched": branched,
    "called": lambda x: called(x) + called(2 * x),
    "renamed": renamed,
    "in a loop": in_a_loop,
    "by name": by_name,
}


class Module(tf.Module):
    def __init__(self, function):
        super().__init__()
        self.scale = tf.Variable(1.5)
        self.function = function

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 4, 2))])
    def __call__(self, x):
        return self.plainly(x)

    def plainly(self, x):
        return tf.nest.map_structure(lambda part: self.scale * part, self.function(x))


def restored(function, path):
    module = Module(function)
    tf.saved_model.save(module, str(path / "saved"))
    return module, load_saved_model(path / "saved")


def flat(found):
    return tf.concat(tf.nest.flatten(found), 1)


def twice(call):
    """A Jacobian by pfor and by a loop, and second derivatives: what tapes do that are used twice."""

    def by_tape(pfor):
        with tf.GradientTape(persistent=True) as tape:
            x = tf.constant(WINDOWS)
            tape.watch(x)
            found = tf.ensure_shape(flat(call(x)), (3, None))
        return tape.batch_jacobian(found, x, experimental_use_pfor=pfor)

    def curved():
        x = tf.constant(WINDOWS)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.reduce_sum(flat(call(x)))
            pulled = tf.reduce_sum(tf.sin(tape.gradient(total, x)))
        return outer.gradient(pulled, x)

    return [as_graph(part)().numpy() for part in (lambda: by_tape(True), lambda: by_tape(False), curved)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tape_can_use_it_twice(name, tmp_path):
    module, loaded = restored(FUNCTIONS[name], tmp_path)
    for found, expected in zip(twice(loaded), twice(module.plainly), strict=True):
        assert worst(found, expected) < 1e-5
    assert loaded.bound == ""


def test_variables_are_those_of_the_model(tmp_path):
    _, loaded = restored(turned, tmp_path)
    call = as_graph(loaded)
    before = call(tf.constant(WINDOWS)).numpy()
    loaded.weights[0].assign(3.0)
    assert worst(call(tf.constant(WINDOWS)).numpy(), 2 * before) < 1e-6


def test_a_graph_that_was_on_a_tape_is_as_good(tmp_path):
    module = Module(turned)
    tf.saved_model.save(module, str(tmp_path / "saved"))
    used = tf.saved_model.load(str(tmp_path / "saved"))
    with tf.GradientTape() as tape:
        x = tf.constant(WINDOWS)
        tape.watch(x)
        found = used(x)
    tape.gradient(found, x)
    assert worst(twice(saved_models.as_model(used))[0], twice(module.plainly)[0]) < 1e-5


def asserting(x):
    with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.reduce_all(x < 1e9), data=["too large"])]):
        return turned(tf.identity(x))


@tf.custom_gradient
def clipped(x):
    return x, lambda upstream: tf.clip_by_norm(upstream, 0.5, axes=[1])


def growing(x):
    """A loop whose tensors grow, of which only the one that was saved says so."""
    invariants = (tf.TensorShape([]), tf.TensorShape([None, None]))
    start = (tf.constant(0), turned(x))
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.concat([y, y], 1)), start, invariants)[1]


def switched(x):
    """Branches that are looked into nowhere."""
    return tf.switch_case(tf.cast(x[0, 0, 0] > -1e9, "int32"), [lambda: turned(x), lambda: turned(2 * x)])


BOUND = {
    "Assert": asserting,
    "operation StatelessCase": switched,
    "custom gradient": lambda x: clipped(turned(x)),
    "other numbers, or none": growing,
}


@pytest.mark.parametrize("reason", BOUND)
def test_what_cannot_be_made_again_is_called_as_it_was_restored(reason, tmp_path):
    module = Module(BOUND[reason])
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(tmp_path / "saved"), options=options)
    loaded = load_saved_model(tmp_path / "saved")
    assert worst(loaded(tf.constant(WINDOWS)).numpy(), module(tf.constant(WINDOWS)).numpy()) < 1e-6
    assert reason in loaded.bound


@pytest.mark.parametrize("wrong", [{1, 3}, {1}, {3}])
def test_a_graph_that_is_made_again_otherwise_is_not_taken(wrong, tmp_path, monkeypatch):
    """Of one window, or of several, alone, too."""
    _, loaded = restored(turned, tmp_path)
    made = replay._made

    def otherwise(operation, given):
        is_other = operation.type == "Tanh" and given[0].shape[0] in wrong
        return made(operation, [2 * given[0]] if is_other else given)

    monkeypatch.setattr(replay, "_made", otherwise)
    expected = loaded._endpoint.call(tf.constant(WINDOWS)).numpy()
    assert worst(loaded(tf.constant(WINDOWS)).numpy(), expected) < 1e-6
    assert "other numbers" in loaded.bound


def test_graphs_without_loops_are_called_as_they_were_restored(tmp_path):
    _, loaded = restored(lambda x: tf.tanh(x[:, 0]), tmp_path)
    assert isinstance(loaded, SavedModel)
    assert loaded._replay is None
    assert loaded.bound == ""


def test_one_window_alone(tmp_path):
    """What is spread over a batch of one is spread over any, as far as shapes tell."""
    model = sequential((4, 2), layers.LSTM(3, return_sequences=True), layers.GRU(3), layers.Dense(2))
    model.export(tmp_path / "saved", verbose=False)
    loaded = load_saved_model(tmp_path / "saved")
    for given in ({}, {"windows_per_call": 1}):
        found = sensitivity.jacobian(loaded, WINDOWS if given else WINDOWS[:1], **given)
        assert worst(found, tape_jacobian(model, WINDOWS[: len(found)])) < 1e-5
    assert loaded.bound == ""


def test_a_random_state_that_no_output_takes_stays_as_it_is(tmp_path):
    model = sequential((4, 2), layers.LSTM(3, dropout=0.2, recurrent_dropout=0.3), layers.Dropout(0.5), layers.Dense(2))
    model.export(tmp_path / "saved", verbose=False)
    loaded = load_saved_model(tmp_path / "saved")
    assert worst(sensitivity.jacobian(loaded, WINDOWS), tape_jacobian(model, WINDOWS)) < 1e-5
    assert loaded.bound == ""


class Counting(tf.Module):
    """Counts its calls; `read` is where it reads how many there were."""

    def __init__(self, read):
        super().__init__()
        self.count, self.read = tf.Variable(0.0), read

    @tf.function(autograph=False)
    def tick(self):
        self.count.assign_add(1.0)

    @tf.function(autograph=False)
    def scaled(self, x):
        return x * self.count

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 4, 2))])
    def __call__(self, x):
        if self.read == "not at all":
            self.tick()
            return turned(x)
        if self.read == "beside":
            with tf.control_dependencies([self.count.assign_add(1.0)]):
                return turned(x) * self.count
        self.tick()
        return self.scaled(turned(x)) if self.read == "within" else turned(x) * self.count


@pytest.mark.parametrize(
    ("read", "reason"), [("beside", "Assign"), ("after", "Assign"), ("within", "Assign"), ("not at all", "")]
)
def test_a_state_that_an_output_takes_is_none_of_that(read, reason, tmp_path):
    """Wherever it is assigned and read: beside each other, or in functions that are called."""
    tf.saved_model.save(Counting(read), str(tmp_path / "saved"))
    loaded = load_saved_model(tmp_path / "saved")
    assert reason in loaded.bound
    assert (loaded._replay is None) == bool(reason)


def test_layers_of_another_precision_than_the_windows(tmp_path):
    model = sequential((4, 2), layers.LSTM(3, dtype="float64"), layers.Dense(2, dtype="float64"))
    model.export(tmp_path / "saved", verbose=False)
    found = sensitivity.jacobian(load_saved_model(tmp_path / "saved"), WINDOWS)
    assert found.dtype == "float32"
    expected = sensitivity.jacobian(cast(model, "float64"), WINDOWS)
    assert worst(found, expected) < 1e-6
