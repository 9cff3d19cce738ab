"""SavedModels, and other objects of TensorFlow's that are called like a model, as Keras models.

Loading one runs none of Python's code, but operations of a graph, some of which read and write files: those are looked
for first.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from .errors import Refused, gist
from .job_files import SAVED_GRAPH
from .layers import LOOPS, input_names, keras, nodes_of
from .replay import Replay, agree, drawn_of

_ALLOWED = "a SavedModel that takes windows, (batch, …), of floating-point numbers"
_EXPORT = 'save the model again with model.export("saved") or tf.saved_model.save(module, "saved")'
# Operations on files and of Python. What every SavedModel restores its variables with is refused in what is served.
_FILES = {
    *(
        "ReadFile",
        "WriteFile",
        "MatchingFiles",
        "PyFunc",
        "PyFuncStateless",
        "EagerPyFunc",
        "PrintV2",
        "DebugIdentityV2",
    ),
    *("TextLineReaderV2", "TFRecordReaderV2", "WholeFileReaderV2", "FixedLengthRecordReaderV2", "ShardDataset"),
    *("TextLineDataset", "TFRecordDataset", "TFRecordDatasetV2", "FixedLengthRecordDatasetV2", "SaveDatasetV2"),
    *("LoadDataset", "DatasetToTFRecord", "WriteSummary", "CreateSummaryFileWriter", "RpcCall", "CSVDatasetV2"),
}
_CHECKPOINTS = {"Save", "SaveV2", "SaveSlices", "Restore", "RestoreV2", "RestoreSlice", "MergeV2Checkpoints"}
_ATTRIBUTE = "_sensitivity_model"
_SAMPLES = 3
_HALF = (tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum)


@dataclass(frozen=True)
class _Endpoint:
    """What is called with windows, of each input, and what it says of them. specs: none where it says nothing."""

    call: Callable[..., Any]
    specs: tuple[tf.TensorSpec, ...]
    variables: tuple[tf.Variable, ...]
    function: tf.types.experimental.ConcreteFunction | None = None


class SavedModel(keras.Model):
    """What was restored, as a model without layers: its variables are its weights, and its dtype is its own.

    batch: windows that it takes at a time; None: any number. digest: of the graph that it was restored from. bound: why
    a graph with loops is called as it was restored, and no tape can use it twice; empty where it is made again. half:
    the dtype of half precision that some of its operations compute in; empty where none does.
    """

    def __init__(self, restored: Any, endpoint: _Endpoint, digest: str = "") -> None:
        specs = endpoint.specs
        dtypes = [spec.dtype.name for spec in specs if spec.dtype.is_floating]
        super().__init__(name="saved_model", dtype=dtypes[0] if dtypes else None)
        self.digest = digest
        self.batch: int | None = None
        self.of_module: tuple[tf.Variable, ...] = ()
        self.inputs: list[keras.KerasTensor] = []
        self._restored, self._endpoint = restored, endpoint
        self._replay, self.bound = _replayed(endpoint)
        self.half = _half_of(endpoint)
        self._agreed: dict[tuple[tuple[int, ...], ...], bool] = {}  # by shapes of a window
        self.built = True
        if all(spec.shape.rank for spec in specs):
            self.batch = next((spec.shape[0] for spec in specs if spec.shape[0]), None)
            self.inputs = [
                keras.KerasTensor(spec.shape.as_list(), spec.dtype.name, name=name)
                for name, spec in _named(specs).items()
            ]

    @property
    def weights(self) -> list[tf.Variable]:
        return list(self._endpoint.variables)

    def call(self, windows: Any) -> Any:
        """windows: of each input where there are several, by name or in order."""
        if isinstance(windows, dict):
            windows = [windows[name] for name in input_names(self)]
        given = list(windows) if isinstance(windows, list | tuple) else [windows]
        whole, call = self.batch in (None, given[0].shape[0]), self._call_for(given)
        found = call(*given) if whole else self._in_batches(call, given, self.batch or 1)
        found = tf.nest.map_structure(self._in_own_dtype, found)
        return {name: found[name] for name in sorted(found, key=_in_order)} if isinstance(found, dict) else found

    def _in_own_dtype(self, part: Any) -> Any:
        """What layers of another precision than the windows' give."""
        if not self._endpoint.specs or not isinstance(part, tf.Tensor) or not part.dtype.is_floating:
            return part
        return tf.cast(part, self.dtype)

    def _call_for(self, given: list[tf.Tensor]) -> Callable[..., Any]:
        """What is made again, for windows of which that was proved to be the same, of one alone and of several, since
        what is spread over a batch of one is spread over any; else what was restored.
        """
        if self._replay is None or not all(part.shape[1:].is_fully_defined() for part in given):
            return self._endpoint.call
        shapes = tuple(tuple(part.shape[1:].as_list()) for part in given)
        if shapes not in self._agreed:
            with tf.init_scope():
                drawn = [
                    drawn_of(self._endpoint.specs, shapes, count)
                    for count in ((self.batch,) if self.batch else (1, _SAMPLES))
                ]
                self._agreed[shapes] = all(agree(self._endpoint.call, self._replay, windows) for windows in drawn)
            self.bound = "" if self._agreed[shapes] else "its graph gives other numbers, or none, when it is made again"
        return self._replay if self._agreed[shapes] else self._endpoint.call

    def _in_batches(self, call: Callable[..., Any], given: list[tf.Tensor], batch: int) -> Any:
        """A few more windows than are taken at a time; the last ones are repeated to fill up."""
        count = given[0].shape[0]
        filled = [tf.concat([part, tf.repeat(part[-1:], -count % batch, axis=0)], 0) for part in given]
        parts = [call(*(part[i : i + batch] for part in filled)) for i in range(0, count, batch)]
        return tf.nest.map_structure(lambda *found: tf.concat(found, 0)[:count], *parts)


def load_saved_model(path: Path, *, trust: bool = False) -> SavedModel:
    """Raises `Refused` for what cannot be restored, or has operations on files and no trust."""
    try:
        content = (path / SAVED_GRAPH).read_bytes()
        graphs = saved_model_pb2.SavedModel.FromString(content).meta_graphs
        nodes = [node for graph in graphs for node in nodes_of(graph.graph_def)]
        _require_harmless(path, nodes, _FILES, trust)
        restored = tf.saved_model.load(str(path))
        endpoint = _endpoint(restored)
    except Refused:
        raise
    except Exception as error:  # every part of a SavedModel has its own way of being damaged
        raise _refused(f"{path} ({gist(error)})", _EXPORT) from error
    if endpoint.function is not None:
        served = nodes_of(endpoint.function.graph.as_graph_def())
        _require_harmless(path, served, _CHECKPOINTS, trust)
        kept = {there.registered_op_type for graph in graphs for there in graph.graph_def.library.registered_gradients}
        _require_gradients(path, served, set(map(custom_gradient_of, nodes)) - {None} - kept)
    return SavedModel(restored, endpoint, hashlib.blake2b(content, digest_size=16).hexdigest())


def as_model(given: Any) -> keras.Model:
    """A Keras model as it is; anything else of TensorFlow's that is called with windows as one, which is made once, and
    again where a module has other variables than then.
    """
    if isinstance(given, keras.Model):
        return given
    if isinstance(given, (str, Path)):
        raise Refused(
            "model.path",
            given=f"{given}, the name of a file",
            allowed="a model that has been loaded",
            remedy=f"give keras.models.load_model({str(given)!r}, compile=False),\n"
            "or for a SavedModel tf.saved_model.load",
        )
    model = getattr(given, _ATTRIBUTE, None)
    now = given.variables if isinstance(given, tf.Module) else ()
    if model is None or len(now) != len(model.of_module) or any(map(operator.is_not, now, model.of_module)):
        model = SavedModel(given, _endpoint(given))
        object.__setattr__(model, "of_module", now)  # past tracking, as below
        object.__setattr__(given, _ATTRIBUTE, model)  # this is no part of what is saved
    return model


def _refused(given: str, remedy: str) -> Refused:
    return Refused("model.path", given=given, allowed=_ALLOWED, remedy=remedy)


def _in_order(name: str) -> list[Any]:
    """Outputs are saved in no order, and come in another one each time: `output_2` is before `output_10`."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", str(name))]


# ---- what is called ----------------------------------------------------------------------------------


def _endpoint(restored: Any) -> _Endpoint:
    """What `model.export` and `tf.saved_model.save` name, in that order. Raises `Refused`."""
    found = next(_endpoints(restored), None)
    if found is None:
        raise _refused(
            f"{type(restored).__name__} without a function of windows: none of `serve`, `__call__` and "
            f"`serving_default`; signatures: {', '.join(getattr(restored, 'signatures', ())) or 'none'}",
            _EXPORT,
        )
    if found.specs and not any(spec.dtype.is_floating for spec in found.specs):
        raise _refused(
            f"an input of {found.specs[0].dtype.name}", "save the part of the model that begins with numbers"
        )
    if len(sizes := {spec.shape[0] for spec in found.specs if spec.shape.rank} - {None}) > 1:
        raise _refused(
            f"inputs that take {' and '.join(map(str, sorted(sizes)))} windows at a time",
            "save it for any number of them, (None, …)",
        )
    return found


def _endpoints(restored: Any) -> Iterator[_Endpoint]:
    for name in ("serve", "__call__"):
        function: Any = getattr(restored, name, None)
        for concrete in getattr(function, "concrete_functions", ()):
            if specs := _tensors_of(concrete):
                filling = _filling(function, concrete.structured_input_signature)
                yield _Endpoint(filling, specs, tuple(concrete.variables), concrete)
    signatures: dict[str, Any] = getattr(restored, "signatures", {})
    for name in ("serving_default", *signatures):
        concrete = signatures.get(name)
        if concrete and (specs := _tensors_of(concrete)):
            yield _Endpoint(_by_keyword(concrete), specs, tuple(concrete.variables), concrete)
    if callable(restored) and not hasattr(restored.__call__, "concrete_functions"):  # a module in memory
        yield _Endpoint(_together(restored), (), tuple(getattr(restored, "variables", ())))


def _tensors_of(concrete: Any) -> tuple[tf.TensorSpec, ...]:
    """What a function takes of each window; nothing of one that takes other tensors, or was traced for training."""
    arguments, keywords = concrete.structured_input_signature
    given = tf.nest.flatten((arguments, keywords))
    tensors = tuple(part for part in given if isinstance(part, tf.TensorSpec))
    table = arguments[0] if arguments and isinstance(arguments[0], dict) else keywords
    if len(table) == len(tensors) and all(isinstance(part, tf.TensorSpec) for part in table.values()):
        tensors = tuple(
            tf.TensorSpec(spec.shape, spec.dtype, str(name)) for name, spec in zip(sorted(table), tensors, strict=True)
        )
    alike = len(tensors) == 1 or all(spec.shape.rank for spec in tensors)
    return tensors if alike and not any(part is True for part in given) else ()


def _filling(function: Any, signature: tuple[Any, Any]) -> Callable[..., Any]:
    """A function that takes tensors one by one, of one that takes them somewhere in its arguments and keywords."""
    flat = tf.nest.flatten(signature)

    def filled(*tensors: tf.Tensor) -> Any:
        rest = iter(tensors)
        given = [next(rest) if isinstance(part, tf.TensorSpec) else part for part in flat]
        arguments, keywords = tf.nest.pack_sequence_as(signature, given)
        return function(*arguments, **keywords)

    return filled


def _by_keyword(signature: Any) -> Callable[..., Any]:
    names = sorted(signature.structured_input_signature[1])
    return lambda *tensors: signature(**dict(zip(names, tensors, strict=True)))


def _together(function: Any) -> Callable[..., Any]:
    return lambda *tensors: function(tensors[0] if len(tensors) == 1 else list(tensors))


def _named(specs: tuple[tf.TensorSpec, ...]) -> dict[str, tf.TensorSpec]:
    """By what they are called where they were saved; by number where that tells none apart."""
    names = [spec.name for spec in specs]
    apart = None not in names and len(set(names)) == len(names)
    return {
        name if apart else f"input_{number}": spec for number, (name, spec) in enumerate(zip(names, specs, strict=True))
    }


def _half_of(endpoint: _Endpoint) -> str:
    nodes = nodes_of(endpoint.function.graph.as_graph_def()) if endpoint.function else ()
    found = (tf.as_dtype(node.attr["T"].type).name for node in nodes if node.attr["T"].type in _HALF)
    return next(found, "")


def _replayed(endpoint: _Endpoint) -> tuple[Replay | None, str]:
    """Of a graph with loops, which no tape can use twice as they were restored; and why there is none."""
    function = endpoint.function
    if function is None or not any(node.op in LOOPS for node in nodes_of(function.graph.as_graph_def())):
        return None, ""
    try:
        found = Replay(function)
        reason = found.why_not(lambda node: custom_gradient_of(node) is not None)
        return (None, reason) if reason else (found, "")
    except Exception as error:  # whatever a graph of another version of TensorFlow lacks
        return None, f"its graph cannot be made again ({gist(error)})"


# ---- what it would do --------------------------------------------------------------------------------


def custom_gradient_of(node: Any) -> str | None:
    """The name that a gradient of the user's goes by; None of an operation that has its own."""
    kind = node.attr["_gradient_op_type"].s.decode() if "_gradient_op_type" in node.attr else ""
    return kind if kind and "PartitionedCall" not in node.op else None


def _require_gradients(path: Path, served: list[Any], unsaved: set[Any]) -> None:
    """A gradient that was not saved is known by a name that may by now be another's."""
    if unsaved.intersection(map(custom_gradient_of, served)):
        raise _refused(
            f"{path}, saved without its custom gradients",
            "save it with tf.saved_model.SaveOptions(experimental_custom_gradients=True)",
        )


def _require_harmless(path: Path, nodes: list[Any], refused: set[str], trust: bool) -> None:
    found = sorted(refused.intersection(node.op for node in nodes))
    if found and not trust:
        raise Refused(
            "model.path",
            given=f"{path}, a graph with {', '.join(found)}",
            allowed="SavedModels without operations on files or of Python",
            remedy="save the model without them,\n"
            "or, where you know who made it, give --trust-model: these operations then run here",
        )
