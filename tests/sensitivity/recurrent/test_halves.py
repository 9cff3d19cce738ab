from __future__ import annotations

import keras
import pytest
from keras import layers

from sensitivity.errors import Refused
from sensitivity.recurrent.halves import halves_of, named
from sensitivity.recurrent.halves import layers as recurrent_layers


class OwnLoop(layers.LSTM):
    def call(self, sequences, initial_state=None, mask=None, training=False):
        return super().call(2 * sequences, initial_state, mask, training)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    source = keras.Input((5, 2))
    inner = keras.Sequential([keras.Input((5, 2)), layers.GRU(3, return_sequences=True, name="deep")], name="inner")
    both = layers.Bidirectional(layers.LSTM(2, name="part", return_sequences=True), name="both")(inner(source))
    own = OwnLoop(2, name="own", return_sequences=True)(both)
    return keras.Model(source, layers.SimpleRNN(1, name="last")(own))


def test_layers_are_found_wherever_they_stand(model):
    assert recurrent_layers(model) == ("deep", "both", "last")


def test_a_bidirectional_layer_has_two_passes_and_others_one(model):
    assert [half.direction for half in halves_of(model, "both")] == ["forward", "backward"]
    assert [half.gates for half in halves_of(model, "deep")] == [("z", "r", "h")]
    (backward,) = halves_of(model, "backward_part")
    assert (backward.name, backward.direction) == ("both", "backward")


@pytest.mark.parametrize("layer", [None, "own", "nowhere", "inner"])
def test_others_are_refused_with_those_that_there_are(model, layer):
    with pytest.raises(Refused, match="deep, both, last"):
        halves_of(model, layer)


def test_names_that_repeat_are_refused_and_layers_are_not():
    source = keras.Input((5, 2))
    inner = keras.Sequential([keras.Input((5, 2)), layers.GRU(2, return_sequences=True, name="same")], name="inner")
    last = layers.GRU(2, name="same")
    model = keras.Model(source, last(inner(source)))
    with pytest.raises(Refused, match="give the layer itself"):
        halves_of(model, "same")
    assert halves_of(model, last)[0].rnn is last
    both = (model.get_layer("inner").get_layer("same"), last)
    assert named(model, ["same"]) == named(model, []) == both


def test_several_layers_and_halves_are_named_at_once(model):
    assert [layer.name for layer in named(model, [])] == ["deep", "both", "last"]
    assert [layer.name for layer in named(model, ["backward_part", "last", "last"])] == ["last", "backward_part"]
    with pytest.raises(Refused, match="nowhere[\\s\\S]*deep, both, last"):
        named(model, ["deep", "nowhere"])


def test_what_is_no_model_is_refused():
    with pytest.raises(Refused, match=r"keras\.Model"):
        recurrent_layers("model")
