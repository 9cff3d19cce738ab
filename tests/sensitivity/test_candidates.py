"""Which settings are worth a trial, and the one to take untried: pure, from shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sensitivity import candidates
from sensitivity.errors import Refused
from sensitivity.facts import CallFacts, Source
from sensitivity.heads import Selection
from sensitivity.job import SensitivitySection
from sensitivity.plan import call_memory
from sensitivity.products.jacobian import Jacobian
from sensitivity.setting import Setting
from sensitivity.walks import ScanFacts

AUTO = SensitivitySection()
PLAIN = CallFacts(
    input_shape=(10, 2),
    target_shape=(5,),
    source=Source("input", "input", (10, 2)),
    parameters=100,
    activations=200,
    recurrent=(),
    scan=None,
    no_scan="no recurrent layer",
    max_lag=None,
    selection=Selection(),
    smooth=True,
    operations=50,
    dtype="float32",
)
FACTS = Jacobian().shaped(PLAIN)


def changed(**parts) -> CallFacts:
    return Jacobian().shaped(replace(PLAIN, **parts))


def ways(facts: CallFacts, wanted: SensitivitySection = AUTO, **more) -> list[str]:
    return [str(setting).replace("1 windows a call, ", "") for setting in candidates.families(wanted, facts, **more)]


def test_families_follow_the_model():
    assert ways(FACTS) == [
        "batch_jacobian, pfor over all outputs, XLA",
        "batch_jacobian, loop over outputs, no XLA",
        "batch_jacobian, pfor over all outputs, no XLA",
        "batch_jacobian, loop over outputs, XLA",
    ]
    assert ways(changed(target_shape=(1,))) == ["gradient, XLA", "gradient, no XLA"]
    assert ways(changed(target_shape=(21,)))[0] == "forward, pfor over all inputs, XLA"
    recurrent = changed(recurrent=((10, 8),))
    assert ways(recurrent) == [
        "batch_jacobian, loop over outputs, XLA",
        "batch_jacobian, loop over outputs, no XLA",
        "batch_jacobian, pfor over all outputs, no XLA",
    ]
    forward = ways(changed(recurrent=((10, 8),), target_shape=(21,)))[3:]
    assert forward == ["forward, loop over inputs, XLA", "forward, loop over inputs, no XLA"]
    assert not any(way.endswith(", XLA") for way in ways(changed(smooth=False)))


def first_tried(facts: CallFacts) -> str:
    return str(candidates.in_order(candidates.families(AUTO, facts), facts)[0]).replace("1 windows a call, ", "")


def test_what_people_write_is_tried_first():
    assert first_tried(FACTS) == "batch_jacobian, pfor over all outputs, no XLA"
    assert first_tried(changed(target_shape=(1,))) == "gradient, no XLA"
    assert first_tried(changed(target_shape=(21,))) == "batch_jacobian, pfor over all outputs, no XLA"
    assert first_tried(changed(recurrent=((10, 8),))) == "batch_jacobian, pfor over all outputs, no XLA"
    assert (
        first_tried(changed(recurrent=((10, 8),), no_pfor="it crashes")) == "batch_jacobian, loop over outputs, no XLA"
    )
    scanned = changed(recurrent=((10, 8),), scan=ScanFacts(0, 8, 8, 8, 8, 8, 8))
    assert first_tried(scanned) == "scan, XLA"
    assert first_tried(replace(scanned, smooth=False)) == "batch_jacobian, pfor over all outputs, no XLA"
    every = candidates.families(AUTO, scanned)
    assert sorted(map(str, candidates.in_order(every, scanned))) == sorted(map(str, every))


def test_a_first_call_of_the_plain_tape_is_large():
    plain = Setting("batch_jacobian", 1)
    assert candidates.first_size(plain, FACTS, 10**10, 32).windows_per_call == 32
    long = changed(activations=10**5)
    few, many = (candidates.first_size(s, long, 10**10, 64) for s in (replace(plain, xla=True), plain))
    assert few.windows_per_call < many.windows_per_call
    assert call_memory(long, many) <= candidates.PLAIN_BYTES or many.windows_per_call <= candidates.FIRST_RECURRENT


def test_what_corrupts_memory_is_never_tried():
    gathers = changed(recurrent=((10, 8),), target_shape=(21,), no_pfor="it crashes")
    found = candidates.families(AUTO, gathers)
    assert found
    assert not any(setting.experimental_use_pfor for setting in found)
    assert all("pfor: it crashes" in setting.lost for setting in found)
    with pytest.raises(Refused, match="it crashes"):
        candidates.families(SensitivitySection(experimental_use_pfor=True), gathers)


def test_on_a_gpu_cudnn_is_tried_and_never_under_pfor():
    recurrent = changed(recurrent=((10, 8),))
    with_cudnn = [way for way in ways(recurrent, gpu=True) if "cuDNN" in way]
    assert with_cudnn == ["batch_jacobian, loop over outputs, no XLA, cuDNN"]
    assert ways(changed(recurrent=((10, 8),), target_shape=(1,)), gpu=True)[0] == "gradient, no XLA, cuDNN"
    assert ways(FACTS, gpu=True) == ways(FACTS)


def test_families_keep_what_is_given():
    assert len(ways(FACTS, SensitivitySection(kernel="forward"))) == 4
    assert all(
        "pfor over 3 outputs" in way
        for way in ways(FACTS, SensitivitySection(experimental_use_pfor=True, parallel_iterations=3))
    )
    recurrent = changed(recurrent=((10, 8),))
    with pytest.raises(Refused, match="recurrent loop twice"):
        ways(recurrent, SensitivitySection(kernel="forward", experimental_use_pfor=True))


def test_a_window_too_large_is_split_over_its_outputs():
    large = changed(target_shape=(1000,), activations=10)
    one = call_memory(large, Setting("batch_jacobian", 1, experimental_use_pfor=False))
    setting = candidates.choose(SensitivitySection(kernel="batch_jacobian"), large, one // 4, 64)
    assert setting.windows_per_call == 1
    assert 1 <= setting.outputs_per_call < 1000
    assert call_memory(large, setting) <= one // 4


def test_the_rule_takes_the_first_family_that_fits():
    """Pfor over all inputs takes as much whatever the outputs of a call: a loop is what saves memory."""
    large = changed(
        input_shape=(24, 4), source=Source("input", "input", (24, 4)), target_shape=(100,), activations=100_000
    )
    pfor = call_memory(large, Setting("forward", 1))
    setting = candidates.choose(AUTO, large, pfor // 10, 64)
    assert not setting.experimental_use_pfor
    assert call_memory(large, setting) <= pfor // 10
    given = SensitivitySection(windows_per_call=8)
    assert call_memory(large, candidates.choose(given, large, pfor, 64)) <= pfor


def test_calls_are_halved_down_to_one_output_of_one_window():
    steps = [Setting("forward", 4, parallel_iterations=3)]
    while (smaller := candidates.halved(steps[-1], FACTS)) is not None:
        steps.append(smaller)
    assert [step.windows_per_call for step in steps] == [4, 2, 1, 1, 1, 1]
    assert [step.experimental_use_pfor for step in steps] == [True, True, True, False, False, False]
    assert [step.outputs_per_call for step in steps] == [None, None, None, None, 2, 1]
    sizes = [call_memory(FACTS, step) for step in steps]
    assert sizes == sorted(sizes, reverse=True)


def test_a_first_trial_takes_fewer_rows_where_all_do_not_fit():
    wide = changed(target_shape=(1000,), activations=100_000)
    pfor = Setting("batch_jacobian", 1)
    memory = call_memory(wide, replace(pfor, parallel_iterations=100))
    first = candidates.first_size(pfor, wide, memory, 64)
    assert first.parallel_iterations == 62
    assert candidates.first_size(pfor, wide, 1000, 64) is None


# ---- measured memory, kept choices -----------------------------------------------------------------
