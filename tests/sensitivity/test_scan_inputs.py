"""The scan of models with several inputs, and past inner layers: by one of them, the others held; against the tape."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from sensitivity.engine import Tuned
from sensitivity.errors import Refused
from sensitivity.facts import CallFacts
from sensitivity.given import Given
from sensitivity.loading import cast
from sensitivity.model import Target, described, described_call, shaped_call, target_of
from sensitivity.products.vjp import Vjp
from sensitivity.sections import WindowsSection
from sensitivity.setting import Setting
from sensitivity.sources import given_by_layer
from tests.conftest import worst

STEPS, WINDOWS = 6, 5
SEQUENCE = {"return_sequences": True}
RANDOM = np.random.default_rng(5)
WEATHER = RANDOM.standard_normal((WINDOWS, STEPS, 2)).astype("float32")
LEVEL = RANDOM.standard_normal((WINDOWS, STEPS, 1)).astype("float32")
FORECAST = RANDOM.standard_normal((WINDOWS, 3, 2)).astype("float32")
SITE = RANDOM.standard_normal((WINDOWS, 3)).astype("float32")
KIND = np.arange(WINDOWS) % 4
CLOSE = 1e-5


def weather() -> Any:
    return keras.Input((STEPS, 2), name="weather")


def site() -> Any:
    return keras.Input((3,), name="site")


def at_every_step(static: Any) -> Any:
    return layers.RepeatVector(STEPS)(static)


def weighted(inputs: list[Any], outputs: Any) -> keras.Model:
    model, random = keras.Model(inputs, outputs), np.random.default_rng(1)
    model.set_weights([random.uniform(-0.5, 0.5, weight.shape) for weight in model.get_weights()])
    return model


def static_beside_every_step() -> keras.Model:
    """What a site is enters the recurrent layer, and what reads its states."""
    x, s = weather(), site()
    what = at_every_step(layers.Dense(2, "tanh")(s))
    states = layers.LSTM(4, name="states", **SEQUENCE)(layers.Concatenate()([x, what]))
    read = layers.Concatenate()([layers.GRU(3, name="deep", **SEQUENCE)(states), x, what])
    return weighted([x, s], layers.Dense(2)(layers.LayerNormalization()(read)))


def static_after_the_last_step() -> keras.Model:
    x, s = weather(), site()
    return weighted([s, x], layers.Dense(5, "tanh")(layers.Concatenate()([layers.LSTM(4)(x), s])))


def two_series() -> keras.Model:
    x, level = weather(), keras.Input((STEPS, 1), name="level")
    gate = layers.Dense(2, "sigmoid")(level)
    return weighted([x, level], layers.Dense(2)(layers.GRU(4, **SEQUENCE)(layers.Multiply()([x, gate]))))


def looked_up() -> keras.Model:
    """A site by its number."""
    x, kind = weather(), keras.Input((), name="kind", dtype="int32")
    known = at_every_step(layers.Embedding(4, 3)(kind))
    return weighted([x, kind], layers.Dense(2)(layers.LSTM(4, **SEQUENCE)(layers.Concatenate()([x, known]))))


def two_spans() -> keras.Model:
    """A forecast of other steps, read in both directions, and attended to as a whole by the last state."""
    x, ahead = weather(), keras.Input((3, 2), name="forecast")
    both = layers.Bidirectional(layers.LSTM(2, **SEQUENCE))(ahead)
    last = layers.GRU(4)(x)
    seen = layers.Dot((1, 2))([last, both])
    return weighted([x, ahead], layers.Dense(3)(layers.Concatenate()([last, seen])))


def whole_and_by_step() -> keras.Model:
    """The same held sequence beside every step, and as a whole after the last one."""
    x, level = weather(), keras.Input((STEPS, 1), name="level")
    hidden = layers.Dense(4)(level)
    last = layers.GRU(4)(layers.Concatenate()([x, hidden]))
    return weighted([x, level], layers.Dense(3)(layers.Dot((1, 2))([last, hidden])))


MODELS = {
    "static": (static_beside_every_step, {"weather": WEATHER, "site": SITE}),
    "static after the last step": (static_after_the_last_step, {"weather": WEATHER, "site": SITE}),
    "two series": (two_series, {"weather": WEATHER, "level": LEVEL}),
    "looked up": (looked_up, {"weather": WEATHER, "kind": KIND}),
    "two spans": (two_spans, {"weather": WEATHER, "forecast": FORECAST}),
    "whole and by step": (whole_and_by_step, {"weather": WEATHER, "level": LEVEL}),
}


class Case:
    """A model as the engine has it: windows in which its inputs are packed, and the facts."""

    def __init__(self, model: keras.Model, given: dict[str, np.ndarray], dtype: str = "float32", **asked: Any) -> None:
        self.model = model
        self.windows, packing = Given(given).packed(model, "output", dtype)
        asked = {"of": "output", "wrt": "weather", **asked}
        self.facts = described_call(model, self.windows.shape[1:], dtype=dtype, packing=packing, **asked)
        self.of = asked["of"]

    def target(self, product: Any = None) -> Target:
        facts = self.facts if product is None else shaped_call(self.facts, product)
        return target_of(self.model, facts, self.of, product)

    def scanned(self, per_call: int = 4, **knobs: Any) -> np.ndarray:
        target = self.target()
        prediction, jacobian = Tuned(target, Setting("scan", per_call, **knobs))(self.windows)
        np.testing.assert_allclose(prediction, target(tf.constant(self.windows)), rtol=1e-4, atol=1e-5)
        return jacobian

    def taped(self) -> np.ndarray:
        """By the plainest tape, of float64."""
        twin = Case(cast(self.model, "float64"), unpacked(self), "float64", of=self.of, wrt=self.facts.source.name)
        target, given = twin.target(), (tf.constant(twin.windows),)
        start = target.start(given)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(start)
            found = target.at(given, start)
        return tape.batch_jacobian(found, start, experimental_use_pfor=False).numpy()


def unpacked(case: Case) -> dict[str, np.ndarray]:
    return {part.name: part.of(case.windows) for part in case.facts.packing.inputs}


def case_of(name: str, **asked: Any) -> Case:
    model, given = MODELS[name]
    return Case(model(), given, **asked)


@functools.cache
def taped(name: str, **asked: str) -> np.ndarray:
    return case_of(name, **asked).taped()


@pytest.mark.parametrize("name", MODELS)
def test_by_one_input_it_equals_the_tape(name):
    case = case_of(name)
    assert case.facts.scan is not None, case.facts.no_scan
    for xla in (True, False) if name == "static" else (False,):
        assert worst(case.scanned(xla=xla), taped(name)) < CLOSE


def test_by_the_other_series():
    case = case_of("two series", wrt="level")
    assert worst(case.scanned(), taped("two series", wrt="level")) < CLOSE


def test_in_float64():
    model, given = MODELS["static"]
    case = Case(cast(model(), "float64"), given, "float64")
    assert worst(case.scanned(), taped("static")) < 1e-12


@pytest.mark.parametrize(("name", "outputs"), [("static", 4), ("static after the last step", 2)])
def test_outputs_are_split_over_calls(name, outputs):
    case = case_of(name)
    assert worst(case.scanned(outputs_per_call=outputs), taped(name)) < CLOSE


@pytest.mark.parametrize("kind", ["blocks", "spans"])
def test_held_sequences_pass_side_by_side_walks(kind, monkeypatch):
    """Lags up to a limit, by both ways that there are for them."""
    case = case_of("static", max_lag=2)
    facts = replace(case.facts, scan=replace(case.facts.scan, **SIDE_BY_SIDE[kind]))
    assert facts.walk(facts.rows).kind == kind
    case.facts = facts
    found, every = case.scanned(), taped("static")
    for step in range(STEPS):
        for lag in range(3):
            expected = every[:, step, :, step - lag] if lag <= step else 0 * every[:, step, :, 0]
            np.testing.assert_allclose(found[:, step, :, 2 - lag], expected, atol=CLOSE * abs(every).max())


SIDE_BY_SIDE = {"blocks": {"states": 0, "outputs": 2}, "spans": {"states": 10**6, "outputs": 2}}


@pytest.mark.parametrize("name", ["static", "two spans"])
def test_vectors_on_the_way_back(name):
    case = case_of(name)
    vectors = RANDOM.standard_normal((2, *case.facts.target_shape)).astype("float32")
    every = taped(name).reshape(WINDOWS, case.facts.target_size, *WEATHER.shape[1:])
    _, found = Tuned(case.target(Vjp(vectors)), Setting("scan", 4))(case.windows)
    assert worst(found, np.einsum("vo,nols->nvls", vectors.reshape(2, -1), every)) < CLOSE


def test_as_far_as_an_inner_layer():
    case = case_of("static", of="deep")
    assert worst(case.scanned(), case.taped()) < CLOSE


def test_from_an_inner_layer_on_past_which_inputs_reach_the_output():
    case = case_of("static", wrt="states")
    assert case.facts.source.shape == (STEPS, 4)
    assert worst(case.scanned(), case.taped()) < CLOSE


def test_the_window_itself_is_held_where_it_passes_an_inner_layer():
    x = weather()
    states = layers.LSTM(4, name="states", **SEQUENCE)(x)
    model = weighted([x], layers.Dense(2)(layers.Concatenate()([layers.GRU(3, **SEQUENCE)(states), x])))
    facts = described_call(model, WEATHER.shape[1:], of="output", wrt="states", dtype="float32")
    _, found = Tuned(target_of(model, facts, "output"), Setting("scan", WINDOWS))(WEATHER)
    states = given_by_layer(model, model.get_layer("states"), tf.constant(WEATHER))
    rest = keras.Model([model.get_layer("states").output, x], model.output)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(states)
        outputs = rest([states, tf.constant(WEATHER)])
    assert worst(found, tape.batch_jacobian(outputs, states, experimental_use_pfor=False).numpy()) < CLOSE


def test_by_one_of_the_columns_of_a_window():
    """As a job has them: of a static input the last step's."""
    columns = {"weather": ["rain", "heat"], "site": ["area", "slope", "height"]}
    model = static_beside_every_step()
    facts = described(model, WindowsSection(length=STEPS), 5, columns=columns, wrt="weather")
    windows = np.concatenate([WEATHER, np.repeat(SITE[:, None], STEPS, 1)], -1)
    assert facts.scan is not None, facts.no_scan
    _, found = Tuned(target_of(model, facts, "output"), Setting("scan", WINDOWS))(windows)
    assert worst(found, taped("static")) < CLOSE


def test_by_all_inputs_that_stand_side_by_side():
    """Columns of a window's common steps."""
    columns = {"weather": ["rain", "heat"], "level": ["level"]}
    facts = described(two_series(), WindowsSection(length=STEPS), 3, columns=columns)
    model, windows = two_series(), np.concatenate([WEATHER, LEVEL], -1)
    assert facts.scan is not None, facts.no_scan
    _, found = Tuned(target_of(model, facts, "output"), Setting("scan", WINDOWS))(windows)
    for wrt, part in (("weather", slice(0, 2)), ("level", slice(2, 3))):
        assert worst(found[..., part], taped("two series", wrt=wrt)) < CLOSE


# ---- what is no scan ------------------------------------------------------------------------------------


def broadcast() -> keras.Model:
    x, s = weather(), site()
    return weighted([x, s], layers.GRU(2, **SEQUENCE)(x * ops.expand_dims(layers.Dense(2)(s), 1)))


def masked() -> keras.Model:
    x, kinds = weather(), keras.Input((STEPS,), name="kind", dtype="int32")
    known = layers.Embedding(4, 2, mask_zero=True)(kinds)
    return weighted([x, kinds], layers.GRU(2, **SEQUENCE)(layers.Add()([x, known])))


def mixed() -> keras.Model:
    """Each step of the weather with all of the level's."""
    x, level = weather(), keras.Input((STEPS, 1), name="level")
    return weighted([x, level], layers.GRU(2, **SEQUENCE)(layers.Dot((2, 1))([layers.Dense(STEPS)(x), level])))


def apart() -> keras.Model:
    x, level = weather(), keras.Input((STEPS, 1), name="level")
    return weighted([x, level], [layers.GRU(2, **SEQUENCE)(x), layers.GRU(2, **SEQUENCE)(level)])


def only_held() -> keras.Model:
    x, level = weather(), keras.Input((STEPS, 1), name="level")
    return weighted([x, level], layers.Concatenate()([layers.Dense(2)(x), layers.GRU(2, **SEQUENCE)(level)]))


@pytest.mark.parametrize(
    ("model", "beside", "said"),
    [
        (broadcast, {"site": SITE}, "multiply.*does not have their steps"),
        (masked, {"kind": np.tile(KIND[:, None], STEPS)}, "add.*masks steps"),
        (mixed, {"level": LEVEL}, "dot.*alone and alike"),
        (apart, {"level": LEVEL}, "some of its outputs do not depend on the source"),
        (only_held, {"level": LEVEL}, "no recurrent layer on the way"),
    ],
)
def test_why_not(model, beside, said):
    facts: CallFacts = Case(model(), {"weather": WEATHER, **beside}).facts
    assert facts.scan is None
    assert re.search(said, facts.no_scan), facts.no_scan


def test_a_static_input_is_no_sequence():
    facts = case_of("static", wrt="site").facts
    assert facts.no_scan == "the model's input has no time axis"


def test_inputs_of_fewer_steps_are_not_side_by_side():
    columns = {"weather": ["rain", "heat"], "site": ["a", "b", "c"]}
    facts = described(static_beside_every_step(), WindowsSection(length=STEPS), 5, columns=columns)
    assert facts.no_scan == "input 'site' does not take all steps of a window"


def test_a_lag_limit_is_refused_where_outputs_may_see_later_steps():
    with pytest.raises(Refused, match="max_lag"):
        Case(mixed(), {"weather": WEATHER, "level": LEVEL}, max_lag=2)
