"""The trained model as an object: loaded, rebuilt in another dtype."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from .addresses import local_folder, place_of
from .errors import Refused, gist
from .layers import constants_of, declared_inputs, function_of, keras, leaf_layers, outputs_of
from .packing import Wrapper, rewrapped
from .precision import default_policy, half_policies, note
from .saved_models import SavedModel, load_saved_model
from .sections import ModelSection


def load_model(section: ModelSection, directory: str, dtype: str = "float32", *, trust: bool = False) -> keras.Model:
    """Load the job's model in `dtype`; `directory` is searched first for a function's module.

    trust: code that is stored in a file may run.

    Raises `Refused` for a model that cannot be read, rebuilt or cast.
    """
    if keras.backend.backend() != "tensorflow":
        raise Refused(
            "KERAS_BACKEND",
            given=keras.backend.backend(),
            allowed="tensorflow",
            remedy="export KERAS_BACKEND=tensorflow",
        )
    model = _call_function(section.path, directory) if section.is_function else _load_kept(section.path, trust)
    return cast(model, dtype)


def _load_kept(path: str, trust: bool) -> keras.Model:
    folder, name = place_of(path)
    with folder.local_copy(name) if path.endswith(".keras") else local_folder(path) as file:
        return load_file(file, trust=trust)


def load_file(path: Path, *, trust: bool = False) -> keras.Model:
    """The model in a .keras file or in a SavedModel's directory."""
    if path.suffix != ".keras":
        return load_saved_model(path, trust=trust)
    _require_archive(path, trust)
    try:
        return keras.models.load_model(path, compile=False, safe_mode=not trust)
    except Exception as error:
        raise Refused(
            "model.path",
            given=f"{path} ({gist(error)})",
            allowed="a .keras file that keras.models.load_model reads",
            remedy='save it again with this Keras; with custom classes, give model.path = "package.module:function"',
        ) from error


def _require_archive(path: Path, trust: bool) -> None:
    """A Lambda's code inside a file would run on loading; name it before Keras does."""
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
    except Exception as error:  # every part of an archive has its own way of being damaged
        raise Refused(
            "model.path",
            given=f"{path} ({gist(error)})",
            allowed="a .keras archive",
            remedy='save the model again with model.save("model.keras")',
        ) from error
    stored = [node["config"].get("name") for node in _nodes(config) if _is_stored_lambda(node)]
    if stored and not trust:
        raise Refused(
            "model.path",
            given=f"{path}: layer {stored[0]!r} is a Lambda whose Python code is stored in the file",
            allowed="models without stored code",
            remedy='build the model in your own code and give model.path = "package.module:function",\n'
            "or, where you know who made the file, give --trust-model: its code then runs here",
        )


def _is_stored_lambda(node: dict[str, Any]) -> bool:
    config = node.get("config") if node.get("class_name") == "Lambda" else None
    function = config.get("function") if isinstance(config, dict) else None
    return isinstance(function, dict) and function.get("class_name") == "__lambda__"


def _nodes(config: Any) -> Iterator[dict[str, Any]]:
    if isinstance(config, dict):
        yield config
    for child in config.values() if isinstance(config, dict) else config if isinstance(config, list) else ():
        yield from _nodes(child)


def _call_function(path: str, directory: str) -> keras.Model:
    module, _, name = path.partition(":")
    allowed = "package.module:function, callable without arguments, returning a keras.Model"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            model = getattr(_import(module, directory), name)()
    except (Exception, SystemExit) as error:
        raise Refused(
            "model.path",
            given=f"{path} ({gist(error)})",
            allowed=allowed,
            remedy=f"make `from {module} import {name}; {name}()` work in {directory}",
        ) from error
    if not isinstance(model, keras.Model):
        raise Refused(
            "model.path",
            given=f"{path}, which returns {type(model).__name__}",
            allowed=allowed,
            remedy="return the model",
        )
    return model


def import_module(path: str, directory: str) -> None:
    """Import what a function is in, where it is there still, for the classes that it registers with Keras."""
    with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(sys.stderr):
        _import(path.partition(":")[0], directory)


def _import(module: str, directory: str) -> ModuleType:
    if directory not in sys.path:
        sys.path.insert(0, directory)
    importlib.invalidate_caches()
    return importlib.import_module(module)


def cast(model: keras.Model, dtype: str) -> keras.Model:
    """The same model computing in `dtype`: itself where it already does, else rebuilt from its configuration."""
    if isinstance(model, Wrapper):
        return rewrapped(model, lambda inner: cast(inner, dtype))
    if isinstance(model, SavedModel):
        return _in_its_own(model, dtype)
    half = half_policies(model)
    policies = {str(layer.dtype_policy.name) for layer in leaf_layers(model)} | set(half)
    if policies <= {dtype}:
        return model
    try:
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)
        with default_policy(dtype):
            clone = keras.saving.deserialize_keras_object(_with_dtype(config, dtype), safe_mode=False)
        clone.set_weights(model.get_weights())
        _set_constants(clone, model)
        if left := half_policies(clone):
            raise ValueError(f"layers are {' and '.join(left)} whatever their configuration says")
        if not (off := _difference(clone, model)) <= (_HALF_TOLERANCE if half else _TOLERANCE):
            raise ValueError(f"its copy's predictions are off by {off:.1e} of the largest")
    except Exception as error:
        raise Refused(
            "model" if half else "run.dtype",
            given=f"{dtype} for a model of {', '.join(sorted(policies))} that cannot be rebuilt ({gist(error)})",
            allowed="the model's own dtype",
            remedy=f"build the model in {dtype}, or give its classes get_config",
        ) from error
    note(clone, half, dtype)
    return clone


def _difference(clone: keras.Model, model: keras.Model) -> float:
    """How far predictions of a model's copy are from its own, by the largest, on windows at random; 0 of a model that
    does not declare what it takes, or cannot be called with such windows. A layer may keep numbers that neither its
    configuration nor its weights have.
    """
    random, found = np.random.default_rng(0), []
    sizes = [(_SAMPLES, *(size or _STEPS for size in tensor.shape[1:])) for tensor in declared_inputs(model).values()]
    drawn = [random.standard_normal(size) for size in sizes]
    for one in (model, clone):
        given = [
            tf.cast(values if "float" in tensor.dtype else 0 * values, tensor.dtype)
            for values, tensor in zip(drawn, declared_inputs(one).values(), strict=True)
        ]
        structure = getattr(function_of(one), "_inputs_struct", None)
        if not given or structure is None:
            return 0.0
        try:
            outputs = keras.tree.flatten(outputs_of(one, keras.tree.pack_sequence_as(structure, given)))
        except Exception:  # it may take other lengths, or numbers of another kind
            return 0.0
        found.append(np.concatenate([np.ravel(tf.cast(output, "float64")) for output in outputs]))
    expected, copied = found
    if not np.isfinite(expected).all():  # of windows that mean nothing
        return 0.0
    return float(np.abs(copied - expected).max() / (np.abs(expected).max() or 1.0))


_TOLERANCE, _HALF_TOLERANCE = 1e-2, 0.3  # of the largest prediction: rounding apart, and what half precision loses
_SAMPLES, _STEPS = 3, 8


def _set_constants(clone: keras.Model, model: keras.Model) -> None:
    """Give a model's copy the constants of its layers, such as the means of an adapted `Normalization`, which weights
    alone do not set.
    """
    if not any(constants_of(layer) for layer in model._flatten_layers()):
        return
    for own, layer in zip(clone._flatten_layers(), model._flatten_layers(), strict=True):
        for name, value in constants_of(layer).items():
            before = getattr(own, name, None)
            dtype = before.dtype if isinstance(before, tf.Tensor) else own.dtype_policy.variable_dtype
            setattr(own, name, tf.cast(value, dtype) if value.dtype.is_floating else value)


def _in_its_own(model: SavedModel, dtype: str) -> SavedModel:
    if model.half or model.dtype not in ("float32", "float64"):
        raise Refused(
            "model.path",
            given=f"a SavedModel of {model.half or model.dtype}, whose graph cannot be cast",
            allowed="SavedModels that compute in float32 or float64",
            remedy='save the Keras model with model.save("model.keras"), which is computed in float32',
        )
    if str(model.dtype) != dtype:
        raise Refused(
            "run.dtype",
            given=f"{dtype}, and a SavedModel of {model.dtype}, whose graph cannot be cast",
            allowed=f"{model.dtype}",
            remedy=f'set run.dtype = "{model.dtype}"',
            in_python=f"give windows of {model.dtype}",
        )
    return model


def in_full_precision(model: keras.Model, twins: dict[Any, keras.Model]) -> keras.Model:
    """The model itself, or, of one of half precision, its twin of full precision with the weights that it now has.

    twins: where the twin is kept.
    """
    if isinstance(model, SavedModel):
        return _in_its_own(model, str(model.dtype))
    if not half_policies(model):
        return model
    if _TWIN not in twins:
        twins[_TWIN] = cast(model, "float32")
    twins[_TWIN].set_weights(model.get_weights())
    return twins[_TWIN]


_TWIN = "twin"


def _with_dtype(config: Any, dtype: str) -> Any:
    if isinstance(config, list):
        return [_with_dtype(item, dtype) for item in config]
    if not isinstance(config, dict):
        return config
    if config.get("class_name") == "DTypePolicy":
        return {**config, "config": {"name": dtype}}
    return {
        key: dtype if key == "dtype" and isinstance(value, str) and "float" in value else _with_dtype(value, dtype)
        for key, value in config.items()
    }
