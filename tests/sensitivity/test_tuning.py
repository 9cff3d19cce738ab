"""The tuner: what it tries, within which memory, what it takes, and what it keeps."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from keras import layers

from sensitivity import choices, meter, tuning
from sensitivity.engine import Tuned, compile_kernel
from sensitivity.errors import Refused
from sensitivity.folders import Folder
from sensitivity.job import SensitivitySection
from sensitivity.model import Target
from sensitivity.plan import call_memory
from sensitivity.setting import Choice, Setting, Trial
from sensitivity.tuning import Room, tune
from tests.conftest import sequential, tape_jacobian, worst
from tests.describing import describe_call

SHAPE = (6, 2)
GB = 10**9
AUTO = SensitivitySection()


def windows_of(count: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((count, *SHAPE)).astype("float32")


def target_of(*parts) -> Target:
    model = sequential(SHAPE, *parts)
    return Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))


compiled, stated = functools.cache(compile_kernel), functools.cache(meter.stated)


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    """What one test has compiled serves the others: all tune the same few models."""
    monkeypatch.setattr("sensitivity.engine.compile_kernel", lambda target, setting: compiled(target, setting.bare))
    monkeypatch.setattr(meter, "stated", stated)


@pytest.fixture(scope="module")
def narrow() -> Target:
    return target_of(layers.Flatten(), layers.Dense(1))


@pytest.fixture(scope="module")
def wide() -> Target:
    """Twelve inputs, twenty outputs: every family but `gradient` can serve it."""
    return target_of(layers.Flatten(), layers.Dense(20, "tanh"))


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(tuning, "LEAST_SECONDS", 600.0)
    monkeypatch.setattr(tuning, "MOST_SECONDS", 600.0)
    monkeypatch.setattr(tuning, "TRIAL_SECONDS", 0.01)


@pytest.fixture
def speeds(monkeypatch, patient):
    """Kernels as fast as a table says, by what the table's keys find in the setting's words."""
    table: dict[str, float] = {}

    def rate(engine: Tuned, windows: np.ndarray) -> float:
        return next((speed for words, speed in table.items() if words in str(engine.setting)), 1.0)

    monkeypatch.setattr(tuning, "_rate_of_a_call", rate)
    return table


def test_the_fastest_wins(wide, speeds):
    speeds |= {"forward, 16 windows a call, loop": 500.0, "forward, 64 windows a call, loop": 400.0, "forward": 100.0}
    choice, engine = tune(AUTO, wide, windows_of(9), Room(GB), 64, 10**6)
    assert str(choice.setting).startswith("forward, 16 windows a call, loop")
    assert choice.by == "timed"
    assert choice.windows_per_second == 500.0
    assert engine.setting == choice.setting
    tried = {(t.setting.kernel, t.setting.experimental_use_pfor, t.setting.xla) for t in choice.trials}
    assert len(tried) == 8
    assert "500 windows/s, the best of" in choice.why


def test_of_equals_the_one_of_least_memory_wins(wide, speeds):
    speeds |= {"64 windows a call": 100.0, "16 windows a call": 99.0}
    choice, _ = tune(AUTO, wide, windows_of(9), Room(GB), 64, 10**6)
    assert choice.setting.windows_per_call == 16


def test_the_fastest_few_are_timed_again_in_turns(wide, patient, monkeypatch):
    """One was lucky at first."""
    lucky, steady = "forward, 64 windows a call, loop over inputs, no XLA", "forward, 64 windows a call, pfor"
    times = Counter()

    def rate(engine, windows, seconds):
        name = str(engine.setting)
        times[name] += 1
        if name == lucky:
            return 1.1e6 if times[name] == 1 else 0.9e6
        return 1e6 if name.startswith(steady) and not engine.setting.xla else 1e5

    monkeypatch.setattr(tuning, "_rate_of_a_call", lambda engine, windows: 1e9)  # so short that it is timed for longer
    monkeypatch.setattr(tuning, "_time", rate)
    choice, engine = tune(AUTO, wide, windows_of(9), Room(GB), 64, 10**9)
    assert str(choice.setting).startswith(steady)
    assert times[lucky] == 1 + tuning.ROUNDS
    assert engine.setting == choice.setting
    assert choice.windows_per_second == 1e6


def test_the_choice_computes_what_the_tape_does(wide, patient):
    windows = windows_of(30)
    choice, engine = tune(AUTO, wide, windows, Room(GB), 32, 10**6)
    assert worst(engine(windows)[1], tape_jacobian(wide.model, windows)) < 1e-5
    assert all(trial.measured is None or trial.measured >= 0 for trial in choice.trials)
    assert engine.traces == 1


def test_nothing_is_run_that_is_projected_over_the_budget(wide, patient, monkeypatch):
    room = Room(30_000)
    run = []
    adopt = Tuned._adopt
    monkeypatch.setattr(Tuned, "_adopt", lambda self, setting: (run.append(setting), adopt(self, setting))[1])
    choice, _ = tune(AUTO, wide, windows_of(9), room, 4096, 10**6)
    assert run
    assert all(call_memory(wide.facts, setting) <= room.call for setting in run)
    assert choice.call_bytes <= room.call
    with pytest.raises(Refused, match="single window"):
        tune(AUTO, wide, windows_of(9), Room(100), 64, 10**6)


def test_a_process_that_is_nearly_full_tries_no_more(wide, patient):
    choice, _ = tune(AUTO, wide, windows_of(9), Room(GB, resident=1), 64, 10**6)
    assert sum(trial.windows_per_second is not None for trial in choice.trials) == 1
    assert {trial.note for trial in choice.trials[1:]} == {"no memory left to try it"}


def test_trials_take_no_longer_than_the_work_is_worth(wide):
    choice, _ = tune(AUTO, wide, windows_of(9), Room(GB), 64, 30)
    assert sum(trial.windows_per_second is not None for trial in choice.trials) == 1
    assert {trial.note for trial in choice.trials[1:]} == {"no time left to try it"}


def timed(choice: Choice) -> list[str]:
    return [str(trial.setting) for trial in choice.trials if trial.windows_per_second]


def test_small_work_is_done_by_what_people_write_and_by_nothing_else(wide, monkeypatch):
    monkeypatch.setattr(tuning, "LEAST_SECONDS", 3.0)
    choice, _ = tune(AUTO, wide, windows_of(9), Room(GB), 32, 32)
    assert timed(choice) == ["batch_jacobian, 32 windows a call, pfor over all outputs, no XLA"]
    assert {trial.note for trial in choice.trials[1:]} == {"no time left to try it"}


def test_no_trial_begins_that_is_expected_to_outlast_its_time(wide, patient, monkeypatch):
    """By what the plain tape took to build, and how much more the others have to."""
    effort = {"pfor over all outputs, no XLA": 1.0, "loop over outputs, no XLA": 2.0}
    known = lambda setting: next((units for words, units in effort.items() if words in str(setting)), 10.0**9)  # noqa: E731
    monkeypatch.setattr(tuning, "effort", lambda setting, facts: known(setting))
    choice, _ = tune(AUTO, wide, windows_of(9), Room(GB), 64, 10**6)
    assert timed(choice)[0] == "batch_jacobian, 64 windows a call, pfor over all outputs, no XLA"
    assert all(known(trial.setting) < 10**9 for trial in choice.trials if trial.windows_per_second)
    assert {known(t.setting) for t in choice.trials if t.note == "no time left to try it"} == {10.0**9}


def test_a_kernel_with_wrong_numbers_never_wins(wide, speeds, monkeypatch):
    speeds |= {"forward": 1000.0, "batch_jacobian": 1.0}
    call = Tuned.__call__

    def off(self, windows):
        prediction, jacobian = call(self, windows)
        return prediction, jacobian * (1.001 if self.setting.kernel == "forward" else 1.0)

    monkeypatch.setattr(Tuned, "__call__", off)
    choice, _ = tune(AUTO, wide, windows_of(9), Room(GB), 64, 10**6)
    assert choice.setting.kernel == "batch_jacobian"
    assert any("off by 1.0e-03" in trial.note for trial in choice.trials)


def test_a_kernel_that_raises_is_passed_over(wide, patient, monkeypatch):
    call = Tuned.__call__

    def broken(self, windows):
        if self.setting.xla:
            raise RuntimeError("no such luck")
        return call(self, windows)

    monkeypatch.setattr(Tuned, "__call__", broken)
    choice, _ = tune(AUTO, wide, windows_of(9), Room(GB), 64, 10**6)
    assert not choice.setting.xla
    assert "RuntimeError: no such luck" in {trial.note for trial in choice.trials}


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({"kernel": "gradient", "windows_per_call": 7}, True),
        ({"kernel": "batch_jacobian", "windows_per_call": 7, "experimental_use_pfor": False}, True),
        ({"kernel": "batch_jacobian", "windows_per_call": 7}, False),
        ({"kernel": "gradient"}, False),
    ],
)
def test_what_is_given_is_not_timed(narrow, asked, given):
    choice, engine = tune(SensitivitySection(**asked), narrow, windows_of(9), Room(GB), 64, 10**6)
    assert (choice.by == "given") is given
    assert choice.setting.kernel == asked["kernel"]
    assert choice.setting.windows_per_call == asked.get("windows_per_call", choice.setting.windows_per_call)
    assert engine.setting == choice.setting


def test_measured_memory_corrects_what_is_projected(wide):
    search = tuning._Search(AUTO, wide, windows_of(9), Room(GB), 4096, 10**6)
    small, large = Setting("forward", 16), Setting("forward", 64)
    measured = 10 * 2**20
    search.trials.append(Trial(small, 1, 1.0, measured))
    assert search.projected(small) == int(tuning.AGAIN * measured)
    assert search.projected(large) == pytest.approx(4 * tuning.SCALED * measured, rel=0.01)
    assert search.projected(replace(small, windows_per_call=4)) == pytest.approx(tuning.SCALED * measured / 4, rel=0.01)
    search.trials.append(Trial(large, 1, 1.0, measured))
    assert search.projected(large) == int(tuning.AGAIN * measured)
    other = Setting("batch_jacobian", 16)
    assert search.projected(other) == call_memory(wide.facts, other)
    search.trials.append(Trial(other, 1, 1.0, measured=1000))  # too little to be told from noise
    assert search.projected(other) == min(call_memory(wide.facts, other), tuning.LEAST_BYTES)


def test_a_call_that_took_more_than_there_is_is_made_smaller(wide, speeds, monkeypatch):
    """A megabyte a window, where the rule expects some kilobytes."""
    running = []
    call = Tuned.__call__
    monkeypatch.setattr(Tuned, "__call__", lambda self, w: (running.append(len(w)), call(self, w))[1])
    monkeypatch.setattr(tuning, "_rate_of_a_call", lambda engine, windows: float(engine(windows)[0].shape[0]))

    @contextlib.contextmanager
    def measured(*, gpu):
        reading = meter.Reading()
        yield reading
        reading.peak = running[-1] * 2**20

    monkeypatch.setattr(meter, "measured", measured)
    choice, engine = tune(AUTO, wide, windows_of(9), Room(40 * 2**20), 64, 10**6)
    assert choice.setting.windows_per_call == 16
    assert choice.call_bytes == int(tuning.AGAIN * 16 * 2**20)
    assert engine.setting == choice.setting
    given = SensitivitySection(windows_per_call=64)
    with pytest.raises(Refused, match="73.8 MB or more"):
        tune(given, wide, windows_of(9), Room(40 * 2**20), 64, 10**6)


def test_the_compiler_says_what_its_kernels_take(wide, patient, monkeypatch):
    rule = call_memory(wide.facts, Setting("forward", 64, xla=True))
    monkeypatch.setattr(meter, "stated", lambda function, *arguments: rule * 10**6)
    choice, _ = tune(AUTO, wide, windows_of(9), Room(8 * 2**20), 64, 10**6)
    assert not choice.setting.xla
    refused = [trial for trial in choice.trials if trial.setting.xla]
    assert len(refused) == 4
    assert all(trial.note.startswith("projected to take") for trial in refused)
    monkeypatch.undo()
    engine = Tuned(wide, Setting("forward", 64, xla=True))
    result = 64 * 20 * 12 * 4
    assert result < engine.stated_bytes() < 20 * result
    assert Tuned(wide, Setting("forward", 64)).stated_bytes() is None


def test_where_the_compiler_says_too_much_fewer_windows_are_tried(wide, patient, monkeypatch):
    monkeypatch.setattr(meter, "stated", lambda function, first, windows: windows.shape[0] * 2**17)
    room = Room(5 * 2**20)
    choice, _ = tune(AUTO, wide, windows_of(9), room, 64, 10**6)
    ran = [trial for trial in choice.trials if trial.setting.xla and trial.windows_per_second]
    assert len({tuning._family(trial.setting) for trial in ran}) == 4
    first = next(trial for trial in ran if trial.setting.kernel == "forward")
    assert 20 < first.setting.windows_per_call < 40
    assert first.projected <= room.call


def test_the_compiler_is_not_asked_where_there_is_room_for_far_more(wide, patient, monkeypatch):
    asked = []
    monkeypatch.setattr(meter, "stated", lambda function, *arguments: asked.append(function) or 1)
    choice, _ = tune(AUTO, wide, windows_of(9), Room(GB), 64, 10**6)
    assert choice.by == "timed"
    assert not asked


def test_one_window_that_took_too_much_is_split_over_its_outputs(wide, patient, monkeypatch):
    """A megabyte an output, where the rule expects some kilobytes."""
    wanted = SensitivitySection(kernel="batch_jacobian", experimental_use_pfor=True)
    search = tuning._Search(wanted, wide, windows_of(9), Room(8 * 2**20), 4096, 10**6)
    rule = tuning.by_rule(wanted, wide, search.room, 64, "memory")
    one = replace(rule.setting, windows_per_call=1)
    search.trials.append(Trial(one, 1, 1.0, measured=20 * 2**20))
    assert search.best() is None
    fitted = search.fitted(rule)
    assert fitted.call_bytes <= search.room.call
    assert fitted.setting.windows_per_call == 1
    assert 1 <= fitted.setting.outputs_per_call < 10


def test_the_compiler_is_asked_before_a_window_is_too_large(wide, patient, monkeypatch):
    room = Room(call_memory(wide.facts, Setting("forward", 1, experimental_use_pfor=False)))
    assert room.call < call_memory(wide.facts, Setting("forward", 1, xla=True))
    monkeypatch.setattr(meter, "stated", lambda function, *arguments: 1)
    choice, _ = tune(AUTO, wide, windows_of(9), room, 64, 10**6)
    assert any(t.setting.xla and t.setting.experimental_use_pfor and t.windows_per_second for t in choice.trials)


def test_the_meter_sees_what_a_kernel_takes(wide):
    engine, windows = Tuned(wide, Setting("batch_jacobian", 2048)), windows_of(2048)
    engine(windows)
    with meter.measured() as reading:
        engine(windows)
    result = 2048 * 20 * 12 * 4
    if reading.peak is not None:  # a system that lets it be measured
        assert result <= reading.peak <= 20 * result


def test_a_choice_survives_its_file(wide, tmp_path):
    setting = Setting("forward", 8, lost=("XLA: none",), outputs_per_call=3)
    choice = Choice(setting, "timed", 123, (Trial(setting, 100, 5.0, 90), Trial(setting, 9, note="slow")), "cpu: x")
    purpose = choices.purpose({"weights": "a"}, wide.facts, AUTO, "cpu: x")
    place = Folder(tmp_path)
    assert choices.remembered(place, purpose) is None
    choices.remember(place, purpose, choice)
    choices.remember(place, {**purpose, "kind": "gpu: y"}, replace(choice, call_bytes=7))
    choices.remember(place, purpose, choice)
    assert choices.remembered(place, purpose) == choice
    assert choices.remembered(place, {**purpose, "kind": "gpu: y"}).call_bytes == 7
    assert choices.remembered(place, {**purpose, "dtype": "float64"}) is None
    assert (
        choices.remembered(place, choices.purpose({}, wide.facts, SensitivitySection(kernel="forward"), "cpu: x"))
        is None
    )
    (tmp_path / "tuning.json").write_text('{"settings": [{"for": 3}, 4]}')
    assert choices.remembered(place, purpose) is None
