"""What tells two models apart: a hash of what they compute, and a hash of their weights."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import marshal
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from .layers import function_of, keras
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
    parts = [_configuration(model), *map(_own_code, model._flatten_layers())]
    if function_of(model) is None:  # its configuration does not say what layers it has
        parts += [_configuration(layer) for layer in model._flatten_layers(include_self=False)]
    return _ADDRESS.sub("", json.dumps(parts, sort_keys=True, default=repr))


def _configuration(layer: keras.Layer) -> Any:
    try:
        return _canonical(keras.saving.serialize_keras_object(layer), _NOTHING)
    except Exception:  # a class without get_config: its name is all that is known
        return type(layer).__qualname__


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


def _code(config: dict[str, Any]) -> list[Any]:
    """A Lambda's code."""
    code = marshal.loads(base64.b64decode(config["code"]))
    return [_instructions(code), repr(config.get("defaults")), repr(config.get("closure"))]


def _own_code(layer: keras.Layer) -> list[Any]:
    """What a class that is not of Keras computes in its `call`, and a Lambda in its function; nothing of others."""
    functions: list[Any] = [layer.function] if isinstance(layer, keras.layers.Lambda) else []
    functions += [
        vars(kind)[name]
        for kind in type(layer).__mro__
        for name in ("call", "predict_step")
        if name in vars(kind) and kind.__module__.partition(".")[0] not in ("keras", "tensorflow", "sensitivity")
    ]
    return [_instructions(one.__code__) for one in map(inspect.unwrap, functions) if hasattr(one, "__code__")]


def _instructions(code: types.CodeType) -> list[Any]:
    """Code without the names of files, lines and functions."""
    constants = [_constant(one) for one in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames), list(code.co_freevars)]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _instructions(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
