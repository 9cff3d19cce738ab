"""What tells two models apart: a hash of what they compute, and a hash of their weights."""

from __future__ import annotations

import base64
import hashlib
import json
import marshal
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from .layers import keras, leaf_layers
from .saved_models import SavedModel

_NOTHING: Mapping[str, str] = {}
_NOT_COMPUTED = ("compile_config", "build_config")  # how a model is trained, and shapes that it was built with
_REFERENCES = ("keras_history", "input_layers", "output_layers")  # where a functional model names its layers
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(model: keras.Model) -> dict[str, str]:
    """Hashes of the architecture and of the weights: the same for the same file in every process.

    They leave out names that Keras makes up (`dense`, `lstm_3`), whose numbers depend on what the process built before.
    They include all other names, as inputs, outputs and layers are asked for by them.
    """
    weights = hashlib.blake2b(digest_size=16)
    for value in model.get_weights():
        weights.update(f"{value.dtype}{value.shape}".encode())
        weights.update(np.ascontiguousarray(value).tobytes())
    architecture = hashlib.blake2b(_architecture(model).encode(), digest_size=16)
    return {"architecture": architecture.hexdigest(), "weights": weights.hexdigest()}


def _architecture(model: keras.Model) -> str:
    if isinstance(model, SavedModel):
        return model.digest
    try:
        config = keras.saving.serialize_keras_object(model)
    except Exception:  # a subclassed model without get_config: its class and layers are all that is known
        return repr([type(model).__qualname__, *(type(layer).__qualname__ for layer in leaf_layers(model))])
    return _ADDRESS.sub("", json.dumps(_canonical(config, _NOTHING), sort_keys=True, default=repr))


def _canonical(node: Any, names: Mapping[str, str]) -> Any:
    """A configuration without made-up names. names: what the layers of the functional model around it are called."""
    if isinstance(node, (list, tuple)):
        return [_canonical(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("class_name") == "__lambda__":
        return _code(node["config"])
    kept = {key: value for key, value in node.items() if key not in _NOT_COMPUTED}
    if "class_name" in kept and isinstance(kept.get("config"), dict):
        return _canonical_object(kept, names)
    return {
        key: _renamed(value, names) if key in _REFERENCES else _canonical(value, names) for key, value in kept.items()
    }


def _canonical_object(node: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """What an object of Keras is serialized to; its layers, if it has any, are numbered in their order."""
    config = node["config"]
    layers = config.get("layers")
    inner = _layer_names(layers) if isinstance(layers, list) else names
    found = {key: _canonical(value, names) for key, value in node.items() if key not in ("config", "name")}
    found["config"] = _canonical(config, inner)
    name = config.get("name")
    if isinstance(name, str):
        made_up = _is_made_up(name, str(node["class_name"]))
        found["config"]["name"] = names.get(name, "") if made_up else name
    return found


def _layer_names(layers: list[Any]) -> dict[str, str]:
    """From each layer's name to its number where Keras made the name up, else to the name itself."""
    found = {}
    for number, layer in enumerate(layers):
        config = layer.get("config") if isinstance(layer, dict) else None
        name = config.get("name") if isinstance(config, dict) else None
        if isinstance(name, str):
            made_up = _is_made_up(name, str(layer.get("class_name")))
            found[name] = f"layer {number}" if made_up else name
    return found


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    if isinstance(node, (list, tuple)):
        return [_renamed(item, names) for item in node]
    if isinstance(node, dict):
        return {key: _renamed(value, names) for key, value in node.items()}
    return names.get(node, node) if isinstance(node, str) else node


def _is_made_up(name: str, class_name: str) -> bool:
    """Whether Keras would give such a name to an object of that class: `lstm`, `lstm_3`, `backward_lstm_1`."""
    own = re.sub(r"[\W_]", "", class_name).lower()
    plain = re.sub(r"^(forward|backward)_(?=.)", "", re.sub(r"_\d+$", "", name))
    return own in (name.replace("_", ""), plain.replace("_", ""))


def _code(config: dict[str, Any]) -> list[str]:
    """A Lambda's code. Marshal's newest format notes how often objects are shared, which varies; version 2 does not."""
    code = marshal.dumps(marshal.loads(base64.b64decode(config["code"])), 2)
    return [code.hex(), repr(config.get("defaults")), repr(config.get("closure"))]
