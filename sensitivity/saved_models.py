"""SavedModels, and other objects of TensorFlow's that are called like a model, as Keras models.

Loading one runs none of Python's code, but operations of a graph, some of which read and write files: those are looked
for first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from .errors import Refused, gist
from .job_files import SAVED_GRAPH
from .layers import keras, nodes_of

_ALLOWED = "a SavedModel that takes one floating-point tensor of windows"
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


@dataclass(frozen=True)
class _Endpoint:
    """What is called with windows, and what it says of them. spec: None where it says nothing."""

    call: Callable[[tf.Tensor], Any]
    spec: tf.TensorSpec | None
    variables: tuple[tf.Variable, ...]
    graph: tf.Graph | None = None


class SavedModel(keras.Model):
    """What was restored, as a model without layers: its variables are its weights, and its dtype is its own.

    batch: windows that it takes at a time; None: any number. digest: of the graph that it was restored from.
    """

    def __init__(self, restored: Any, endpoint: _Endpoint, digest: str = "") -> None:
        spec = endpoint.spec
        super().__init__(name="saved_model", dtype=spec.dtype.name if spec is not None else None)
        self.digest = digest
        self.batch: int | None = None
        self.inputs: list[keras.KerasTensor] = []
        self._restored, self._endpoint = restored, endpoint
        self.built = True
        if spec is not None and spec.shape.rank:
            self.batch = spec.shape[0]
            self.inputs = [keras.KerasTensor(spec.shape.as_list(), spec.dtype.name)]

    @property
    def weights(self) -> list[tf.Variable]:
        return list(self._endpoint.variables)

    def call(self, windows: tf.Tensor) -> Any:
        whole = self.batch in (None, windows.shape[0])
        found = self._endpoint.call(windows) if whole else self._in_batches(windows, self.batch or 1)
        return {name: found[name] for name in sorted(found, key=_in_order)} if isinstance(found, dict) else found

    def _in_batches(self, windows: tf.Tensor, batch: int) -> Any:
        """A few more windows than are taken at a time; the last ones are repeated to fill up."""
        count = windows.shape[0]
        filled = tf.concat([windows, tf.repeat(windows[-1:], -count % batch, axis=0)], 0)
        parts = [self._endpoint.call(filled[i : i + batch]) for i in range(0, count, batch)]
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
    if endpoint.graph is not None:
        served = nodes_of(endpoint.graph.as_graph_def())
        _require_harmless(path, served, _CHECKPOINTS, trust)
        kept = {there.registered_op_type for graph in graphs for there in graph.graph_def.library.registered_gradients}
        _require_gradients(path, served, set(map(custom_gradient_of, nodes)) - {None} - kept)
    return SavedModel(restored, endpoint, hashlib.blake2b(content, digest_size=16).hexdigest())


def as_model(given: Any) -> keras.Model:
    """A Keras model as it is; anything else of TensorFlow's that is called with windows as one, once and for all."""
    if isinstance(given, keras.Model):
        return given
    model = getattr(given, _ATTRIBUTE, None)
    if model is None:
        model = SavedModel(given, _endpoint(given))
        object.__setattr__(given, _ATTRIBUTE, model)  # past tracking: this is no part of what is saved
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
            f"{type(restored).__name__} without a function of one tensor: none of `serve`, `__call__` and "
            f"`serving_default`; signatures: {', '.join(getattr(restored, 'signatures', ())) or 'none'}",
            _EXPORT,
        )
    if found.spec is not None and not found.spec.dtype.is_floating:
        raise _refused(f"an input of {found.spec.dtype.name}", "save the part of the model that begins with numbers")
    return found


def _endpoints(restored: Any) -> Iterator[_Endpoint]:
    for name in ("serve", "__call__"):
        function: Any = getattr(restored, name, None)
        for concrete in getattr(function, "concrete_functions", ()):
            spec = _only_tensor(concrete)
            if spec is not None:
                yield _Endpoint(function, spec, tuple(concrete.variables), concrete.graph)
    signatures: dict[str, Any] = getattr(restored, "signatures", {})
    for name in ("serving_default", *signatures):
        concrete = signatures.get(name)
        spec = concrete and _only_tensor(concrete)
        if concrete and spec is not None:
            yield _Endpoint(_by_keyword(concrete), spec, tuple(concrete.variables), concrete.graph)
    if callable(restored) and not hasattr(restored.__call__, "concrete_functions"):  # a module in memory
        yield _Endpoint(restored, None, tuple(getattr(restored, "variables", ())))


def _only_tensor(concrete: Any) -> tf.TensorSpec | None:
    """The one tensor that a function takes; None of one that takes others, or was traced for training."""
    given = tf.nest.flatten(concrete.structured_input_signature)
    tensors = [part for part in given if isinstance(part, tf.TensorSpec)]
    return tensors[0] if len(tensors) == 1 and not any(part is True for part in given) else None


def _by_keyword(signature: Any) -> Callable[[tf.Tensor], Any]:
    (name,) = signature.structured_input_signature[1]
    return lambda windows: signature(**{name: windows})


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
