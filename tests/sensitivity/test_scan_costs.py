"""What a scan takes: memory by rule against the compiler's account, and a graph that does not grow with time."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from keras import layers

from sensitivity.engine import Tuned
from sensitivity.model import Target
from sensitivity.plan import call_memory, result_bytes
from sensitivity.setting import Setting
from tests.conftest import sequential
from tests.describing import describe_call

SEQUENCE = {"return_sequences": True}


@pytest.mark.parametrize(
    ("kind", "steps", "wanted", "head"),
    [
        ("whole", 60, {}, 1),
        ("blocks", 40, {}, 12),
        ("blocks", 150, {"max_lag": 120}, 1),
        ("spans", 150, {"max_lag": 5, "outputs": [0, 1]}, 3),
        ("last step", 30, {"max_lag": 9}, 4),
    ],
)
def test_the_rule_covers_what_the_compiler_states(kind, steps, wanted, head):
    """The Jacobian's own bytes twice on the host, and what XLA takes for the rest."""
    recurrent = layers.LSTM(24, return_sequences=kind != "last step")
    target_model = sequential((steps, 3), recurrent, layers.Dense(32, "tanh"), layers.Dense(head))
    facts = describe_call(target_model, (steps, 3), of="output", dtype="float32", **wanted)
    assert facts.walk(facts.target_size).kind == ("whole" if kind == "last step" else kind)
    setting = Setting("scan", 8, xla=True)
    taken = Tuned(Target(target_model, facts), setting).stated_bytes() + 8 * 2 * result_bytes(facts)
    assert 0.4 * call_memory(facts, setting) < taken < call_memory(facts, setting)


class Wide(layers.Layer):
    """Two numbers a step, through many."""

    def build(self, shape):
        self.out, self.back = (self.add_weight(shape=pair) for pair in ((shape[-1], 600), (600, 2)))

    @tf.function
    def call(self, inputs):
        return tf.matmul(tf.tanh(tf.matmul(inputs, self.out)), self.back)


@pytest.mark.parametrize(
    ("wide", "place"),
    [
        (Wide, "between"),
        (Wide, "after the last step"),
        (lambda: layers.Lambda(lambda x: tf.tanh(tf.repeat(x, 40, -1))[..., :2]), "after"),
        (lambda: layers.TimeDistributed(keras.Sequential([layers.Dense(600, "tanh"), layers.Dense(2)])), "between"),
    ],
    ids=["layer", "head", "lambda", "model"],
)
def test_the_rule_covers_what_a_layer_computes_within(two_segments, wide, place):
    after = {"between": [layers.SimpleRNN(16, **SEQUENCE), layers.Dense(1)], "after the last step": [layers.Dense(24)]}
    recurrent = layers.LSTM(16, return_sequences=place != "after the last step")
    model = sequential((60, 3), recurrent, wide(), *after.get(place, []))
    facts = describe_call(model, (60, 3), of="output", dtype="float32")
    setting = Setting("scan", 8, xla=True)
    taken = Tuned(Target(model, facts), setting).stated_bytes() + 8 * 2 * result_bytes(facts)
    assert taken < call_memory(facts, setting)


def test_time_is_never_part_of_the_graph(two_segments):
    """So it compiles as fast for 4,000 steps as for 2,000."""

    def operations(steps: int, max_lag: int | None = None) -> int:
        model = sequential((steps, 2), layers.SimpleRNN(4, **SEQUENCE), layers.Dense(1))
        facts = describe_call(model, (steps, 2), of="output", dtype="float32", max_lag=max_lag)
        graph = Tuned(Target(model, facts), Setting("scan", 1))._function.get_concrete_function().graph.as_graph_def()
        return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)

    assert operations(4000) == operations(2000)
    assert operations(4000, max_lag=2400) == operations(2000, max_lag=1200)
