"""Some of a model's output steps and channels: only these are differentiated, by every kernel alike."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import sensitivity
from sensitivity import walks
from sensitivity.audit import audit
from sensitivity.engine import Tuned
from sensitivity.errors import Refused
from sensitivity.facts import ModelFacts
from sensitivity.heads import Selection, select
from sensitivity.job import SensitivitySection
from sensitivity.kernels import KERNELS, why_not
from sensitivity.model import Target, describe
from sensitivity.plan import call_memory
from sensitivity.probes import Seen, contracted, vjp
from sensitivity.setting import Setting
from tests.conftest import sequential, tape_jacobian, worst
from tests.describing import describe_call

SHAPE = (11, 2)

pytestmark = pytest.mark.usefixtures("two_segments")


def windows_of(count: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((count, *SHAPE)).astype("float32")


@pytest.fixture(scope="module")
def recurrent():
    """An output of three channels at every step, and its Jacobian by the tape."""
    parts = [layers.LSTM(4, return_sequences=True), layers.Dense(3, "tanh"), layers.GRU(3, return_sequences=True)]
    model = sequential(SHAPE, *parts)
    return model, tape_jacobian(model, windows_of(3))


@pytest.fixture(scope="module")
def shallow():
    """The same with one recurrent layer, which is compiled in half the time."""
    model = sequential(SHAPE, layers.LSTM(4, return_sequences=True), layers.Dense(3, "tanh"))
    return model, tape_jacobian(model, windows_of(3))


@pytest.fixture(scope="module")
def forecast():
    """A forecast of four steps, two channels each, and its Jacobian by the tape."""
    model = sequential(SHAPE, layers.LSTM(4), layers.Dense(8), layers.Reshape((4, 2)))
    return model, tape_jacobian(model, windows_of(3))


def target_of(model: keras.Model, **wanted) -> Target:
    return Target(model, describe_call(model, SHAPE, of="output", dtype="float32", **wanted))


def differentiated(target: Target, kernel: str, outputs_per_call: int | None = None, pfor: bool = False):
    engine = Tuned(target, Setting(kernel, 3, pfor, outputs_per_call=outputs_per_call))
    prediction, jacobian = engine(windows_of(3))
    np.testing.assert_allclose(prediction, target(windows_of(3)), rtol=1e-5, atol=1e-6)
    return jacobian


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wanted", [{"output_steps": [1, -1], "outputs": [1]}, {"outputs": ["output_0"]}])
def test_every_kernel_differentiates_what_is_wanted(forecast, kernel, wanted):
    model, expected = forecast
    target = target_of(model, **wanted)
    if why_not(kernel, target.facts) is not None:
        assert (kernel, target.facts.target_size > 1) == ("gradient", True)
        return
    steps, channels = ([1, 3], [1]) if "output_steps" in wanted else ([0, 1, 2, 3], [0])
    found = differentiated(target, kernel, pfor=kernel == "batch_jacobian" and "output_steps" in wanted)
    assert worst(found, expected[:, steps][:, :, channels]) < 1e-5


def test_one_output_of_many_is_a_gradient(forecast):
    model, expected = forecast
    found = differentiated(target_of(model, output_steps=[2], outputs=[1]), "gradient")
    assert worst(found, expected[:, 2:3, 1:]) < 1e-5


@pytest.mark.parametrize(
    ("of", "wanted"), [("shallow", "3:8"), ("shallow", [0, 4, 9]), ("recurrent", "::2"), ("shallow", [-1])]
)
def test_a_scan_walks_back_from_the_steps_that_are_wanted(request, of, wanted):
    model, expected = request.getfixturevalue(of)
    target = target_of(model, output_steps=wanted, outputs=[0, 2])
    steps = list(select(11, "abc", wanted, None).steps)
    for split in (None, 4) if len(steps) * 2 > 4 else (None,):
        found = differentiated(target, "scan", split)
        assert worst(found, expected[:, steps][:, :, [0, 2]]) < 1e-5


@pytest.mark.parametrize("wanted", [None, "3:9", [0, 4, 9]])
@pytest.mark.parametrize(("of", "max_lag"), [("shallow", 0), ("recurrent", 3), ("shallow", 10)])
def test_lags_of_the_steps_that_are_wanted(request, of, max_lag, wanted):
    model, expected = request.getfixturevalue(of)
    target = target_of(model, output_steps=wanted, max_lag=max_lag)
    steps = select(11, "abc", wanted, None).steps or range(11)
    for split in (None, 6):
        found = differentiated(target, "scan", split)
        assert found.shape == (3, len(steps), 3, max_lag + 1, 2)
        for number, step in enumerate(steps):
            seen = min(max_lag, step) + 1
            assert worst(found[:, number, :, -seen:], expected[:, step, :, step + 1 - seen : step + 1]) < 1e-5
            assert not found[:, number, :, :-seen].any()


def test_blocks_give_the_steps_that_are_wanted(recurrent, monkeypatch):
    model, expected = recurrent
    monkeypatch.setattr(walks, "WORTH", 0.0)
    monkeypatch.setattr(walks, "MOST_JOINED", 4)
    steps, channels = [0, 1, 5, 10], [1, 2]
    target = target_of(model, output_steps=steps, outputs=channels)
    assert target.facts.walk(target.facts.target_size).kind == "blocks"
    found = differentiated(target, "scan")
    assert worst(found, expected[:, steps][:, :, channels]) < 1e-5
    assert not any(found[:, number, :, step + 1 :].any() for number, step in enumerate(steps))


def test_outputs_without_a_channel_axis_are_chosen_by_number():
    model = sequential(SHAPE, layers.LSTM(3, return_sequences=True), layers.Dense(1), layers.Flatten())
    expected = tape_jacobian(model, windows_of(3))
    target = target_of(model, outputs=["output_2", 7])
    for kernel in ("scan", "batch_jacobian"):
        assert worst(differentiated(target, kernel), expected[:, [2, 7]]) < 1e-5


def test_fewer_outputs_take_less_memory(recurrent):
    def bytes_of(**wanted):
        return call_memory(target_of(recurrent[0], **wanted).facts, Setting("scan", 64))

    every = bytes_of()
    assert bytes_of(output_steps=[-1]) < bytes_of(output_steps="::2") < every
    assert bytes_of(outputs=[0]) < every


@pytest.mark.parametrize(("of", "wanted"), [("recurrent", None), ("shallow", [0, 4, 9])])
def test_a_band_is_checked_at_its_beginning_too(request, of, wanted):
    """By what a product of the whole and one of the band have in common, at the ends and between."""
    model, _ = request.getfixturevalue(of)
    target = target_of(model, max_lag=3, output_steps=wanted)
    facts, engine = target.facts, Tuned(target, Setting("scan", 5))
    _, jacobian = engine(windows_of(3))
    seen = Seen.of(facts, 3)
    assert 0 in seen.firsts
    assert len(set(seen.firsts)) > 1
    vectors = seen.vectors(np.random.default_rng(0).standard_normal((3, *facts.target_shape)).astype("float32"))
    expected = seen.steps(vjp(target, windows_of(3), vectors))
    assert np.abs(expected).min(axis=1).max() > 0
    assert worst(contracted(vectors, seen.rows(jacobian)), expected) < 1e-5
    for part in (slice(0, 1), slice(-1, None)):  # what is wrong is seen, wherever it is
        wrong = jacobian.copy()
        wrong[:, part, :, -1] += 1
        assert worst(contracted(vectors, seen.rows(wrong)), expected) > 1e-2
    audited = audit(target, engine, windows_of(5))
    assert audited.vjp_error < 1e-5
    assert audited.jvp_error is None or audited.jvp_error < 1e-5
    assert audited.difference_error < 1e-3


@pytest.mark.parametrize(
    ("steps", "names", "expected"),
    [
        (None, None, Selection()),
        ([0, 1, 2], None, Selection()),
        ("::", ("a", "b"), Selection()),
        ([-3, -1], [1], Selection((0, 2), (1,))),
        ("1:", ("b",), Selection((1, 2), (1,))),
        (":-1", ("a", 1), Selection((0, 1))),
        ("::2", None, Selection((0, 2))),
    ],
)
def test_steps_and_channels_by_number_name_and_slice(steps, names, expected):
    assert select(3, ("a", "b"), steps, names) == expected


@pytest.mark.parametrize("steps", [[3], [-4], [1, 1], [2, 0], [2, -2], "3:", ":0"])
def test_steps_that_are_not_there_are_refused(steps):
    with pytest.raises(Refused, match="(?s)sensitivity.output_steps.*3 output steps.*from 0 to 2"):
        select(3, ("a",), steps, None)


@pytest.mark.parametrize("names", [["c"], [2], [-1], ["b", "a"], ["a", 0]])
def test_channels_that_are_not_there_are_refused(names):
    with pytest.raises(Refused, match=r"(?s)sensitivity.outputs.*a, b, or their numbers"):
        select(3, ("a", "b"), None, names)


@pytest.mark.parametrize("wanted", ["5", "a:b", "1:2:-1", "::0", [], [1.5], "", [True]])
def test_what_is_no_list_or_slice_of_steps_is_refused(wanted):
    with pytest.raises(ValueError, match="output_steps"):
        SensitivitySection(output_steps=wanted)


def test_two_outputs_never_have_one_name():
    source = keras.Input(SHAPE)
    model = keras.Model(source, {"a": layers.Dense(2)(source), "a_0": layers.Dense(1)(source)})
    windows = sensitivity.job.WindowsSection(length=11)
    assert describe(model, windows, 2).outputs == ("output_0", "output_1", "output_2")


def test_facts_say_which_steps_and_survive_their_file(recurrent):
    windows = sensitivity.job.WindowsSection(length=11)
    facts = describe(recurrent[0], windows, 2, output_steps=[-2, -1], outputs=["output_1"])
    assert (facts.output_steps, facts.outputs, facts.target_shape) == (2, ("output_1",), (2, 1))
    assert facts.selection == Selection((9, 10), (1,))
    assert ModelFacts.from_json(facts.to_json()) == facts
    assert facts.scan.outputs == 1
    earlier = {name: part for name, part in facts.to_json().items() if name != "selection"}
    read = ModelFacts.from_json({**earlier, "scan": {"outputs": 1, "state": 4}})
    assert (read.selection, read.scan, read.no_scan) == (Selection(), None, "a run of an earlier version")


def test_a_notebook_asks_for_some_outputs():
    model = sequential(SHAPE, layers.GRU(3, return_sequences=True))
    expected = tape_jacobian(model, windows_of(3))
    numbers = np.array([2, 10])
    wanted = {"output_steps": numbers, "outputs": ["output_2"]}
    found = sensitivity.jacobian(model, windows_of(3), kernel="scan", windows_per_call=3, **wanted)
    assert worst(found, expected[:, numbers][:, :, 2:]) < 1e-5
    timed = sensitivity.jacobian(model, windows_of(1), output_steps=[3], outputs=["output_2"], kernel="scan")
    assert worst(timed, expected[:1, 3:4, 2:]) < 1e-5
