"""Every kernel against the naive tape, closed forms and finite differences in float64."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest
from keras import layers

from sensitivity.errors import Refused
from sensitivity.job import SensitivitySection, WindowsSection
from sensitivity.loading import cast
from sensitivity.model import Target, describe, describe_call
from sensitivity.plan import Setting
from sensitivity.tuning import Tuned, choose
from tests.conftest import sequential, tape_jacobian, worst

SHAPE = (8, 3)


def attention():
    source = keras.Input(SHAPE)
    hidden = layers.Dense(4)(source)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 3)(hidden, hidden))
    return keras.Model(source, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


MODELS = {
    "dense": lambda: sequential(SHAPE, layers.Flatten(), layers.Dense(5, "tanh"), layers.Dense(1)),
    "lstm": lambda: sequential(SHAPE, layers.LSTM(4, activation="relu"), layers.Dense(1)),
    "lstm sequence": lambda: sequential(SHAPE, layers.LSTM(4, return_sequences=True), layers.Dense(2)),
    "gru and simple": lambda: sequential(
        SHAPE, layers.GRU(4, return_sequences=True), layers.SimpleRNN(3), layers.Dense(3)
    ),
    "bidirectional": lambda: sequential(SHAPE, layers.Bidirectional(layers.LSTM(3)), layers.Dense(2)),
    "conv": lambda: sequential(
        SHAPE, layers.Conv1D(4, 3, padding="causal", activation="elu"), layers.Flatten(), layers.Dense(2)
    ),
    "attention": attention,
    "masking": lambda: sequential(SHAPE, layers.Masking(), layers.LSTM(3), layers.Dropout(0.5), layers.Dense(1)),
    "one number, no axis": lambda: sequential(SHAPE, layers.Flatten(), layers.Dense(1), layers.Reshape(())),
}


def windows_of(count: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((count, *shape)).astype("float32")


def tuned(model, setting: Setting | None = None, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Tuned:
    facts = describe_call(model, shape, of="output", dtype=dtype)
    setting = setting or choose(SensitivitySection(), facts, 10**9, 4)
    return Tuned(Target(model, facts), setting)


@pytest.mark.parametrize("name", MODELS)
def test_the_chosen_kernel_equals_the_tape(name):
    model = MODELS[name]()
    windows = windows_of(7)
    kernel = tuned(model)
    prediction, jacobian = kernel(windows)
    expected = tape_jacobian(model, windows)
    assert jacobian.shape == expected.shape
    assert worst(jacobian, expected) < 1e-5
    np.testing.assert_allclose(prediction, model(windows), rtol=1e-5, atol=1e-6)
    kernel(windows_of(5))
    assert kernel.traces == 1
    smooth = name != "lstm"  # it has a ReLU
    assert kernel.setting.xla == smooth
    assert bool(kernel.setting.lost) != smooth


@pytest.mark.parametrize(
    "setting",
    [
        Setting("batch_jacobian", 4, experimental_use_pfor=True),
        Setting("batch_jacobian", 4, experimental_use_pfor=True, parallel_iterations=3),
        Setting("batch_jacobian", 4, experimental_use_pfor=False),
        Setting("batch_jacobian", 4, experimental_use_pfor=False, parallel_iterations=2, xla=True),
        Setting("batch_jacobian", 100, experimental_use_pfor=False, xla=True),
    ],
    ids=str,
)
def test_every_setting_gives_the_same_jacobian(setting):
    model = MODELS["lstm sequence"]()
    windows = windows_of(6)
    kernel = tuned(model, setting)
    assert worst(kernel(windows)[1], tape_jacobian(model, windows)) < 1e-5
    assert kernel.setting == setting


def test_derivatives_that_jump_are_the_tapes():
    model = sequential(SHAPE, layers.LSTM(30, activation="relu"), layers.Dense(30, "relu"), layers.Dense(1))
    windows = windows_of(3000)
    assert worst(tuned(model, Setting("gradient", 256))(windows)[1], tape_jacobian(model, windows)) < 1e-6


@pytest.mark.parametrize(
    ("layer", "smooth"),
    [
        (layers.LSTM(2), True),
        (layers.GRU(2), True),
        (layers.Bidirectional(layers.SimpleRNN(2)), True),
        (layers.Dense(2, "softmax"), True),
        (layers.LayerNormalization(), True),
        (layers.Masking(), True),
        (layers.GRU(2, activation="relu"), False),
        (layers.LeakyReLU(), False),
        (layers.MaxPooling1D(2), False),
        (layers.Dense(2, "hard_sigmoid"), False),
        (layers.Lambda(abs), False),
    ],
    ids=str,
)
def test_jumps_are_seen_in_the_graph(layer, smooth):
    assert describe_call(sequential(SHAPE, layer), SHAPE, of="output", dtype="float32").smooth is smooth


def test_an_unrolled_loop_is_not_given_to_xla():
    facts = describe(sequential((40, 3), layers.LSTM(2, unroll=True), layers.Dense(1)), WindowsSection(), 3)
    setting = choose(SensitivitySection(), facts, 10**9, 10)
    assert not setting.xla
    assert "minutes to compile" in setting.lost[0]


def test_a_linear_model_has_its_weights_as_jacobian():
    model = sequential(SHAPE, layers.Reshape((24,)), layers.Dense(2, use_bias=False))
    jacobian = tuned(model)(windows_of(9))[1]
    expected = model.get_weights()[0].T.reshape(2, *SHAPE)
    np.testing.assert_allclose(jacobian, np.broadcast_to(expected, (9, 2, *SHAPE)), rtol=1e-6)


def test_float64_agrees_with_central_differences():
    model = cast(MODELS["gru and simple"](), "float64")
    windows = windows_of(3).astype("float64")
    jacobian = tuned(model, dtype="float64")(windows)[1]
    step = 1e-6
    for lag, feature in np.ndindex(*SHAPE):
        moved = np.zeros(SHAPE)
        moved[lag, feature] = step
        difference = (model(windows + moved) - model(windows - moved)).numpy() / (2 * step)
        np.testing.assert_allclose(jacobian[:, :, lag, feature], difference, rtol=1e-6, atol=1e-8)


def test_an_output_that_ignores_the_input_has_a_zero_jacobian():
    source = keras.Input(SHAPE)
    constant = layers.Dense(2, kernel_initializer="zeros")(layers.Flatten()(source))
    assert not tuned(keras.Model(source, constant))(windows_of(2))[1].any()


def test_choice_follows_the_job_file():
    facts = describe(MODELS["lstm"](), WindowsSection(), 3)
    auto = choose(SensitivitySection(), facts, 10**9, 1000)
    assert (auto.kernel, auto.xla) == ("gradient", False)
    assert "jumps" in auto.lost[0]
    smooth = describe(MODELS["bidirectional"](), WindowsSection(), 3)
    loop = choose(SensitivitySection(), smooth, 10**9, 1000)
    assert (loop.kernel, loop.experimental_use_pfor, loop.xla) == ("batch_jacobian", False, True)
    asked = SensitivitySection(experimental_use_pfor=True, parallel_iterations=4, windows_per_call=17)
    found = choose(asked, smooth, 10**9, 1000)
    assert (found.kernel, found.windows_per_call, found.parallel_iterations) == ("batch_jacobian", 17, 4)
    assert found.experimental_use_pfor is True
    assert found.xla is False
    assert "XLA" in found.lost[0]


@pytest.mark.parametrize(("windows", "size"), [(5, 5), (1024, 1024), (1025, 513), (3188, 797), (10**6, 1024)])
def test_calls_are_of_one_size(windows, size):
    facts = describe(MODELS["dense"](), WindowsSection(), 3)
    assert choose(SensitivitySection(), facts, 10**9, windows).windows_per_call == size


def test_choice_fits_the_memory_or_refuses():
    facts = describe(MODELS["lstm sequence"](), WindowsSection(), 3)
    sizes = [choose(SensitivitySection(), facts, memory, 10**6).windows_per_call for memory in (10**5, 10**6, 10**9)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    with pytest.raises(Refused, match="single window"):
        choose(SensitivitySection(), facts, 100, 10**6)


def test_gradient_refuses_several_outputs():
    facts = describe(MODELS["conv"](), WindowsSection(), 3)
    with pytest.raises(Refused, match="2 numbers a window"):
        choose(SensitivitySection(kernel="gradient"), facts, 10**9, 10)


class Greedy(Tuned):
    """Runs out of memory above `room` windows a call."""

    room = 3

    def _adopt(self, setting: Setting) -> None:
        import tensorflow as tf

        super()._adopt(setting)
        function = self._function

        def call(windows):
            if len(windows) > self.room:
                raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
            return function(windows)

        self._function = call


def test_out_of_memory_halves_and_goes_on():
    model = MODELS["lstm"]()
    windows = windows_of(40)
    kernel = Greedy(Target(model, describe_call(model, SHAPE, of="output", dtype="float32")), Setting("gradient", 16))
    assert worst(kernel(windows)[1], tape_jacobian(model, windows)) < 1e-5
    assert kernel.setting.windows_per_call == 2
    assert [lost.split(":")[0] for lost in kernel.setting.lost] == [f"{n} windows a call" for n in (16, 8, 4)]
    kernel.room = 0
    with pytest.raises(MemoryError, match="one window does not fit"):
        kernel(windows)


def test_a_model_that_xla_cannot_compile_runs_without_it():
    import tensorflow as tf

    @tf.custom_gradient
    def through_python(windows):
        return tf.ensure_shape(
            tf.numpy_function(np.copy, [windows], tf.float32), windows.shape
        ), lambda upstream: upstream

    source = keras.Input(SHAPE)
    copied = layers.Lambda(through_python, output_shape=SHAPE)(source)
    model = keras.Model(source, layers.Dense(1)(layers.Reshape((24,))(copied)))
    kernel = tuned(model, Setting("gradient", 4, xla=True))
    expected = model.get_weights()[0].T.reshape(1, *SHAPE)
    np.testing.assert_allclose(kernel(windows_of(4))[1][0], expected, rtol=1e-6)
    assert not kernel.setting.xla
    assert kernel.setting.lost[0].startswith("XLA: ")


def test_weights_changed_later_are_seen():
    model = MODELS["lstm"]()
    windows = windows_of(4)
    kernel = tuned(model)
    before = kernel(windows)[1]
    model.set_weights([2 * weight for weight in model.get_weights()])
    after = kernel(windows)[1]
    assert worst(after, tape_jacobian(model, windows)) < 1e-5
    assert not np.allclose(before, after)


def test_settings_read_well():
    setting = Setting("batch_jacobian", 1024, parallel_iterations=4)
    assert str(setting) == "batch_jacobian, 1,024 windows a call, pfor over 4 outputs, no XLA"
    assert str(replace(setting, experimental_use_pfor=False, xla=True)).endswith("loop over outputs, XLA")
