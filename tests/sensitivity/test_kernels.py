"""Every kernel against the naive tape, closed forms and finite differences in float64."""

from __future__ import annotations

import functools
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sensitivity import machine, meter
from sensitivity.candidates import choose, families
from sensitivity.engine import Tuned, called_flat
from sensitivity.errors import Refused
from sensitivity.job import SensitivitySection
from sensitivity.loading import cast
from sensitivity.model import Target, describe
from sensitivity.sections import WindowsSection
from sensitivity.setting import Setting
from tests.conftest import sequential, tape_jacobian, worst
from tests.describing import describe_call

SHAPE = (8, 3)

pytestmark = pytest.mark.usefixtures("one_segment")


def attention():
    source = keras.Input(SHAPE)
    hidden = layers.Dense(4)(source)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 3)(hidden, hidden))
    return keras.Model(source, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


def residual():
    source = keras.Input(SHAPE)
    hidden = layers.Dense(4)(source)
    hidden = layers.LayerNormalization()(hidden + layers.LSTM(4, return_sequences=True)(hidden))
    return keras.Model(source, layers.Dense(2)(layers.Dropout(0.4)(hidden)))


def two_heads():
    source = keras.Input(SHAPE)
    hidden = layers.SimpleRNN(5)(source)
    heads = [layers.Dense(2)(hidden), layers.Dense(2, "softplus")(hidden)]
    return keras.Model(source, layers.Concatenate()(heads))


MODELS = {
    "dense": lambda: sequential(SHAPE, layers.Flatten(), layers.Dense(5, "tanh"), layers.Dense(1)),
    "lstm": lambda: sequential(SHAPE, layers.LSTM(4, activation="relu"), layers.Dense(1)),
    "lstm sequence": lambda: sequential(SHAPE, layers.LSTM(4, return_sequences=True), layers.Dense(2)),
    "simple sequence": lambda: sequential(SHAPE, layers.SimpleRNN(4, return_sequences=True), layers.Dense(2)),
    "gru and simple": lambda: sequential(
        SHAPE, layers.GRU(4, return_sequences=True), layers.SimpleRNN(3), layers.Dense(3)
    ),
    "bidirectional": lambda: sequential(SHAPE, layers.Bidirectional(layers.LSTM(3)), layers.Dense(2)),
    "conv": lambda: sequential(
        SHAPE, layers.Conv1D(4, 3, padding="causal", activation="elu"), layers.Flatten(), layers.Dense(2)
    ),
    "attention": attention,
    "residual": residual,
    "two heads": two_heads,
    "time distributed": lambda: sequential(
        SHAPE, layers.GRU(4, return_sequences=True, reset_after=False), layers.TimeDistributed(layers.Dense(2, "tanh"))
    ),
    "masking": lambda: sequential(SHAPE, layers.Masking(), layers.LSTM(3), layers.Dropout(0.5), layers.Dense(1)),
    "one number, no axis": lambda: sequential(SHAPE, layers.Flatten(), layers.Dense(1), layers.Reshape(())),
}
ARCHITECTURES = [name for name in MODELS if name != "simple sequence"]


def windows_of(count: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((count, *shape)).astype("float32")


def tuned(model, setting: Setting | None = None, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Tuned:
    facts = describe_call(model, shape, of="output", dtype=dtype)
    setting = setting or choose(SensitivitySection(), facts, 10**9, 4)
    return Tuned(Target(model, facts), setting)


@functools.cache
def known(name: str) -> tuple[Target, np.ndarray]:
    """One of the models, and its Jacobian by the tape for seven windows."""
    model = MODELS[name]()
    facts = describe_call(model, SHAPE, of="output", dtype="float32")
    return Target(model, facts), tape_jacobian(model, windows_of(7))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_chosen_kernel_equals_the_tape(name):
    target, expected = known(name)
    windows = windows_of(7)
    kernel = Tuned(target, choose(SensitivitySection(), target.facts, 10**9, 4))
    prediction, jacobian = kernel(windows)
    assert jacobian.shape == expected.shape
    assert worst(jacobian, expected) < 1e-5
    assert worst(prediction, target.model(windows)) < 1e-5
    kernel(windows_of(5))
    assert kernel.traces == 1
    smooth = name != "lstm"  # it has a ReLU
    assert kernel.setting.xla == smooth
    told = {lost.partition(":")[0] for lost in kernel.setting.lost}
    assert told == {"lstm": {"XLA"}, "bidirectional": {"scan"}, "masking": {"scan"}}.get(name, set())


def merged(gathered: bool):
    """Some steps, as samples of windows by phases, before a recurrent layer: as LSTNet has it."""
    source, phases = keras.Input(SHAPE), [[0, 2, 4], [1, 3, 5]]
    if gathered:
        parts = layers.Lambda(lambda x: tf.gather(x, phases, axis=1), output_shape=(2, 3, 3))(source)
    else:
        parts = layers.Lambda(lambda x: tf.stack([x[:, :6:2], x[:, 1:6:2]], 1), output_shape=(2, 3, 3))(source)
    hidden = layers.Lambda(lambda x: tf.reshape(x, (-1, 3, 3)), output_shape=(3, 3))(parts)
    hidden = layers.GRU(3)(hidden)
    hidden = layers.Lambda(lambda x: tf.reshape(x, (-1, 6)), output_shape=(6,))(hidden)
    return keras.Model(source, layers.Dense(2)(hidden))


def test_pfor_is_not_tried_where_a_recurrent_model_gathers_numbers_of_its_windows():
    facts = describe_call(merged(gathered=True), SHAPE, of="output", dtype="float32")
    assert "corrupt memory" in facts.no_pfor
    assert not any(setting.experimental_use_pfor for setting in families(SensitivitySection(), facts))
    kernel = tuned(merged(gathered=True))
    assert worst(kernel(windows_of(3))[1], tape_jacobian(kernel.target.model, windows_of(3))) < 1e-5
    assert any(lost.startswith("pfor: TensorFlow's pfor can corrupt memory") for lost in kernel.setting.lost)
    assert not describe_call(merged(gathered=False), SHAPE, of="output", dtype="float32").no_pfor
    looked_up = sequential(
        (4,), layers.Lambda(lambda x: tf.gather(x, [0, 2], axis=1), output_shape=(2,)), layers.Dense(2)
    )
    assert not describe_call(looked_up, (4,), of="output", dtype="float32").no_pfor  # no loop


def setting_of(kernel: str, windows: int, **knobs) -> Setting:
    return Setting(kernel, windows, **{"experimental_use_pfor": False, **knobs})


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("simple sequence", setting_of("batch_jacobian", 4, experimental_use_pfor=True, parallel_iterations=3)),
        ("lstm sequence", setting_of("batch_jacobian", 4)),
        ("lstm sequence", setting_of("batch_jacobian", 4, parallel_iterations=2, xla=True)),
        ("lstm sequence", setting_of("batch_jacobian", 100, xla=True)),
        ("lstm sequence", setting_of("batch_jacobian", 4, experimental_use_pfor=True, outputs_per_call=5)),
        ("simple sequence", setting_of("batch_jacobian", 4, xla=True, outputs_per_call=9)),
        ("lstm sequence", setting_of("forward", 4)),
        ("lstm sequence", setting_of("forward", 4, xla=True)),
        ("simple sequence", setting_of("forward", 4, outputs_per_call=3)),
    ],
    ids=str,
)
def test_every_setting_gives_the_same_jacobian(name, setting):
    target, expected = known(name)
    kernel = Tuned(target, setting)
    assert worst(kernel(windows_of(7))[1], expected) < 1e-5
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
        (layers.Normalization(mean=0.5, variance=2.0), True),  # it has the larger one of two constants
        (layers.Lambda(lambda x: x * tf.abs(tf.reduce_sum(x))), False),
        (layers.Lambda(lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.abs(y)), (0, x))[1]), False),
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
    facts = describe(sequential((70, 3), layers.LSTM(2, unroll=True), layers.Dense(1)), WindowsSection(), 3)
    setting = choose(SensitivitySection(), facts, 10**9, 10)
    assert not setting.xla
    assert "minutes to compile" in setting.lost[0]


def test_a_linear_model_has_its_weights_as_jacobian():
    model = sequential(SHAPE, layers.Reshape((24,)), layers.Dense(2, use_bias=False))
    jacobian = tuned(model)(windows_of(9))[1]
    expected = model.get_weights()[0].T.reshape(2, *SHAPE)
    np.testing.assert_allclose(jacobian, np.broadcast_to(expected, (9, 2, *SHAPE)), rtol=1e-6)


@functools.cache
def in_float64(name: str) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A model, three windows and their Jacobian; XLA's of one model alone, since float32 has the others."""
    model = cast(MODELS[name](), "float64")
    windows = windows_of(3).astype("float64")
    facts = describe_call(model, SHAPE, of="output", dtype="float64")
    setting = choose(SensitivitySection(), facts, 10**9, 4)
    assert setting.xla
    kernel = Tuned(Target(model, facts), replace(setting, xla=name == "gru and simple"))
    return model, windows, kernel(windows)[1]


def differences(model: keras.Model, windows: np.ndarray, steps: list[np.ndarray]) -> list[np.ndarray]:
    """f(x + step) - f(x - step) for each step, by one call of the model."""
    moved = [windows + sign * step for step in steps for sign in (1, -1)]
    found = np.split(model(np.concatenate(moved)).numpy(), len(moved))
    return [ahead - behind for ahead, behind in zip(found[::2], found[1::2], strict=True)]


def test_float64_agrees_with_central_differences():
    model, windows, jacobian = in_float64("gru and simple")
    places = list(np.ndindex(*SHAPE))
    steps = [1e-6 * np.eye(len(places))[number].reshape(SHAPE) for number in range(len(places))]
    for (lag, feature), difference in zip(places, differences(model, windows, steps), strict=True):
        np.testing.assert_allclose(jacobian[:, :, lag, feature], difference / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "lstm"])  # it has a ReLU
def test_every_architecture_agrees_with_differences_in_float64(name):
    model, windows, jacobian = in_float64(name)
    directions = [np.random.default_rng(seed).standard_normal(windows.shape) for seed in range(3)]
    found = differences(model, windows, [1e-5 * direction for direction in directions])
    for direction, difference in zip(directions, found, strict=True):
        product = np.einsum("n...lf,nlf->n...", jacobian, direction)
        assert worst(product, difference / 2e-5) < 1e-6


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
    """Runs out of memory above `room` windows × outputs a call."""

    room = 3
    error, words = tf.errors.ResourceExhaustedError, "OOM when allocating tensor"

    def _adopt(self, setting: Setting) -> None:
        super()._adopt(setting)
        function = self._function

        class Limited:
            def get_concrete_function(limited):
                limited.graph, limited.traced = None, function.get_concrete_function()
                return limited

            def __call__(limited, first, windows):
                if len(windows) * (setting.outputs_per_call or self.target.facts.target_size) > self.room:
                    raise self.error(None, None, self.words)
                return limited.traced(first, windows)

        self._function = Limited()


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


def test_a_window_that_does_not_fit_goes_output_by_output():
    target, expected = known("simple sequence")
    kernel = Greedy(target, Setting("batch_jacobian", 2, experimental_use_pfor=False))
    kernel.room = 6
    assert worst(kernel(windows_of(7)[:5])[1], expected[:5]) < 1e-5
    assert (kernel.setting.windows_per_call, kernel.setting.outputs_per_call) == (1, 4)
    assert kernel.setting.lost[-1] == "1 windows, 8 outputs a call: out of memory"


def test_xla_says_in_words_that_memory_is_out():
    model = MODELS["dense"]()
    kernel = Greedy(Target(model, describe_call(model, SHAPE, of="output", dtype="float32")), Setting("gradient", 4))
    kernel.error, kernel.words = tf.errors.InternalError, "Failed to allocate 4096 bytes"
    kernel(windows_of(4))
    assert kernel.setting.windows_per_call == 2
    kernel.room, kernel.words = 0, "an illegal instruction was encountered"
    with pytest.raises(tf.errors.InternalError):
        kernel(windows_of(4))


def limited(monkeypatch, resident: list[int], **more) -> Tuned:
    """A kernel in a process whose resident set is what the list says, its last value for ever."""
    monkeypatch.setattr(machine, "resident_memory", lambda: resident.pop(0) if len(resident) > 1 else resident[0])
    monkeypatch.setattr(meter, "reusable", lambda: 0)
    model = MODELS["dense"]()
    target = Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))
    return Tuned(target, Setting("gradient", 16), limit=1000, **more)


def test_a_call_projected_over_the_limit_is_never_made(monkeypatch):
    kernel = limited(monkeypatch, [600], call_bytes=1500)
    windows = windows_of(20)
    assert worst(kernel(windows)[1], tape_jacobian(kernel.target.model, windows)) < 1e-5
    assert kernel.setting.windows_per_call == 4
    assert kernel.call_bytes == 375
    assert kernel.setting.lost[0] == "16 windows a call: 1.5 kB projected, 400 B there"


def test_a_window_that_cannot_fit_says_what_it_needs_and_what_is_there(monkeypatch):
    kernel = limited(monkeypatch, [1200], call_bytes=1600)
    with pytest.raises(MemoryError, match="need 100 B, and 0 B are there"):
        kernel(windows_of(2))


def test_a_process_that_outgrows_its_limit_halves_once_for_each_growth(monkeypatch):
    resident = [500, 500, 1300, 1300, 1300, 1300, 1300]
    kernel = limited(monkeypatch, resident, call_bytes=10)
    kernel.limit = 1290
    windows = windows_of(100)
    assert worst(kernel(windows)[1], tape_jacobian(kernel.target.model, windows)) < 1e-5
    assert [lost.split(":")[0] for lost in kernel.setting.lost] == ["16 windows a call"]


def test_operations_that_pfor_loops_over_are_told():
    @tf.custom_gradient
    def bare(windows):
        def gradient(upstream):
            return tf.math.nextafter(upstream, upstream)  # itself

        return windows * 1.0, gradient

    source = keras.Input(SHAPE)
    through = layers.Lambda(bare, output_shape=SHAPE)(source)
    model = keras.Model(source, layers.Dense(2)(layers.Reshape((24,))(through)))
    kernel = tuned(model, Setting("batch_jacobian", 4))
    expected = model.get_weights()[0].T.reshape(2, *SHAPE)
    np.testing.assert_allclose(kernel(windows_of(4))[1][0], expected, rtol=1e-6)
    assert kernel.setting.lost == ("pfor: NextAfter runs one output after another",)


def test_a_model_that_xla_cannot_compile_runs_without_it():
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


def test_a_concrete_function_is_called_with_tensors_in_order():
    weight = tf.Variable(3.0)
    function = tf.function(lambda one, other: (weight * one - other,))
    given = [tf.constant(2.0), tf.constant(1.0)]
    traced = function.get_concrete_function(*given)
    assert hasattr(traced, "_call_flat")  # or every call takes 0.1 ms longer
    assert called_flat(traced)(given)[0] == called_flat(function)(given)[0] == 5
    weight.assign(4.0)
    assert called_flat(traced)(given)[0] == 7
