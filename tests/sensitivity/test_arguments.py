"""What Python's functions refuse is told in their own words: arguments, and no keys of a job file."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.arguments import as_argument, in_python
from sensitivity.errors import Refused, RefusedTogether, suggested
from tests.conftest import in_training, sequential

SHAPE = (6, 2)
JOB_WORDS = re.compile(
    r"(?<![\w.])(?!model\.keras)(?:sensitivity|model|series|windows|run)\.[a-z_]+(?![\w(])"
    r"|\[model\.inputs\]|job file|--trust-model|package\.module:function|= true|= false"
)
FUNCTIONS = [getattr(sensitivity, name) for name in ("jacobian", "vjp", "jvp", "hessian", "hvp", "gradient_norm")]
FUNCTIONS += [sensitivity.gram, sensitivity.integrated_gradients, sensitivity.smooth_gradients]
FUNCTIONS += [sensitivity.expected_gradients]
# What jobs alone run, of the modules that `api` imports.
OF_JOBS = {
    *("addresses", "buckets", "checksums", "choices", "declared", "folders", "guarded", "job_files", "labels", "lease"),
    *("patience", "placement", "places", "plan", "record", "sections", "series", "store", "survey", "times", "windows"),
}


def model() -> keras.Model:
    return sequential(SHAPE, layers.LSTM(3, return_sequences=True, name="memory"), layers.Dense(2, name="last"))


def windows(count: int = 8) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, *SHAPE)).astype("float32")


class Eager(keras.Model):
    """Runs where tensors have values, and nowhere else."""

    def call(self, source):
        return source[:, -1] * float(source.numpy().std())


class Branching(keras.Model):
    def __init__(self):
        super().__init__()
        self.after = layers.Dense(1)

    @tf.autograph.experimental.do_not_convert
    def call(self, source):
        return self.after(source[:, -1] if tf.reduce_mean(source) >= 0 else source[:, 0])


def coupled() -> keras.Model:
    return sequential(SHAPE, in_training(layers.BatchNormalization(name="norm")))


def rounding() -> keras.Model:
    source = keras.Input(SHAPE)
    return keras.Model(source, layers.Lambda(lambda x: tf.cast(x, "int32"))(source))


def reducing() -> keras.Model:
    source = keras.Input(SHAPE)
    return keras.Model(source, layers.Lambda(lambda x: tf.reduce_sum(x), output_shape=())(source))


def deep() -> keras.Model:
    source = keras.Input(SHAPE)
    return keras.Model(source, layers.Reshape((3, 2, 2))(source))


def two_inputs() -> keras.Model:
    first, second = keras.Input(SHAPE, name="rain"), keras.Input((3,), name="depth")
    return keras.Model([first, second], layers.Dense(1)(layers.Concatenate()([layers.Flatten()(first), second])))


def past(x: Any) -> Any:
    return tf.numpy_function(lambda a: a, [x], tf.float32)


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("of", {"of": "lats"}),
        ("of", {"model": rounding}),
        ("of", {"model": two_inputs, "windows": [windows(), windows()[:, :3, 0]], "of": "deep"}),
        ("wrt", {"wrt": "memry"}),
        ("wrt", {"wrt": "weights:memry"}),
        ("wrt", {"wrt": "last", "of": "memory"}),
        ("wrt", {"function": sensitivity.smooth_gradients, "wrt": "memory"}),
        ("wrt", {"model": two_inputs, "windows": [windows(), windows()[:, :3, 0]]}),
        ("output_steps", {"output_steps": [7]}),
        ("output_steps", {"output_steps": "a"}),
        ("output_steps", {"output_steps": []}),
        ("outputs", {"outputs": ["output_9"]}),
        ("outputs", {"outputs": [0, 0]}),
        ("max_lag", {"max_lag": 2, "wrt": "memory"}),
        ("max_lag", {"max_lag": -1}),
        ("max_lag", {"max_lag": 2, "function": sensitivity.hessian}),
        ("max_lag", {"max_lag": 2, "model": lambda: sequential(SHAPE, layers.Conv1D(2, 3, padding="same"))}),
        ("kernel", {"kernel": "gradeint"}),
        ("kernel", {"kernel": "gradient", "experimental_use_pfor": True}),
        ("kernel", {"kernel": "scan", "model": lambda: sequential(SHAPE, layers.Conv1D(2, 3, padding="same"))}),
        ("parallel_iterations", {"experimental_use_pfor": True, "parallel_iterations": 1}),
        ("windows_per_call", {"windows_per_call": 0}),
        ("kernle", {"kernle": "auto"}),
        ("lead", {"lead": 1}),
        ("memory", {"memory": "many"}),
        ("memory", {"memory": 10}),
        ("memory", {"memory": -1}),
        ("labels", {"of": "loss"}),
        ("labels", {"labels": windows()}),
        ("loss", {"of": "loss", "labels": windows()}),
        ("loss", {"of": "loss", "labels": windows(), "loss": "mean_squared"}),
        ("loss", {"of": "loss", "labels": windows()[:, :4, 0], "loss": "mean_squared_error"}),
        ("vectors", {"function": sensitivity.vjp, "vectors": np.ones(3)}),
        ("directions", {"function": sensitivity.jvp, "directions": np.ones(3)}),
        ("baseline", {"function": sensitivity.integrated_gradients, "baseline": "zeros"}),
        ("baselines", {"function": sensitivity.expected_gradients, "baselines": np.ones(3)}),
        ("steps", {"function": sensitivity.integrated_gradients, "steps": 1}),
        ("noise", {"function": sensitivity.smooth_gradients, "noise": -1.0}),
        ("samples", {"function": sensitivity.smooth_gradients, "samples": 0}),
        ("windows", {"windows": np.ones(3)}),
        ("windows", {"windows": [["a"]]}),
        ("windows", {"model": two_inputs}),
        ("windows", {"windows": windows()[:, :, :1]}),
        ("model", {"model": Eager}),
        ("model", {"model": Branching}),
        ("model", {"model": coupled}),
        ("model", {"model": reducing}),
        ("model", {"model": deep}),
        ("model", {"model": lambda: sequential(SHAPE, layers.Lambda(past, output_shape=SHAPE))}),
        ("model", {"model": tf.Module}),
        ("model", {"model": lambda: "model.keras"}),
    ],
)
def test_refusals_name_arguments(key, asked):
    asked = dict(asked)
    function, build, given = asked.pop("function", sensitivity.jacobian), asked.pop("model", model), windows()
    needed = {"jvp": {"directions": np.ones((1, *SHAPE))}}.get(function.__name__, {})
    with pytest.raises(Refused) as refusal:
        function(build(), asked.pop("windows", given), **{**needed, **asked})
    assert refusal.value.key == key
    assert not JOB_WORDS.search(str(refusal.value)), str(refusal.value)


def arguments() -> set[str]:
    from sensitivity.api import What

    named = {name for function in FUNCTIONS for name in inspect.signature(function).parameters}
    return named | set(What.__annotations__)


def refusals_in(file: Path) -> list[tuple[int, str, list[str]]]:
    """Line, key and what else Python is told, of each refusal that a file may raise, as far as it is written there."""
    tree = ast.parse(file.read_text())
    names = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refused" and node.args:
            told = {word.arg: word.value for word in node.keywords}
            own = {"remedy": told.pop("in_python", told["remedy"]), "allowed": told["allowed"]}
            first = node.args[0]
            keys = [names.get(first.id, "")] if isinstance(first, ast.Name) else texts(first)
            translated = [as_argument(text) for value in own.values() for text in texts(value)]
            found += [(node.lineno, str(key), [*texts(told["given"]), *translated]) for key in keys]
    return found


def texts(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def api_files() -> list[Path]:
    """Files of what `api` imports and does not leave to jobs."""
    home = Path(sensitivity.__file__).parent
    waiting, found = ["api"], set()
    while waiting:
        name = waiting.pop()
        folder = home / name
        for file in sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
            if file in found or name in OF_JOBS or name == "readers":
                continue
            found.add(file)
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level and (home != file.parent or node.level == 1):
                    parts = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                    waiting += [part for part in parts if (home / part).exists() or (home / f"{part}.py").exists()]
    return sorted(found)


def test_no_refusal_that_python_can_meet_speaks_of_a_job_file():
    """Of what is written in the code, after it is put into words of Python."""
    seen = 0
    for file in api_files():
        for line, key, told in refusals_in(file):
            if "package.module:function" in "".join(told) or "--trust-model" in "".join(told):
                assert file.stem in ("loading", "saved_models")  # files, which jobs alone load
                continue
            if key.startswith(("job file", "model.inputs", "series.")) and file.stem == "job":
                continue  # of other sections than [sensitivity]
            seen += 1
            for text in told:
                assert not JOB_WORDS.search(text), f"{file.name}:{line}: {text}"
            own = as_argument(key)
            if key == "sensitivity.":  # the rest is none that is written there
                continue
            assert "." not in own, f"{file.name}:{line}: {key}"
            assert own in {*arguments(), "product", "lead"} or own == key, f"{file.name}:{line}: {key}"
    assert seen > 80


def test_a_refusal_keeps_its_cause_and_several_are_told_together():
    one = Refused("series.features", given="1", allowed="2", remedy="see run.dtype", in_python="see the windows")
    assert in_python(one).remedy == "see the windows"
    assert pickle.loads(pickle.dumps(one)).in_python == "see the windows"
    both = in_python(RefusedTogether([one, Refused("sensitivity.of", given=1, allowed="a", remedy="= true")]))
    assert [refusal.key for refusal in both.refusals] == ["windows", "of"]
    assert "windows is refused" in str(both)
    assert "= True" in str(both)
    with pytest.raises(Refused) as refusal:
        sensitivity.jacobian(Eager(), windows())
    assert isinstance(refusal.value.__cause__, Exception)


@pytest.mark.parametrize("build", [Eager, Branching])
def test_a_model_that_runs_eagerly_alone_is_told_so_with_the_cause(build):
    with pytest.raises(
        Refused, match=r"(?s)runs eagerly and fails as a graph.*\((?:Attribute|Operator|.*Graph)"
    ) as seen:
        sensitivity.jacobian(build(), windows())
    cause = {"Eager": "numpy", "Branching": "bool"}[build.__name__]
    assert cause in str(seen.value.given)
    assert "tf.function(model)(windows)" in seen.value.remedy


def summed(source):
    total = tf.zeros_like(source[:, 0])
    for step in tf.range(SHAPE[0]):
        total += tf.tanh(source[:, step])
    return total


class Looping(keras.Model):
    def call(self, source):
        return summed(source)


class Decorated(keras.Model):
    @tf.function
    def call(self, source):
        return summed(source)


def test_the_remedy_for_a_loop_over_a_tensor_helps():
    with pytest.raises(Refused, match="Iterating over a symbolic.*") as refusal:
        sensitivity.jacobian(Looping(), windows())
    assert "decorate the call with @tf.function" in refusal.value.remedy
    assert sensitivity.jacobian(Decorated(), windows()).shape == (8, 2, *SHAPE)


@pytest.mark.parametrize(
    ("given", "known", "meant"),
    [
        ("lag-profil", ["lag-profile", "lag-band"], "did you mean 'lag-profile'?"),
        ("Rain", ["heat", "rain"], "did you mean 'rain'?"),
        (["rain", "heta"], ["heat", "rain"], "did you mean 'heat'?"),
        (("rain", 9), [0, "rain"], "else"),
        ("wind", ["heat", "rain"], "else"),
        ("rain", [], "else"),
        (3, ["heat"], "else"),
    ],
)
def test_the_nearest_known_word_is_suggested(given, known, meant):
    assert suggested(given, known, "else") == meant


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"kernel": "batch_jacobain"}, "batch_jacobian"),
        ({"of": "lsat"}, "last"),
        ({"wrt": "memry"}, "memory"),
        ({"wrt": "imput"}, "input"),
        ({"wrt": "weights:memry"}, "weights:memory"),
        ({"outputs": ["otput_1"]}, "output_1"),
        ({"max_lga": 2}, "max_lag"),
    ],
)
def test_misspelt_arguments_get_a_suggestion(asked, meant):
    with pytest.raises(Refused, match=f"did you mean '{meant}'"):
        sensitivity.jacobian(model(), windows(), **asked)
