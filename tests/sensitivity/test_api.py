from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity import kept, progress
from sensitivity.errors import Refused
from sensitivity.probes import Probe
from tests.conftest import in_training, sequential, tape_jacobian, worst

SHAPE = (6, 2)


def windows_of(count: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, *SHAPE)).astype("float32")


def test_it_is_batch_jacobian_in_any_number_of_calls(one_segment):
    model = sequential(SHAPE, layers.SimpleRNN(2, return_sequences=True))
    windows = windows_of(30)
    expected = tape_jacobian(model, windows)
    for memory in (None, "1GB", 120_000):
        found = sensitivity.jacobian(model, windows, memory)
        assert found.shape == (30, 6, 2, 6, 2)
        assert found.dtype == np.float32
        assert worst(found, expected) < 1e-5
    assert worst(sensitivity.jacobian(model, windows.tolist()), expected) < 1e-5


def test_a_second_call_compiles_nothing():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(1))
    sensitivity.jacobian(model, windows_of(8))
    (request,) = model._sensitivity_kernels.requests.values()
    (own,) = request.products.values()
    before = dict(own.kernels)
    assert sensitivity.jacobian(model, windows_of(8), report=True)[1].reused
    assert own.kernels == before
    assert [found.engine.traces for found in before.values()] == [1]


def test_a_model_that_is_made_of_other_layers_has_kernels_of_its_own():
    model, windows = sequential(SHAPE, layers.Flatten(), layers.Dense(3)), windows_of(8)
    sensitivity.jacobian(model, windows)
    model.add(layers.Dense(2, "tanh"))
    assert worst(sensitivity.jacobian(model, windows), tape_jacobian(model, windows)) < 1e-5

    dense = model.layers[1]
    dense.enable_lora(2)
    dense.lora_kernel_b.assign(np.ones(dense.lora_kernel_b.shape))
    assert worst(sensitivity.jacobian(model, windows), tape_jacobian(model, windows)) < 1e-5


class Constant(layers.Layer):
    """Reads its weight while it is traced, so that a graph keeps the numbers of then."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],))

    def call(self, inputs):
        with tf.init_scope():
            gain = tf.convert_to_tensor(self.gain)
        return inputs * gain


@pytest.mark.parametrize("after", [[1.0, -3.0], [3.0, -1.0]], ids=["signs", "places"])
def test_weights_of_other_signs_or_in_other_places_are_seen(after):
    model, windows = sequential(SHAPE, Constant(), layers.Flatten(), layers.Dense(2)), windows_of(8)
    model.layers[0].gain.assign([-1.0, 3.0])
    assert worst(sensitivity.jacobian(model, windows), tape_jacobian(model, windows)) < 1e-5
    model.layers[0].gain.assign(after)
    assert worst(sensitivity.jacobian(model, windows), tape_jacobian(model, windows)) < 1e-5


def test_a_model_that_its_first_call_builds_keeps_its_kernels():
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.flat, self.head = layers.Flatten(), layers.Dense(2)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return self.head(self.flat(inputs))

    for model in (keras.Sequential([layers.Flatten(), layers.Dense(2)]), Own()):
        reports = [sensitivity.jacobian(model, windows_of(8), report=True)[1] for _ in range(2)]
        assert [report.reused for report in reports] == [False, True]


def test_a_layer_that_adapts_again_is_seen():
    """Its means are constants of a graph; their sums hardly change where one of them is large."""
    random = np.random.default_rng(0)
    data = random.standard_normal((64, *SHAPE)).astype("float32") + [100_000.0, 0.0]
    adapting = layers.Normalization()
    adapting.adapt(data)
    model = sequential(SHAPE, adapting, layers.Flatten(), layers.Dense(3, "tanh"))
    windows = data[:5].astype("float32")
    sensitivity.jacobian(model, windows)
    adapting.adapt(data + [0.0, 8.0])
    assert worst(sensitivity.jacobian(model, windows), tape_jacobian(model, windows)) < 1e-5


def test_hidden_numbers_of_a_masked_array_are_not_taken():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(2))
    with pytest.raises(Refused, match="12 of whose numbers are hidden"):
        sensitivity.jacobian(model, np.ma.masked_where(np.indices((4, *SHAPE))[0] == 2, windows_of(4)))


def test_what_was_refused_is_refused_after_what_equals_it():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(2))
    sensitivity.jacobian(model, windows_of(4), max_lag=1)
    with pytest.raises(Refused, match="max_lag"):
        sensitivity.jacobian(model, windows_of(4), max_lag=True)


def test_windows_are_checked_where_none_were_before():
    """Of no windows nothing can be proved, and what was taken once is not checked again."""
    mixing = sequential(SHAPE, layers.Flatten(), layers.Lambda(lambda x: x - tf.reduce_mean(x, 0)), layers.Dense(1))
    assert sensitivity.jacobian(mixing, windows_of(0)).shape == (0, 1, *SHAPE)
    with pytest.raises(Refused):
        sensitivity.jacobian(mixing, windows_of(4))


def test_fewer_windows_share_a_kernel_and_many_more_have_it_timed_again(monkeypatch):
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(4))
    knobs = {"kernel": "batch_jacobian", "windows_per_call": 8}
    reports = [sensitivity.jacobian(model, windows_of(n), report=True, **knobs)[1] for n in (64, 50, 8, 3)]
    assert [report.reused for report in reports] == [False, True, True, False]
    _, again = sensitivity.jacobian(model, windows_of(4000), report=True, **knobs)
    assert again.reused
    monkeypatch.setattr(kept, "WORTH_TIMING", 0.0)
    _, worth_it = sensitivity.jacobian(model, windows_of(4000), report=True, **knobs)
    assert not worth_it.reused
    reports = [sensitivity.jacobian(model, windows_of(n), report=True)[1] for n in (65, 70, 40, 130)]
    assert [report.reused for report in reports] == [False, True, True, False]
    assert reports[0].setting.windows_per_call <= 72


def test_the_report_says_how():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(20, "tanh"))
    windows = windows_of(40)
    found, report = sensitivity.jacobian(model, windows, "1GB", report=True)
    assert worst(found, tape_jacobian(model, windows)) < 1e-5
    assert report.choice.by == "timed"
    assert report.windows == 40
    assert not report.reused
    assert report.projected < 10**9
    assert report.measured is None or report.measured <= report.projected
    text = str(report)
    assert "windows/s" in text
    assert "projected" in text
    _, again = sensitivity.jacobian(model, windows, "1GB", report=True)
    assert again.reused
    assert again.setting == report.setting
    assert "by an earlier call" in str(again)


def test_a_kernel_that_was_short_of_memory_is_found_anew_where_there_is_more():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(4))
    windows = windows_of(200)
    _, short = sensitivity.jacobian(model, windows, 120_000, report=True)
    _, again = sensitivity.jacobian(model, windows, 120_000, report=True)
    _, ample = sensitivity.jacobian(model, windows, "1GB", report=True)
    assert again.reused
    assert again.setting == short.setting
    assert not ample.reused
    assert ample.setting.windows_per_call > short.setting.windows_per_call


def test_what_stands_beside_a_call_counts_too():
    """The Jacobian, the copy that another dtype takes, and the compiler where there is room for one."""
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(4))
    windows = windows_of(1000)
    result = 1000 * 4 * (12 + 1) * 4
    assert sensitivity.jacobian(model, windows, result + 20_000).shape == (1000, 4, *SHAPE)
    with pytest.raises(Refused, match="for a copy of the windows"):
        sensitivity.jacobian(model, windows.astype("float64"), result + 20_000)
    other = sequential(SHAPE, layers.Flatten(), layers.Dense(4))
    many = np.broadcast_to(windows[:1], (3_000_000, *SHAPE))
    with pytest.raises(Refused, match="for compiling"):
        sensitivity.jacobian(other, many, 3_000_000 * 4 * 13 * 4 + 2**20)


def test_an_expert_sets_every_knob():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(20, "tanh"))
    windows = windows_of(40)
    knobs = {"kernel": "batch_jacobian", "windows_per_call": 8, "experimental_use_pfor": True, "parallel_iterations": 5}
    found, report = sensitivity.jacobian(model, windows, report=True, **knobs)
    assert worst(found, tape_jacobian(model, windows)) < 1e-5
    assert report.choice.by == "given"
    setting = report.setting
    assert {name: getattr(setting, name) for name in knobs} == knobs
    forward = sensitivity.jacobian(model, windows, kernel="forward")
    assert worst(forward, found) < 1e-5


@pytest.mark.parametrize(
    ("knobs", "key"),
    [
        ({"kernel": "fastest"}, "kernel"),
        ({"windows_per_call": 0}, "windows_per_call"),
        ({"kernel": "gradient"}, "kernel"),
        ({"experimental_use_pfor": True, "parallel_iterations": 1}, "parallel_iterations"),
        ({"label": np.zeros(2)}, "label"),
    ],
)
def test_impossible_knobs_are_refused(knobs, key):
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(3))
    with pytest.raises(Refused) as refusal:
        sensitivity.jacobian(model, windows_of(2), **knobs)
    assert refusal.value.key == key


def test_long_work_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LONG_SECONDS", 0.0)
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(3))
    for pfor in ("auto", False):  # timed beforehand, and not
        knobs = {"kernel": "batch_jacobian", "windows_per_call": 16, "experimental_use_pfor": pfor}
        sensitivity.jacobian(model, windows_of(64), **knobs)
        assert "64 of 64 windows" in capsys.readouterr().err


def test_kernels_die_with_their_model():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(1))
    sensitivity.jacobian(model, windows_of(3))
    gone = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert gone() is None


def test_one_of_several_outputs():
    source = keras.Input(SHAPE)
    flat = layers.Flatten()(source)
    model = keras.Model(source, {"a": layers.Dense(1, name="a")(flat), "b": layers.Dense(2, name="b")(flat)})
    both, b = sensitivity.jacobian(model, windows_of(2)), sensitivity.jacobian(model, windows_of(2), of="b")
    assert both.shape == (2, 1, 3, *SHAPE)
    np.testing.assert_allclose(both[:, 0, 1:], b, rtol=1e-6)


def test_float64_models_stay_float64():
    source = keras.Input(SHAPE, dtype="float64")
    model = keras.Model(source, layers.Dense(1, dtype="float64")(layers.Flatten(dtype="float64")(source)))
    found = sensitivity.jacobian(model, windows_of(2))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found[0, 0].ravel(), model.get_weights()[0][:, 0])


def test_no_windows_give_no_jacobians():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(4))
    assert sensitivity.jacobian(model, windows_of(0)).shape == (0, 4, *SHAPE)


@pytest.mark.parametrize(("memory", "what"), [(10, "for the jacobian"), (400, "single window")])
def test_a_memory_that_is_too_small_is_refused_by_its_name(memory, what):
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(1))
    with pytest.raises(Refused, match=what) as refusal:
        sensitivity.jacobian(model, windows_of(2), memory)
    assert refusal.value.key == "memory"


@pytest.mark.parametrize(
    ("windows", "memory"),
    [(np.zeros(3), None), (np.zeros((2, 5, 9)), None), (windows_of(2), "much"), (windows_of(2), 0), ([["a"]], None)],
)
def test_bad_arguments_are_refused(windows, memory):
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(1))
    with pytest.raises(Refused):
        sensitivity.jacobian(model, windows, memory)


def test_what_numpy_computes_is_refused():
    """TensorFlow takes its derivative as zero."""

    def computed(x):
        return tf.ensure_shape(tf.numpy_function(np.sin, [x], tf.float32), x.shape)

    model = sequential(SHAPE, layers.Lambda(computed), layers.Flatten(), layers.Dense(1))
    with pytest.raises(Refused, match="numpy_function"):
        sensitivity.jacobian(model, windows_of(2))

    @tf.custom_gradient
    def known(x):
        return computed(x), lambda upstream: upstream * tf.cos(x)

    model = sequential(SHAPE, layers.Lambda(known), layers.Flatten(), layers.Dense(1))
    twin = sequential(SHAPE, layers.Lambda(tf.sin), layers.Flatten(), layers.Dense(1))
    how = {"kernel": "batch_jacobian", "experimental_use_pfor": False, "windows_per_call": 2}
    assert worst(sensitivity.jacobian(model, windows_of(2), **how), tape_jacobian(twin, windows_of(2))) < 1e-5


@pytest.mark.parametrize("outputs", [1, 2])
def test_what_python_computes_has_its_derivative(outputs):
    def computed(x):
        return tf.ensure_shape(tf.py_function(tf.sin, [x], x.dtype), x.shape)

    model, twin = (
        sequential(SHAPE, layers.Lambda(function), layers.Flatten(), layers.Dense(outputs))
        for function in (computed, tf.sin)
    )
    assert worst(sensitivity.jacobian(model, windows_of(3)), tape_jacobian(twin, windows_of(3))) < 1e-5


def test_a_coupled_model_is_refused():
    model = sequential(SHAPE, in_training(layers.BatchNormalization(name="norm")))
    with pytest.raises(ValueError, match="'norm'"):
        sensitivity.jacobian(model, windows_of(4))


def test_only_public_names_are_offered():
    assert {"Job", "jacobian", "open_run", "query", "Refused"} <= set(dir(sensitivity))
    with pytest.raises(AttributeError):
        sensitivity.nothing  # noqa: B018


class Shut(layers.Layer):
    """Lets each step see the others once it is opened, by a switch that is no weight of Keras' own."""

    def build(self, shape):
        self.open = tf.Variable(0.0)
        self.gain = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return self.gain * inputs + self.open * tf.reduce_mean(inputs, 1, keepdims=True)


def test_a_kept_kernel_is_proved_again_when_weights_change_and_not_before(one_segment, monkeypatch):
    model = sequential((5, 2), Shut(), layers.SimpleRNN(3, return_sequences=True), layers.Dense(1))
    windows = np.random.default_rng(0).standard_normal((8, 5, 2)).astype("float32")
    given = {"kernel": "scan", "windows_per_call": 8}
    assert worst(sensitivity.jacobian(model, windows, **given), tape_jacobian(model, windows)) < 1e-5
    looked = []
    monkeypatch.setattr(Probe, "of", lambda *a, of=Probe.of: looked.append(1) or of(*a))
    assert sensitivity.jacobian(model, windows, report=True, **given)[1].reused
    assert not looked
    model.layers[0].gain.assign(1.5)  # the scan is still right
    found, report = sensitivity.jacobian(model, windows, report=True, **given)
    assert (len(looked), report.reused) == (1, True)
    assert worst(found, tape_jacobian(model, windows)) < 1e-5
    model.layers[0].gain.assign(2.0)
    model.layers[0].open.assign(1.0)  # and now it is not
    with pytest.raises(Refused, match="(?s)scan.*alone and alike"):
        sensitivity.jacobian(model, windows, **given)
    given |= {"kernel": "batch_jacobian", "experimental_use_pfor": False}
    assert worst(sensitivity.jacobian(model, windows, **given), tape_jacobian(model, windows)) < 1e-5
    before = len(looked)
    sensitivity.jacobian(model, 10 * windows, **given)
    assert len(looked) == before + 1
    gap = windows.copy()
    gap[0, 2] = np.nan
    for known in (windows, 10 * windows, gap):
        sensitivity.jacobian(model, known, **given)
    assert len(looked) == before + 1


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"max_lag": -1}, "0 or more"),
        ({"max_lag": "auto"}, "a whole number"),
        ({"output_steps": slice(0, 2)}, "a slice in quotes"),
        ({"output_steps": []}, "a list of numbers"),
        ({"outputs": 1.5}, "a list of names or numbers"),
    ],
)
def test_what_is_wanted_is_refused_in_the_same_words_as_in_a_job(given, allowed):
    model = sequential((5, 2), layers.Dense(1))
    with pytest.raises(Refused, match=rf"(?s)^{next(iter(given))}.*{allowed}"):
        sensitivity.jacobian(model, np.zeros((2, 5, 2)), **given)


def test_numbers_of_numpy_and_single_ones_are_taken():
    model = sequential((5, 2), layers.SimpleRNN(2, return_sequences=True))
    windows = np.random.default_rng(0).standard_normal((3, 5, 2)).astype("float32")
    given = {"outputs": "output_1", "max_lag": np.int64(1), "kernel": "scan", "windows_per_call": 3}
    one = sensitivity.jacobian(model, windows, output_steps=-1, **given)
    assert one.shape == (3, 1, 1, 2, 2)
    np.testing.assert_array_equal(one, sensitivity.jacobian(model, windows, output_steps=[np.int64(4)], **given))


@pytest.mark.parametrize("shape", [(2, 12, 3), (2, 24, 2), (2, 24), (2, 24, 3, 1, 1)])
def test_windows_of_another_shape_than_the_model_declares_are_refused(shape):
    model = sequential((24, 3), layers.LSTM(2), layers.Dense(1))
    with pytest.raises(Refused, match=r"(?s)windows is refused.*\(batch, 24, 3\), as the model declares"):
        sensitivity.jacobian(model, np.zeros(shape, "float32"))


def test_axes_of_length_one_may_be_left_out_or_added_as_keras_does():
    model = sequential((4, 1), layers.Flatten(), layers.Dense(1))
    windows = np.random.default_rng(0).standard_normal((3, 4)).astype("float32")
    whole = sensitivity.jacobian(model, windows[..., None])
    np.testing.assert_allclose(sensitivity.jacobian(model, windows).reshape(whole.shape), whole)
    free = sequential((None, 1), layers.LSTM(2))
    assert sensitivity.jacobian(free, windows[..., None]).shape == (3, 2, 4, 1)


def test_lags_beyond_the_window_are_refused():
    model = sequential((4, 2), layers.LSTM(2))
    windows = np.zeros((2, 4, 2), "float32")
    assert sensitivity.jacobian(model, windows, max_lag=3).shape == (2, 2, 4, 2)
    with pytest.raises(Refused, match=r"(?s)max_lag is refused.*4, and windows of 4 steps.*0 to 3"):
        sensitivity.jacobian(model, windows, max_lag=4)
