"""SavedModels in process: the numbers of float64, whatever they hold and however they were saved."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.candidates import families
from sensitivity.errors import Refused
from sensitivity.fingerprint import fingerprint
from sensitivity.job import SensitivitySection
from sensitivity.loading import cast
from sensitivity.model import describe
from sensitivity.saved_models import SavedModel, as_model, load_saved_model
from sensitivity.sections import WindowsSection
from tests.conftest import sequential, tape_jacobian, worst

SHAPE = (6, 2)
WINDOWS = np.random.default_rng(0).standard_normal((5, *SHAPE)).astype("float32")


def two_outputs():
    source = keras.Input(SHAPE)
    hidden = layers.GRU(4)(source)
    return keras.Model(source, {"flow": layers.Dense(1)(hidden), "heat": layers.Dense(2)(hidden)})


MODELS = {
    "dense": lambda: sequential(SHAPE, layers.Flatten(), layers.Dense(4, "tanh"), layers.Dense(2)),
    "conv": lambda: sequential(SHAPE, layers.Conv1D(3, 2, activation="elu"), layers.Flatten(), layers.Dense(2)),
    "lstm": lambda: sequential(SHAPE, layers.LSTM(4), layers.Dense(1)),
    "lstm sequence": lambda: sequential(SHAPE, layers.LSTM(4, return_sequences=True), layers.Dense(2)),
    "bidirectional gru": lambda: sequential(SHAPE, layers.Bidirectional(layers.GRU(3)), layers.Dense(2)),
}


class Module(tf.Module):
    """A model of TensorFlow's own: two numbers a window."""

    def __init__(self, inner=lambda x: x, batch=None, dtype="float32"):
        super().__init__()
        random = np.random.default_rng(1)
        self.weight = tf.Variable(random.uniform(-0.5, 0.5, (SHAPE[0] * SHAPE[1], 2)), dtype=dtype)
        self.inner = inner
        spec = tf.TensorSpec((batch, *SHAPE), dtype)
        self.called = tf.function(self.run, input_signature=[spec], autograph=False)

    @tf.function(autograph=False)
    def __call__(self, windows):
        return self.run(windows)

    def run(self, windows):
        flat = tf.reshape(windows, (tf.shape(windows)[0], self.weight.shape[0]))
        return tf.tanh(tf.matmul(self.inner(flat), self.weight))


def double_jacobian(model) -> np.ndarray:
    """In float64, by a tape of its own for each output."""
    twin = cast(model, "float64")
    return tape_jacobian(lambda x: tf.concat(keras.tree.flatten(twin(x)), -1), WINDOWS.astype("float64"))


def saved(module, path, batch=None, *, options=None, dtype="float32"):
    function = module.__call__.get_concrete_function(tf.TensorSpec((batch, *SHAPE), dtype))
    tf.saved_model.save(module, str(path), signatures={"serving_default": function}, options=options)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_gives_the_numbers_of_float64(name, tmp_path):
    model = MODELS[name]()
    model.export(tmp_path / "saved", verbose=False)
    found, report = sensitivity.jacobian(tf.saved_model.load(tmp_path / "saved"), WINDOWS, report=True)
    assert worst(found, double_jacobian(model)) < 1e-5
    assert not any("57343" in what or "XLA: a SavedModel" in what for what in report.lost)


DIRECTIONS = np.random.default_rng(1).standard_normal((2, *SHAPE))
PLAIN = {"vjp": ("sum",), "gradient_norm": (), "integrated_gradients": (), "expected_gradients": ()}
TWICE = {"jvp": (DIRECTIONS,), "hessian": (), "hvp": (DIRECTIONS,), "gram": ()}
PRODUCTS = {**PLAIN, **TWICE, "smooth_gradients": ()}


@pytest.mark.parametrize(
    ("name", "product"),
    [
        *(("lstm sequence", product) for product in PRODUCTS),
        ("bidirectional gru", "jvp"),
        *(("conv", product) for product in (*TWICE, "smooth_gradients")),
    ],
)
def test_products_are_those_of_the_keras_model(name, product, tmp_path):
    model, compute = MODELS[name](), getattr(sensitivity, product)
    model.export(tmp_path / "saved", verbose=False)
    restored, given = tf.saved_model.load(str(tmp_path / "saved")), PRODUCTS[product]
    assert worst(compute(restored, WINDOWS, *given), compute(cast(model, "float64"), WINDOWS, *given)) < 1e-5


@pytest.fixture
def bound(tmp_path):
    """Loops beside a custom gradient, which Keras' silu has: such a graph is called as it was restored."""
    model = sequential(SHAPE, layers.LSTM(4, return_sequences=True), layers.Dense(2, "silu"))
    model.export(tmp_path / "saved", verbose=False)
    return model, load_saved_model(tmp_path / "saved")


@pytest.mark.parametrize("product", ["vjp", "integrated_gradients", *TWICE])
def test_loops_that_no_tape_can_use_twice_have_plain_gradients(product, bound):
    (model, loaded), compute = bound, getattr(sensitivity, product)
    if product in TWICE:
        with pytest.raises(Refused, match="plain gradients alone.*57343.*custom gradient"):
            compute(loaded, WINDOWS, *TWICE[product])
        return
    found, report = compute(loaded, WINDOWS, *PRODUCTS[product], report=True)
    assert worst(found, compute(cast(model, "float64"), WINDOWS, *PRODUCTS[product])) < 1e-5
    assert report.setting.kernel == "gradient"
    assert any("57343" in what for what in report.lost)


def test_a_stopped_gradient_that_was_saved_has_no_second_derivative(tmp_path):
    """That of a variance, by which layers normalize, holds its mean constant."""
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(4), layers.LayerNormalization(), layers.Dense(1))
    model.export(tmp_path / "saved", verbose=False)
    restored = tf.saved_model.load(str(tmp_path / "saved"))
    assert worst(sensitivity.jacobian(restored, WINDOWS), sensitivity.jacobian(cast(model, "float64"), WINDOWS)) < 1e-5
    with pytest.raises(Refused, match="stopped gradient"):
        sensitivity.hessian(restored, WINDOWS)


def test_outputs_by_name_stand_one_after_another(tmp_path):
    model = two_outputs()
    model.export(tmp_path / "saved", verbose=False)
    loaded = load_saved_model(tmp_path / "saved")
    assert worst(sensitivity.jacobian(loaded, WINDOWS), double_jacobian(model)[:, None]) < 1e-5
    heat = sensitivity.jacobian(loaded, WINDOWS, of="heat")
    assert worst(heat, double_jacobian(model)[:, 1:]) < 1e-5


def test_many_outputs_stand_in_the_order_of_their_numbers(tmp_path):
    source = keras.Input(SHAPE)
    flat = layers.Flatten()(source)
    model = keras.Model(source, [layers.Rescaling(float(number))(flat) for number in range(12)])
    model.export(tmp_path / "saved", verbose=False)
    restored = tf.saved_model.load(tmp_path / "saved")
    signature = restored.signatures["serving_default"]
    found = as_model(SimpleNamespace(signatures={"other": signature}))(tf.ones((1, *SHAPE)))
    assert [float(part[0, 0]) for part in found.values()] == list(range(12))


def test_a_keras_model_saved_by_tensorflow(tmp_path):
    model = MODELS["lstm sequence"]()
    tf.saved_model.save(model, tmp_path / "saved")
    assert worst(sensitivity.jacobian(load_saved_model(tmp_path / "saved"), WINDOWS), double_jacobian(model)) < 1e-5


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_a_module_that_takes_a_fixed_number_of_windows(batch, tmp_path):
    module = Module(batch=batch)
    path = saved(module, tmp_path / "saved", batch)
    found, report = sensitivity.jacobian(load_saved_model(path), WINDOWS, report=True)
    assert worst(found, tape_jacobian(module.run, WINDOWS)) < 1e-5
    assert (report.setting.kernel == "gradient") == (batch is not None)


def test_a_fixed_batch_of_a_recurrent_model(tmp_path):
    model = MODELS["lstm sequence"]()
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, [keras.InputSpec(shape=(2, *SHAPE), dtype="float32")])
    archive.write_out(tmp_path / "saved", verbose=False)
    found = sensitivity.jacobian(load_saved_model(tmp_path / "saved"), WINDOWS)
    assert worst(found, double_jacobian(model)) < 1e-5


def test_a_module_in_memory_needs_no_saving():
    module = Module()
    first = sensitivity.jacobian(module, WINDOWS)
    assert worst(first, tape_jacobian(module.run, WINDOWS)) < 1e-5
    _, report = sensitivity.jacobian(module, WINDOWS, report=True)
    assert report.reused


def test_outputs_are_split_where_memory_is_short(bound):
    _, model = bound
    from sensitivity.engine import Tuned
    from sensitivity.model import Target
    from sensitivity.setting import Setting
    from tests.describing import describe_call

    target = Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))
    parts = Tuned(target, Setting("gradient", 2, outputs_per_call=5))(WINDOWS)
    whole = Tuned(target, Setting("gradient", 4))(WINDOWS)
    assert worst(parts[1], whole[1]) < 1e-6
    assert worst(parts[0], whole[0]) < 1e-6


def test_weights_are_those_of_the_graph(tmp_path):
    model = MODELS["lstm"]()
    model.export(tmp_path / "saved", verbose=False)
    loaded = load_saved_model(tmp_path / "saved")
    assert loaded.count_params() == model.count_params()
    again = load_saved_model(tmp_path / "saved")
    assert fingerprint(loaded) == fingerprint(again)
    again.weights[0].assign_add(tf.ones_like(again.weights[0]))
    assert fingerprint(loaded)["weights"] != fingerprint(again)["weights"]


def test_the_declared_window_is_held_against_the_series(tmp_path):
    MODELS["lstm"]().export(tmp_path / "saved", verbose=False)
    loaded = load_saved_model(tmp_path / "saved")
    facts = describe(loaded, WindowsSection(), 2)
    assert (facts.length, facts.features) == SHAPE
    assert facts.recurrent == ((6, 0),)
    assert facts.activations >= 6 * 4 * 4  # of the gates alone, at all steps
    with pytest.raises(Refused, match="3 features"):
        describe(loaded, WindowsSection(), 3)


def test_on_a_gpu_nothing_is_left_to_cudnn(bound, tmp_path):
    MODELS["lstm sequence"]().export(tmp_path / "again", verbose=False)
    facts = describe(load_saved_model(tmp_path / "again"), WindowsSection(), 2)
    assert not any(setting.use_cudnn for setting in families(SensitivitySection(), facts, gpu=True))
    facts = describe(bound[1], WindowsSection(), 2)
    (only,) = families(SensitivitySection(), facts, gpu=True)
    assert (only.kernel, only.use_cudnn, only.xla) == ("gradient", False, False)
    with pytest.raises(Refused, match="57343") as refusal:
        families(SensitivitySection(kernel="batch_jacobian"), facts)
    assert refusal.value.allowed == '"auto", "gradient"'


def test_its_own_dtype_is_kept(tmp_path):
    module = Module(dtype="float64")
    loaded = load_saved_model(saved(module, tmp_path / "saved", dtype="float64"))
    found = sensitivity.jacobian(loaded, WINDOWS)
    assert found.dtype == "float64"
    assert worst(found, tape_jacobian(module.run, WINDOWS.astype("float64"))) < 1e-12
    with pytest.raises(Refused, match="SavedModel of float64") as refusal:
        cast(loaded, "float32")
    assert refusal.value.key == "run.dtype"


# ---- custom gradients --------------------------------------------------------------------------------


@tf.custom_gradient
def clip_gradients(y):
    """TensorFlow's guide to advanced automatic differentiation has it so."""
    return y, lambda upstream: tf.clip_by_norm(upstream, 0.5)


@tf.custom_gradient
def clip_each(y):
    return y, lambda upstream: tf.clip_by_norm(upstream, 0.5, axes=[1])


def clipped_by_hand(module) -> np.ndarray:
    """Each output of each window alone: what comes to the clipped numbers (12) is cut to a norm of 0.5."""
    rows = []
    for window in WINDOWS:
        out = module.run(window[None]).numpy()[0]
        upstream = (module.weight.numpy() * (1 - out**2)).T
        norms = np.linalg.norm(upstream, axis=1, keepdims=True)
        rows.append(upstream * np.minimum(1, 0.5 / norms))
    return np.array(rows).reshape(len(WINDOWS), 2, *SHAPE)


@pytest.mark.parametrize(("clip", "together"), [(clip_gradients, 1), (clip_each, None)])
@pytest.mark.parametrize("through_disk", [False, True])
def test_clipped_gradients_stay_clipped_window_by_window(clip, together, through_disk, tmp_path):
    module = model = Module(inner=clip)
    if through_disk:
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
        model = load_saved_model(saved(module, tmp_path / "saved", options=options))
    found, report = sensitivity.jacobian(model, WINDOWS, report=True)
    expected = clipped_by_hand(module)
    assert worst(found, expected) < 1e-5
    assert worst(sensitivity.jacobian(model, WINDOWS[:1]), expected[:1]) < 1e-5
    assert worst(found, tape_jacobian(Module().run, WINDOWS)) > 0.1  # which are not clipped
    reason = "influence each other" if together else "not linear"
    assert any(reason in what for what in report.lost)


def test_a_module_that_is_given_another_variable_is_looked_at_anew():
    class Linear(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable([[1.0], [2.0]])

        def __call__(self, windows):
            return tf.tanh(tf.matmul(windows[:, -1], self.weight))

    module, windows = Linear(), np.zeros((3, 4, 2), "float32")
    for weight in ([1.0, 2.0], [3.0, 5.0]):
        module.weight = tf.Variable(np.reshape(weight, (2, 1)).astype("float32"))
        np.testing.assert_allclose(sensitivity.jacobian(module, windows)[:, 0, -1], [weight] * 3, rtol=1e-6)
    assert len(module.variables) == 1


def test_the_guides_own_case(tmp_path):
    class MyModule(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec(None)])
        def call_custom_grad(self, x):
            return clip_gradients(x)

        @tf.function(input_signature=[tf.TensorSpec((None, 1, 1))])
        def __call__(self, x):
            return 3 * self.call_custom_grad(x)

    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(MyModule(), tmp_path / "saved", options=options)
    found = sensitivity.jacobian(load_saved_model(tmp_path / "saved"), np.ones((4, 1, 1), "float32"))
    np.testing.assert_allclose(found.ravel(), 0.5)


def test_an_activation_with_a_gradient_of_its_own_is_no_reason_for_another_kernel(tmp_path):
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(4, "silu"), layers.Dense(2))
    model.export(tmp_path / "saved", verbose=False)
    found, report = sensitivity.jacobian(load_saved_model(tmp_path / "saved"), WINDOWS, report=True)
    assert worst(found, double_jacobian(model)) < 1e-5
    assert report.setting.kernel != "gradient"


def test_an_operation_without_a_gradient_is_refused(tmp_path):
    path = saved(
        Module(inner=lambda flat: tf.raw_ops.PreventGradient(input=flat, message="inference only")), tmp_path / "saved"
    )
    with pytest.raises(Refused, match="inference only"):
        sensitivity.jacobian(load_saved_model(path), WINDOWS)


def test_custom_gradients_that_were_not_saved_are_refused(tmp_path):
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    path = saved(Module(inner=clip_each), tmp_path / "saved", options=options)
    with pytest.raises(Refused, match="without its custom gradients") as refusal:
        load_saved_model(path)
    assert "experimental_custom_gradients=True" in str(refusal.value)


def test_coupled_gradients_of_several_windows_at_a_time_are_refused(tmp_path):
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    path = saved(Module(inner=clip_gradients, batch=3), tmp_path / "saved", 3, options=options)
    with pytest.raises(Refused, match="3 windows at a time"):
        sensitivity.jacobian(load_saved_model(path), WINDOWS)


# ---- refusals ----------------------------------------------------------------------------------------


def writes(name):
    def inner(flat):
        with tf.control_dependencies([tf.io.write_file(name, "seen")]):
            return tf.identity(flat)

    return inner


def test_operations_on_files_need_trust(tmp_path):
    path = saved(Module(inner=writes(str(tmp_path / "written"))), tmp_path / "saved")
    (tmp_path / "written").unlink(missing_ok=True)
    with pytest.raises(Refused, match="WriteFile") as refusal:
        load_saved_model(path)
    assert "--trust-model" in str(refusal.value)
    assert not (tmp_path / "written").exists()
    assert isinstance(load_saved_model(path, trust=True), SavedModel)


def damaged(part):
    def damage(path):
        (path / part).write_bytes(b"garbage")

    return damage


DAMAGES = {
    "graph": damaged("saved_model.pb"),
    "index": damaged("variables/variables.index"),
    "no variables": lambda path: [file.unlink() for file in (path / "variables").iterdir()],
    "no graph": lambda path: (path / "saved_model.pb").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_directory_is_refused(damage, tmp_path):
    path = saved(Module(), tmp_path / "saved")
    damage(path)
    with pytest.raises(Refused) as refusal:
        load_saved_model(path)
    assert refusal.value.key == "model.path"


def test_windows_that_influence_each_other_are_refused(tmp_path):
    path = saved(Module(inner=lambda flat: flat - tf.reduce_mean(flat, 0)), tmp_path / "saved")
    with pytest.raises(Refused, match="influence each other"):
        sensitivity.jacobian(load_saved_model(path), WINDOWS)


def test_layers_of_half_precision_cannot_be_cast(tmp_path):
    """Their derivatives differ from kernel to kernel in the third digit."""
    model = sequential((4, 2), layers.LSTM(3, dtype="mixed_bfloat16"), layers.Dense(1, dtype="float32"))
    model.export(tmp_path / "saved", verbose=False)
    with pytest.raises(Refused, match=r"SavedModel of bfloat16[\s\S]*model\.keras"):
        sensitivity.jacobian(load_saved_model(tmp_path / "saved"), WINDOWS)


def test_half_precision_cannot_be_cast(tmp_path):
    loaded = load_saved_model(saved(Module(dtype="float16"), tmp_path / "saved", dtype="float16"))
    with pytest.raises(Refused, match="SavedModel of float16"):
        sensitivity.jacobian(loaded, WINDOWS)


def test_what_was_on_a_tape_before_is_to_be_loaded_anew(tmp_path):
    """TensorFlow then keeps a gradient with the function that no graph can use."""
    model = MODELS["lstm"]()
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    with tf.GradientTape() as tape:
        tape.watch(source := tf.constant(WINDOWS))
        loaded.serve(source)
    with pytest.raises(Refused, match="load it anew"):
        sensitivity.jacobian(loaded, WINDOWS)
    assert worst(sensitivity.jacobian(tf.saved_model.load(tmp_path / "saved"), WINDOWS), double_jacobian(model)) < 1e-5
