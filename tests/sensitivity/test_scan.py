"""The scan kernel against the tape, closed forms and finite differences."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers, ops

import sensitivity
from sensitivity import walks
from sensitivity.candidates import MOST_OPERATIONS, choose, families, halved
from sensitivity.engine import Tuned
from sensitivity.errors import Refused
from sensitivity.job import SensitivitySection
from sensitivity.loading import cast
from sensitivity.model import Target
from sensitivity.plan import call_memory
from sensitivity.setting import Setting
from sensitivity.walks import FEW_ROWS
from tests.conftest import sequential, tape_jacobian, worst
from tests.describing import describe_call

SHAPE = (6, 3)
SEQUENCE = {"return_sequences": True}


class Leaky(layers.Layer):
    """A user's cell: two states, and an output that is neither of them."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units, self.state_size, self.output_size = units, [units, units], units + 1

    def build(self, shape):
        self.inner = self.add_weight(shape=(shape[-1] + self.units, self.units))
        self.outer = self.add_weight(shape=(self.units, self.units + 1))

    def call(self, inputs, states):
        hidden, memory = states
        hidden = ops.tanh(ops.concatenate([inputs, hidden], -1) @ self.inner)
        memory = 0.9 * memory + hidden * states[0]
        return ops.sin(memory @ self.outer), [hidden, memory]


def branches() -> keras.Model:
    source = keras.Input(SHAPE)
    hidden = layers.Concatenate()([source, layers.LSTM(4, **SEQUENCE)(source)])
    deep = layers.GRU(3, **SEQUENCE)(layers.LayerNormalization()(layers.Dense(5, "elu")(hidden)))
    both = layers.Dropout(0.4)(layers.Concatenate()([deep, hidden, source]))
    return weighted(keras.Model(source, layers.TimeDistributed(layers.Dense(2, "tanh"))(both)))


def residual() -> keras.Model:
    source = keras.Input(SHAPE)
    hidden = layers.Dense(4)(source)
    for layer in (layers.LSTM(4, **SEQUENCE), layers.GRU(4, **SEQUENCE)):
        hidden = layers.LayerNormalization()(hidden + layer(hidden))
    return weighted(keras.Model(source, layers.Dense(2)(hidden)))


def weighted(model: keras.Model) -> keras.Model:
    random = np.random.default_rng(1)
    values = [random.uniform(-0.5, 0.5, weight.shape) for weight in model.weights]
    variances = ["variance" in weight.path for weight in model.weights]
    model.set_weights([np.abs(v) if positive else v for v, positive in zip(values, variances, strict=True)])
    return model


def stepped(numbers):
    return ops.cast(numbers > 0, numbers.dtype)


def running(numbers):
    return ops.tanh(ops.cumsum(numbers, -1))


def causal(filters: int, size: int, activation: str | None, **options: Any) -> layers.Conv1D:
    return layers.Conv1D(filters, size, padding="causal", activation=activation, **options)


def stacked() -> keras.Model:
    cells = [layers.LSTMCell(4), layers.GRUCell(3, reset_after=False), layers.SimpleRNNCell(4)]
    return sequential(SHAPE, layers.RNN(layers.StackedRNNCells(cells), **SEQUENCE), layers.Dense(2))


MODELS = {
    "lstm": lambda: sequential(SHAPE, layers.LSTM(4, **SEQUENCE), layers.Dense(2)),
    "gru": lambda: sequential(
        SHAPE, layers.GRU(4, use_bias=False, **SEQUENCE), layers.TimeDistributed(layers.Dense(1))
    ),
    "gru, reset before": lambda: sequential(SHAPE, layers.GRU(4, reset_after=False, **SEQUENCE)),
    "simple": lambda: sequential(SHAPE, layers.SimpleRNN(4, "sigmoid", **SEQUENCE), layers.Dense(2), layers.Dense(1)),
    "last step": lambda: sequential(SHAPE, layers.GRU(4, **SEQUENCE), layers.LSTM(3), layers.Dense(5, "tanh")),
    "many outputs of the last step": lambda: sequential(SHAPE, layers.LSTM(4), layers.Dense(6), layers.Reshape((3, 2))),
    "softmax inside": lambda: sequential(SHAPE, layers.LSTM(4, activation="softmax", **SEQUENCE)),
    "gates without a derivative": lambda: sequential(SHAPE, layers.LSTM(4, recurrent_activation=stepped, **SEQUENCE)),
    "units that see one another": lambda: sequential(SHAPE, layers.SimpleRNN(4, running, **SEQUENCE), layers.Dense(9)),
    "a user's cell": lambda: sequential(SHAPE, layers.RNN(Leaky(3), **SEQUENCE), layers.LSTM(3, **SEQUENCE)),
    "stacked cells": stacked,
    "branches": branches,
    "residual": residual,
    "a convolution before": lambda: sequential(SHAPE, causal(4, 3, "tanh"), layers.GRU(3, **SEQUENCE), layers.Dense(2)),
    "convolutions": lambda: sequential(SHAPE, causal(4, 2, "gelu"), causal(3, 3, None, dilation_rate=2)),
    "no channel axis": lambda: sequential(SHAPE, layers.LSTM(4, **SEQUENCE), layers.Dense(1), layers.Flatten()),
}


ODD = {
    *("softmax inside", "gates without a derivative", "units that see one another", "a user's cell", "stacked cells"),
    *("convolutions", "no channel axis"),
}
IN_ALL_SEGMENTS = {"lstm", "convolutions"}  # that the product takes


@functools.cache
def known(name: str) -> tuple[Target, np.ndarray]:
    """One of the models, and its Jacobian by the tape for six windows."""
    model = MODELS[name]()
    return target_of(model), tape_jacobian(model, windows_of(6))


def windows_of(count: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((count, *shape)).astype("float32")


def target_of(model: keras.Model, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Target:
    return Target(model, describe_call(model, shape, of="output", dtype=dtype))


def scan(of: keras.Model | Target, windows: np.ndarray, per_call: int = 4, **knobs: Any) -> np.ndarray:
    target = of if isinstance(of, Target) else target_of(of, windows.shape[1:], str(windows.dtype))
    prediction, jacobian = Tuned(target, Setting("scan", per_call, **knobs))(windows)
    np.testing.assert_allclose(prediction, target(windows), rtol=1e-4, atol=1e-5)
    return jacobian


def none_sees_what_comes_later(found: np.ndarray) -> bool:
    """Whether the upper triangle of `(batch, step, output, step, feature)` is exactly zero."""
    return not any(found[:, step, :, step + 1 :].any() for step in range(found.shape[1]))


@pytest.mark.parametrize("name", MODELS)
def test_a_scan_equals_the_tape(name, request):
    """Without XLA only what random stacks, below, have not."""
    if name not in IN_ALL_SEGMENTS:
        request.getfixturevalue("one_segment")
    target, expected = known(name)
    for xla in (True, False) if name in ODD else (True,):
        found = scan(target, windows_of(6), xla=xla)
        assert found.shape == expected.shape
        assert worst(found, expected) < 1e-5
        if len(expected.shape) == 5 and expected.shape[1] == SHAPE[0]:  # an output a step
            assert none_sees_what_comes_later(found)


@pytest.mark.parametrize(
    ("name", "outputs", "xla"), [("lstm", 2, False), ("lstm", 10, True), ("residual", 8, False), ("last step", 3, True)]
)
def test_outputs_are_split_over_calls(two_segments, name, outputs, xla):
    target, expected = known(name)
    found = scan(target, windows_of(6)[:3], xla=xla, outputs_per_call=outputs)
    assert worst(found, expected[:3]) < 1e-5


def test_many_rows_and_few_are_pulled_back_alike():
    """Few go through the gates, many through matrices."""
    for outputs in (FEW_ROWS - 1, FEW_ROWS):
        model, windows = sequential(SHAPE, layers.GRU(4), layers.Dense(outputs)), windows_of(3)
        assert worst(scan(model, windows), tape_jacobian(model, windows)) < 1e-5


@pytest.mark.parametrize(("name", "xla"), [("residual", False), ("last step", True)])
def test_float64_agrees_with_central_differences(name, xla):
    model = cast(MODELS[name](), "float64")
    windows = windows_of(2).astype("float64")
    jacobian = scan(model, windows, xla=xla)
    for seed in range(3):
        direction = np.random.default_rng(seed).standard_normal(windows.shape)
        step = 1e-5 * direction
        ahead, behind = np.split(np.asarray(model(np.concatenate([windows + step, windows - step]))), 2)
        product = np.einsum("n...lf,nlf->n...", jacobian, direction)
        assert worst(product, (ahead - behind) / 2e-5) < 1e-6


def test_a_linear_cell_has_powers_of_its_matrix_as_jacobian():
    model = sequential((5, 2), layers.SimpleRNN(3, activation="linear", use_bias=False, **SEQUENCE))
    kernel, recurrent = (np.asarray(weight, "float64") for weight in model.get_weights())
    found = scan(model, windows_of(1, (5, 2)), 1)[0]
    for step, source in np.ndindex(5, 5):
        power = kernel @ np.linalg.matrix_power(recurrent, max(step - source, 0))
        expected = power.T if source <= step else np.zeros((3, 2))
        np.testing.assert_allclose(found[step, :, source], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["whole", "blocks"])
def test_an_overflow_stays_in_the_rows_that_it_reaches(two_segments, kind, monkeypatch):
    """A step that overflows spoils the outputs from there on, and none before."""
    monkeypatch.setattr(walks, "WORTH", 0.0 if kind == "blocks" else 1e9)
    monkeypatch.setattr(walks, "MOST_JOINED", 3)
    model = sequential(SHAPE, layers.SimpleRNN(2, activation="exponential", **SEQUENCE))
    model.set_weights([0.2 * weight for weight in model.get_weights()])
    windows = windows_of(1)
    expected = tape_jacobian(model, windows)[0]
    windows[0, 4] = 1e4
    target = target_of(model)
    assert target.facts.walk(12).kind == kind
    for xla in (True, False):
        found = Tuned(target, Setting("scan", 1, xla=xla))(windows)[1][0]
        assert worst(found[:4], expected[:4]) < 1e-5
        assert not np.isfinite(found[4:]).all()


LAYERS = {
    "lstm": lambda units: layers.LSTM(units, **SEQUENCE),
    "gru": lambda units: layers.GRU(units, **SEQUENCE),
    "gru before": lambda units: layers.GRU(units, reset_after=False, **SEQUENCE),
    "simple": lambda units: layers.SimpleRNN(units, **SEQUENCE),
    "dense": lambda units: layers.Dense(units, "softplus"),
    "norm": lambda units: layers.LayerNormalization(),
    "drop": lambda units: layers.Dropout(0.2),
    "batch": lambda units: layers.BatchNormalization(),
    "per step": lambda units: layers.TimeDistributed(layers.Dense(units, "gelu")),
}
STACKS = st.tuples(
    st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.integers(3, 5)), min_size=1, max_size=4),
    st.sampled_from(["sequence", "last", "residual", "input beside"]),
    st.tuples(st.integers(1, 5), st.integers(3, 4)),
    st.sampled_from([False, False, False, True]),  # XLA takes seconds, and has every kind of layer above
)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(STACKS)
def test_random_stacks_equal_the_tape(two_segments, stack):
    parts, shape_of, shape, xla = stack
    source = hidden = keras.Input(shape)
    for kind, units in [*parts, ("lstm", 3)]:
        found = LAYERS[kind](units)(hidden)
        hidden = found + hidden if shape_of == "residual" and found.shape == hidden.shape else found
        if shape_of == "input beside":
            hidden = layers.Concatenate()([hidden, source])
    hidden = layers.GRU(2)(hidden) if shape_of == "last" else hidden
    model = weighted(keras.Model(source, layers.Dense(2)(hidden)))
    windows = windows_of(2, shape)
    assert worst(scan(model, windows, 2, xla=xla), tape_jacobian(model, windows)) < 1e-5


# ---- long sequences, and lags up to a limit ----------------------------------------------------------

LONG = (13, 3)


@pytest.fixture(scope="module")
def deep():
    """A model with something before, between and after its layers, and its Jacobian by the tape."""
    between = [layers.LayerNormalization(), causal(3, 2, "tanh"), layers.GRU(3, **SEQUENCE), layers.Dense(2)]
    model = sequential(LONG, layers.Dense(4, "tanh"), layers.LSTM(5, **SEQUENCE), *between)
    return model, tape_jacobian(model, windows_of(3, LONG))


@pytest.mark.parametrize(("most", "xla"), [(2, True), (5, False), (13, False)])
def test_blocks_that_are_joined_equal_one_walk(two_segments, deep, most, xla, monkeypatch):
    monkeypatch.setattr(walks, "WORTH", 0.0)
    monkeypatch.setattr(walks, "MOST_JOINED", most)
    model, expected = deep
    assert target_of(model, LONG).facts.walk(46).kind == "blocks"
    found = scan(model, windows_of(3, LONG), xla=xla)
    assert worst(found, expected) < 1e-5
    assert none_sees_what_comes_later(found)


def by_lag(jacobian: np.ndarray, lags: int) -> np.ndarray:
    """`(batch, step, output, step, feature)` → `(batch, step, output, lag, feature)`, oldest first, by plain loops."""
    found = np.zeros((*jacobian.shape[:3], lags, jacobian.shape[-1]), jacobian.dtype)
    for step in range(jacobian.shape[1]):
        for lag in range(min(lags, step + 1)):
            found[:, step, :, lags - 1 - lag] = jacobian[:, step, :, step - lag]
    return found


@pytest.mark.parametrize(
    ("kind", "max_lag", "outputs"), [("spans", 0, None), ("blocks", 4, None), ("spans", 4, 10), ("blocks", 12, None)]
)
def test_lags_up_to_a_limit_are_those_of_the_whole(two_segments, deep, kind, max_lag, outputs, monkeypatch):
    monkeypatch.setattr(walks, "LEAST_LENGTH", 3)
    monkeypatch.setattr(walks, "MATRICES", 0 if kind == "blocks" else 10)
    model, expected = deep
    facts = describe_call(model, LONG, of="output", dtype="float32", max_lag=max_lag)
    facts = replace(facts, scan=replace(facts.scan, states=1 if kind == "blocks" else facts.scan.states))
    assert facts.walk(outputs or facts.target_size).kind == kind
    kernel = Tuned(Target(model, facts), Setting("scan", 3, outputs_per_call=outputs))
    _, found = kernel(windows_of(3, LONG))
    lags = min(max_lag + 1, LONG[0])
    assert found.shape == (3, 13, 2, lags, 3)
    assert worst(found, by_lag(expected, lags)) < 1e-5


@pytest.mark.parametrize("kernel", ["scan", "gradient", "batch_jacobian"])
def test_of_outputs_at_the_end_every_kernel_keeps_the_newest_lags(kernel):
    model = sequential(SHAPE, layers.LSTM(4), layers.Dense(1))
    facts = describe_call(model, SHAPE, of="output", dtype="float32", max_lag=2)
    _, found = Tuned(Target(model, facts), Setting(kernel, 4, experimental_use_pfor=False))(windows_of(5))
    assert worst(found, tape_jacobian(model, windows_of(5))[:, :, -3:]) < 1e-5


@pytest.mark.parametrize("wanted", [{"kernel": "batch_jacobian"}, {"kernel": "forward"}, {"parallel_iterations": 2}])
def test_no_other_kernel_is_taken_where_lags_count_from_each_output(deep, wanted):
    facts = describe_call(deep[0], LONG, of="output", dtype="float32", max_lag=0)
    with pytest.raises(Refused, match="each output's own step"):
        choose(SensitivitySection(**wanted), facts, 10**9, 8)
    assert {setting.kernel for setting in families(SensitivitySection(), facts)} == {"scan"}


def test_a_forecast_of_as_many_steps_as_the_window_counts_lags_from_its_end():
    model = sequential(SHAPE, layers.LSTM(4), layers.Dense(6), layers.Reshape((6, 1)))
    facts = describe_call(model, SHAPE, of="output", dtype="float32", max_lag=1)
    assert not facts.by_output_step
    _, found = Tuned(Target(model, facts), Setting("scan", 4))(windows_of(3))
    assert worst(found, tape_jacobian(model, windows_of(3))[..., -2:, :]) < 1e-5


def test_a_limit_where_lags_mean_nothing_is_refused():
    both = sequential(SHAPE, layers.Bidirectional(layers.LSTM(2, **SEQUENCE)))
    with pytest.raises(Refused, match="(?s)max_lag.*bidirectional.*goes backwards too"):
        describe_call(both, SHAPE, of="output", dtype="float32", max_lag=2)
    flat = sequential((9,), layers.Dense(2))
    with pytest.raises(Refused, match="flat input"):
        describe_call(flat, (9,), of="output", dtype="float32", max_lag=2)


# ---- choice ------------------------------------------------------------------------------------------


def test_causal_convolutions_are_timed_both_ways():
    facts = known("convolutions")[0].facts
    assert {setting.kernel for setting in families(SensitivitySection(), facts)} == {"scan", "batch_jacobian"}
    assert choose(SensitivitySection(), facts, 10**9, 64).kernel == "batch_jacobian"


def test_recurrent_models_are_scanned_unless_something_else_is_asked():
    facts = known("residual")[0].facts
    assert choose(SensitivitySection(), facts, 10**9, 64).kernel == "scan"
    assert choose(SensitivitySection(experimental_use_pfor=True), facts, 10**9, 64).kernel == "batch_jacobian"
    unfit = target_of(sequential(SHAPE, layers.Bidirectional(layers.LSTM(2)))).facts
    instead = choose(SensitivitySection(), unfit, 10**9, 64)
    assert instead.kernel == "batch_jacobian"
    (lost,) = instead.lost
    assert lost.startswith("scan: layer 'bidirectional")
    assert lost.endswith("(Bidirectional) goes backwards too")
    with pytest.raises(Refused, match="bidirectional.*goes backwards too"):
        choose(SensitivitySection(kernel="scan"), unfit, 10**9, 64)
    with pytest.raises(ValueError, match='"scan" together with experimental_use_pfor'):
        SensitivitySection(kernel="scan", experimental_use_pfor=True)


def test_an_unrolled_layer_is_scanned_by_xla_all_the_same():
    facts = target_of(sequential((70, 1), layers.LSTM(2, unroll=True, **SEQUENCE)), (70, 1)).facts
    assert facts.operations > MOST_OPERATIONS
    chosen = choose(SensitivitySection(), facts, 10**9, 64)
    assert (chosen.kernel, chosen.xla) == ("scan", True)


def test_outputs_are_halved_by_whole_steps():
    facts = known("lstm")[0].facts
    setting, sizes = Setting("scan", 1), []
    while setting is not None:
        sizes.append(setting.outputs_per_call)
        setting = halved(setting, facts)
    assert sizes == [None, 6, 2]
    small = call_memory(facts, Setting("scan", 1, outputs_per_call=2))
    with pytest.raises(Refused, match="single window"):
        choose(SensitivitySection(), facts, small - 1, 1)
    assert choose(SensitivitySection(), replace(facts, smooth=False), 10**9, 1).lost


# ---- by what an inner layer gives --------------------------------------------------------------------


def nested() -> keras.Model:
    inner = sequential(SHAPE, layers.LSTM(4, **SEQUENCE, name="inner"), layers.LayerNormalization())
    return sequential(SHAPE, inner, layers.GRU(3, **SEQUENCE), layers.Dense(2, "tanh"))


BEFORE = {
    "the last step": lambda: sequential(
        SHAPE, layers.LSTM(4, **SEQUENCE, name="inner"), layers.LSTM(3), layers.Dense(2)
    ),
    "every step": lambda: sequential(SHAPE, layers.Dense(4, "tanh", name="inner"), layers.GRU(3, **SEQUENCE)),
    "nested": nested,
}


@pytest.mark.parametrize("name", BEFORE)
def test_by_an_inner_layer_the_scan_begins_there(name):
    model = BEFORE[name]()
    windows = np.random.default_rng(6).standard_normal((3, *SHAPE)).astype("float32")
    found, report = sensitivity.jacobian(model, windows, wrt="inner", kernel="scan", report=True)
    tape = {"kernel": "batch_jacobian", "experimental_use_pfor": False}
    exact = sensitivity.jacobian(cast(model, "float64"), windows, wrt="inner", **tape)
    assert worst(found, exact) < 1e-5
    expected = cast(model, "float64")(windows).numpy()
    assert worst(report.beside["prediction"], expected) < 1e-5
    vectors = np.random.default_rng(7).standard_normal((2, *expected.shape[1:]))
    pulled = sensitivity.vjp(model, windows, vectors, wrt="inner", kernel="scan")
    assert (
        worst(pulled.reshape(3, 2, -1), np.einsum("vo,nos->nvs", vectors.reshape(2, -1), flat(exact, vectors))) < 1e-5
    )


def flat(jacobian: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """`(batch, output, source)`"""
    return jacobian.reshape(len(jacobian), vectors[0].size, -1)
