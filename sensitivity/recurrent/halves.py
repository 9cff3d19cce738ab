"""The recurrent layers of a model, and the passes over time that each makes: one, or two of a `Bidirectional`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Refused
from ..layers import keras

_KINDS = (keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN, keras.layers.RNN)
_GATES: dict[type, tuple[str, ...]] = {
    keras.layers.LSTMCell: ("i", "f", "c", "o"),
    keras.layers.GRUCell: ("z", "r", "h"),
    keras.layers.SimpleRNNCell: ("h",),
}


@dataclass(frozen=True, eq=False)
class Half:
    """One pass over time. owner: the layer that the model calls. rnn: the layer that makes the pass, the same or one of
    the two within a `Bidirectional`.
    """

    owner: keras.Layer
    rnn: keras.Layer

    @property
    def name(self) -> str:
        return self.owner.name

    @property
    def direction(self) -> str:
        return "backward" if self.rnn.go_backwards else "forward"

    @property
    def gates(self) -> tuple[str, ...]:
        """In the order in which the columns of the weights have them."""
        return next(gates for kind, gates in _GATES.items() if isinstance(self.rnn.cell, kind))

    @property
    def weights(self) -> list[Any]:
        """Kernel, recurrent kernel and bias, if there is one: in Keras' order."""
        cell = self.rnn.cell
        return [cell.kernel, cell.recurrent_kernel, *([] if cell.bias is None else [cell.bias])]


def layers(model: keras.Model) -> tuple[str, ...]:
    """Names of the recurrent layers that this room can look into, in the model's order, those of inner models too."""
    return tuple(owner.name for owner in _owners(_require_model(model)))


def halves_of(model: keras.Model, layer: str | keras.Layer | None = None) -> tuple[Half, ...]:
    """The passes over time of a recurrent layer, forward before backward.

    layer: its name, or itself where names repeat; one half of a `Bidirectional` alone, too. None: the only one.
    """
    owners = _owners(_require_model(model))
    wholes, candidates = [(owner, _passes(owner)) for owner in owners], _candidates(owners)
    if layer is None:
        found = wholes
    elif isinstance(layer, str):
        found = [one for one in candidates if one[0].name == layer]
    else:
        found = [one for one in candidates if one[0] is layer]
    if len(found) != 1:
        raise _refused(layer, len(found), owners)
    return found[0][1]


def named(model: keras.Model, names: Sequence[str]) -> tuple[keras.Layer, ...]:
    """Recurrent layers of those names, of layers that are called alike all, in the model's order; halves of a
    `Bidirectional` after them. Without names every layer. Raises `Refused` for a name that none has.
    """
    owners = _owners(_require_model(model))
    if not names:
        return tuple(owners)
    candidates = [layer for layer, _ in _candidates(owners)]
    for name in names:
        if name not in [layer.name for layer in candidates]:
            raise _refused(name, 0, owners)
    return tuple(layer for layer in candidates if layer.name in names)


def _candidates(owners: list[keras.Layer]) -> list[tuple[keras.Layer, tuple[Half, ...]]]:
    """What can be looked into, with its passes: layers, then each half of those that have two."""
    wholes = [(owner, _passes(owner)) for owner in owners]
    halves = {id(half.rnn): half for _, passes in wholes for half in passes if half.rnn is not half.owner}
    return [*wholes, *((half.rnn, (half,)) for half in halves.values())]


def _require_model(model: Any) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise Refused("model", given=type(model).__name__, allowed="a keras.Model", remedy="load it with Keras first")
    return model


def _owners(model: keras.Model) -> list[keras.Layer]:
    """In the order in which layers were added, which Keras' own way through them turns round."""
    found: list[keras.Layer] = []
    for layer in _flat(model):
        if _passes(layer) and layer not in found:
            found.append(layer)
    within = [half.rnn for owner in found for half in _passes(owner) if half.rnn is not owner]
    return [layer for layer in found if layer not in within]


def _flat(layer: keras.Layer) -> list[keras.Layer]:
    inner = getattr(layer, "layers", None) if isinstance(layer, keras.Model) else None
    parts = inner if inner else layer._layers
    return [layer, *(deeper for part in parts for deeper in _flat(part))]


def _passes(layer: keras.Layer) -> tuple[Half, ...]:
    if isinstance(layer, keras.layers.Bidirectional):
        both = (layer.forward_layer, layer.backward_layer)
        return tuple(Half(layer, rnn) for rnn in both) if all(map(_is_known, both)) else ()
    return (Half(layer, layer),) if _is_known(layer) else ()


def _is_known(layer: keras.Layer) -> bool:
    """Whether it is one of Keras' layers, or one derived from it, that walks over time as Keras' own does."""
    kind = next((kind for kind in _KINDS if isinstance(layer, kind)), None)
    if kind is None or type(layer).call is not kind.call or type(layer).inner_loop is not kind.inner_loop:
        return False
    return isinstance(layer.cell, tuple(_GATES))


def _refused(layer: Any, found: int, owners: list[keras.Layer]) -> Refused:
    names = [owner.name for owner in owners]
    allowed = f"one recurrent layer of the model: {', '.join(names)}" if names else "a recurrent layer of the model"
    given = "nothing" if layer is None else layer if isinstance(layer, str) else getattr(layer, "name", layer)
    if not names:
        remedy = "give a model with an LSTM, GRU or SimpleRNN layer, or a Bidirectional of these"
    elif layer is None:
        remedy = "name one of these"
    elif found:
        remedy = f"{found} layers are called so: give the layer itself, not its name"
    else:
        remedy = "name one of these; other layers, and those with a loop of their own, are not looked into"
    return Refused("layer", given=given, allowed=allowed, remedy=remedy)
