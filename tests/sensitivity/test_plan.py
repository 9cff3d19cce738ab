"""The plan is pure: these tests need neither TensorFlow nor Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensitivity import plan
from sensitivity.errors import Refused
from sensitivity.facts import CallFacts
from sensitivity.job import Job
from sensitivity.plan import CHUNK_BYTES, MiB, Workers
from sensitivity.setting import Choice, Setting
from sensitivity.survey import Survey
from sensitivity.times import TimeAxis
from sensitivity.variables import Variable

GB = 10**9
CHOICE = Choice(Setting("gradient", 256), "rule", 10**7)


@dataclass(frozen=True)
class Facts:
    """As `ModelFacts`, without TensorFlow behind it: an LSTM of 32 units over 20 steps of 4 features."""

    output_steps: int = 1
    outputs: tuple[str, ...] = ("output",)
    length: int = 20
    features: int = 4
    activations: int = 1000
    parameters: int = 5000
    recurrent: tuple[tuple[int, int], ...] = ((20, 32),)
    smooth: bool = True
    itemsize: int = 4
    rows_of: str = "outputs"
    points: int = 1

    @property
    def rows(self) -> int:
        return self.output_steps * len(self.outputs)

    target_size = rows

    @property
    def source_size(self) -> int:
        return self.length * self.features

    row_size = input_size = source_size
    windows_summed = CallFacts.windows_summed

    @property
    def variables(self) -> tuple[Variable, ...]:
        target = (("output_step", self.output_steps), ("output", len(self.outputs)))
        source = (("lag", self.length), ("feature", self.features))
        return Variable("jacobian", (*target, *source)), Variable("prediction", target)

    def missing(self, survey: Survey) -> Any:
        return survey.gaps

    @property
    def window_bytes(self) -> int:
        return sum(variable.size for variable in self.variables) * self.itemsize


def job(**run: Any) -> Job:
    content = {"model": {"path": "a:b"}, "series": {"path": "x.csv"}, "run": {"path": "r", **run}}
    return Job.parse(content, Path("/jobs"))


def survey(steps: int, missing: tuple[tuple[int, int], ...] = ()) -> Survey:
    return Survey(("a", "b", "c", "d"), steps, TimeAxis("index"), missing, (0.0,) * 4, (1.0,) * 4, (3.0,) * 4, "f")


def make(steps: int, facts: Any = None, workers: Workers | None = None, free: int | None = None, **run: Any):
    workers = workers or Workers(2, 1, 0, 4 * GB)
    return plan.plan_run(job(**run), survey(steps), facts or Facts(), CHOICE, workers, free)


def test_the_classic_case():
    made = make(38_265)
    assert made.layout.windows == 38_246
    assert made.window_bytes == (20 * 4 + 1) * 4
    assert made.stored_bytes == 38_246 * 324
    assert made.chunk_shape == (made.layout.chunk_windows, 1, 1, 20, 4)
    assert made.layout.shard_count == 12
    assert made.layout.shard_windows == 3188  # the last one lacks ten


windows_and_bytes = st.tuples(st.integers(1, 10**10), st.integers(8, 10**9))


@given(windows_and_bytes, st.integers(1, 5000), st.one_of(st.just("auto"), st.integers(1, 10**7)))
def test_shards_cover_all_windows_once_in_whole_chunks(size, steps, wanted):
    windows, window_bytes = size
    layout = plan.cut(windows, window_bytes, steps, wanted)
    assert layout.shard(0).start == 0
    assert layout.shard(layout.shard_count - 1).stop == windows
    assert layout.shard_count == -(-windows // layout.shard_windows)
    assert layout.shard_windows % layout.chunk_windows == 0 or layout.shard_count == 1
    assert 1 <= layout.chunk_steps <= steps
    if layout.chunk_windows > 1:
        assert layout.chunk_windows * window_bytes <= CHUNK_BYTES
    if wanted != "auto":
        assert layout.shard_windows >= min(wanted, windows)


@given(st.integers(1, 10**9), st.integers(8, 10**6))
def test_shards_left_to_us_are_all_of_one_size(windows, window_bytes):
    layout = plan.cut(windows, window_bytes, 1)
    last = layout.shard(layout.shard_count - 1)
    assert layout.shard_windows - (last.stop - last.start) < max(layout.shard_count, 2)


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 100))
def test_chunks_of_a_shard_are_aligned_and_disjoint(windows, shard_windows, kilobytes):
    layout = plan.cut(windows, kilobytes * 1000, 1, shard_windows)
    for shard in layout.shards():
        chunks = list(layout.chunks(shard))
        assert [chunks[0][0], chunks[-1][1]] == [shard.start, shard.stop]
        assert all(stop == start for (_, stop), (start, _) in zip(chunks, chunks[1:], strict=False))
        assert all(start % layout.chunk_windows == 0 for start, _ in chunks)


def test_many_windows_get_chunks_that_dask_likes():
    layout = plan.cut(10**9, 1680, 1)
    assert 8 * MiB < layout.chunk_windows * 1680 <= CHUNK_BYTES


def test_a_window_larger_than_a_chunk_is_split_over_output_steps():
    layout = plan.cut(10, 2000 * 2000 * 3 * 4, 2000)
    assert layout.chunk_windows == 1
    assert layout.chunk_steps < 2000


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"steps": 19}, "windows.length"),
        ({"steps": 1000, "workers": Workers(2, 1, 0, GB // 2)}, "run.memory_per_worker"),
        ({"steps": 1000, "free": 1000}, "run.path"),
    ],
)
def test_what_cannot_fit_is_refused(arguments, key):
    with pytest.raises(Refused) as refusal:
        make(**arguments)
    assert refusal.value.key == key


def test_a_part_of_a_window_that_no_chunk_holds_is_refused():
    """A Hessian's rows of one output step are together."""
    with pytest.raises(Refused, match="chunk of a store"):
        make(50_000, Facts(length=40_000, outputs=tuple(map(str, range(4000)))), Workers(1, 1, 0, 10**14))


def test_what_sums_many_points_has_room_for_the_sums():
    """The sums, a call's derivatives as they are added, those of windows that are done, and the points themselves."""
    one, many = Facts(), replace(Facts(), points=16)
    setting = Setting("batch_jacobian", 256)
    more = plan.call_memory(many, setting) - plan.call_memory(one, setting)
    points = 3 * 256 * (many.input_size + many.source_size) * many.itemsize
    assert more == (256 + 2 * 128) * plan.result_bytes(one) + points


def test_skipped_windows_are_counted():
    made = plan.plan_run(job(), survey(100, ((50, 51),)), Facts(), CHOICE, Workers(1, 1, 0, 4 * GB))
    assert made.skipped == 20


def test_projected_memory_grows_with_what_is_done_at_once():
    facts = Facts(output_steps=20)
    loop = Setting("batch_jacobian", 64, experimental_use_pfor=False)
    some = Setting("batch_jacobian", 64, parallel_iterations=5)
    every = Setting("batch_jacobian", 64)
    sizes = [plan.call_memory(facts, setting) for setting in (loop, some, every)]
    assert sizes == sorted(sizes)
    assert plan.call_memory(facts, replace(every, windows_per_call=128)) == 2 * sizes[-1]


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (12_391_704, "12.4 MB"), (1.5e12, "1.5 TB"), (2e15, "2e+03 TB")]
)
def test_human_bytes(count, text):
    assert plan.human_bytes(count) == text
