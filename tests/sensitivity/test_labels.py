"""Labels of a loss in a series: at which steps, of which windows; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensitivity.errors import Refused
from sensitivity.facts import ModelFacts
from sensitivity.heads import Selection
from sensitivity.job import Job, SensitivitySection
from sensitivity.labels import labels_of
from sensitivity.sections import SeriesSection
from sensitivity.survey import Survey
from sensitivity.times import TimeAxis
from sensitivity.windows import Missing, Windows, spans_of


@given(
    length=st.integers(1, 5),
    stride=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    offsets=st.sets(st.integers(-2, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_windows_without_their_labels_are_skipped(length, stride, sizes, offsets, data):
    """Against a walk over every window's own steps."""
    offsets = sorted(offset for offset in offsets if offset > -length) or [0]
    steps = sum(sizes)
    starts = tuple(np.cumsum([0, *sizes[:-1]]).tolist())
    windows = Windows(steps, length, stride, starts)
    features, labels = (np.array(data.draw(st.lists(st.booleans(), min_size=steps, max_size=steps))) for _ in range(2))
    ends = dict(zip(starts, [*starts[1:], steps], strict=True))
    expected = []
    for begin, stop in ends.items():
        for first in range(begin, stop - length + 1, stride):
            at = [first + length - 1 + offset for offset in offsets]
            known = all(step < stop and not labels[step] for step in at)
            expected.append(features[first : first + length].any() or not known)
    missing = Missing(runs(features), runs(labels), spans_of(offsets))
    count = windows.count
    assert windows.skipped(missing, 0, count).tolist() == expected if count else not expected
    assert windows.skipped_count(missing) == sum(expected)
    whole = [number for number, skipped in enumerate(expected) if not skipped]
    assert windows.whole(missing, steps).tolist() == whole
    few = windows.whole(missing, 3).tolist()
    assert few == sorted({*whole[:1], *whole[-1:], *(few[1:2])})
    assert set(few) <= set(whole)
    assert len(few) == min(3, len(whole))


def runs(gaps: np.ndarray) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(gaps.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return tuple((int(start), int(stop)) for start, stop in edges)


def facts(output_steps: int, outputs: int, length: int = 5) -> ModelFacts:
    """Of a model with so many outputs: what labels depend on."""
    from types import SimpleNamespace

    names = tuple(f"q{number}" for number in range(outputs))
    return SimpleNamespace(output_steps=output_steps, outputs=names, length=length, input_shape=(length, 2))  # type: ignore[return-value]


def at(
    output_steps: int,
    outputs: int,
    labels: list[str],
    chosen: Selection,
    loss: Any = "mse",
    largest: float = 1.0,
    negative: tuple[bool, ...] = (),
    **more,
):
    survey = Survey(
        *(("a", "b"), 99, TimeAxis("index"), (), (0.0,), (1.0,), (1.0, 1.0, 3.0, largest, 1.0), "f"),
        beside=("q0", "q1", "w"),
        whole=(False, False, True, False, False),
        negative=negative,
    )
    section = SeriesSection(path="x.csv", labels=tuple(labels), weights="w")
    wanted = SensitivitySection(of="loss", loss=loss, **more)
    steps = output_steps if chosen.steps is None else len(chosen.steps)
    channels = outputs if chosen.channels is None else len(chosen.channels)
    target = (steps, channels) if output_steps > 1 else (channels,)
    return labels_of(section, wanted, survey, facts(output_steps, outputs), chosen, target)


@pytest.mark.parametrize(
    ("arguments", "more", "offsets", "shape"),
    [
        ((1, 1, ["q0"], Selection()), {}, (0,), (1,)),
        ((1, 2, ["q0", "q1"], Selection()), {"lead": 3}, (3,), (2,)),
        ((5, 2, ["q0", "q1"], Selection()), {}, (-4, -3, -2, -1, 0), (5, 2)),
        ((5, 1, ["q0"], Selection(steps=(1, 4))), {}, (-3, 0), (2, 1)),
        ((3, 1, ["q0"], Selection()), {"lead": 3}, (1, 2, 3), (3, 1)),
        ((1, 4, ["q0"], Selection()), {"lead": 4}, (1, 2, 3, 4), (4,)),
        ((1, 4, ["q0"], Selection(channels=(0, 3))), {"lead": 4}, (1, 4), (2,)),
        ((1, 4, ["q0"], Selection(channels=(2,))), {}, (0,), (1,)),
        ((1, 4, ["q0"], Selection()), {"loss": "sparse_categorical_crossentropy"}, (0,), ()),
        ((1, 4, ["q0"], Selection()), {"loss": {"class_name": "SparseCategoricalCrossentropy"}}, (0,), ()),
        ((5, 4, ["q0"], Selection()), {"loss": "sparse_categorical_crossentropy"}, (-4, -3, -2, -1, 0), (5,)),
    ],
)
def test_labels_are_at_the_outputs_own_steps(arguments, more, offsets, shape):
    found = at(*arguments, **more)
    assert (found.offsets, found.shape) == (offsets, shape)


@pytest.mark.parametrize(
    ("arguments", "more", "key"),
    [
        ((3, 1, ["q0"], Selection()), {}, "sensitivity.lead"),
        ((1, 4, ["q0"], Selection()), {}, "sensitivity.lead"),
        ((1, 9, ["q0"], Selection()), {"lead": 1}, "sensitivity.lead"),
        ((1, 3, ["q0", "q1"], Selection()), {}, "series.labels"),
        ((1, 4, ["q0"], Selection(channels=(1,))), {"lead": 4}, "sensitivity.outputs"),
        ((1, 3, ["q0"], Selection()), {"loss": "sparse_categorical_crossentropy"}, "series.labels"),
        ((1, 4, ["q1"], Selection()), {"loss": "sparse_categorical_crossentropy"}, "series.labels"),
        (
            (1, 4, ["q0"], Selection()),
            {"loss": "sparse_categorical_crossentropy", "negative": (False, False, True, False, False)},
            "series.labels",
        ),
        ((1, 3, ["q0", "q1"], Selection()), {"loss": "{x"}, "series.labels"),
    ],
)
def test_labels_that_cannot_be_the_outputs_are_refused(arguments, more, key):
    with pytest.raises(Refused) as refusal:
        at(*arguments, **more)
    assert refusal.value.key == key


@pytest.mark.parametrize(
    ("series", "asked", "key"),
    [
        ({"labels": ["q"]}, {"of": "loss"}, "sensitivity.loss"),
        ({}, {"of": "loss", "loss": "mse"}, "series.labels"),
        ({"labels": ["q"]}, {}, "series.labels"),
        ({}, {"loss": "mse"}, "sensitivity.loss"),
        ({}, {"lead": 1}, "sensitivity.lead"),
        ({"labels": ["q", "q"]}, {"of": "loss", "loss": "mse"}, "series.labels"),
        ({"weights": "w"}, {}, "series.weights"),
        ({"labels": ["q"], "weights": ""}, {"of": "loss", "loss": "mse"}, "series.weights"),
        ({"labels": ["q"]}, {"of": "loss", "loss": "mse", "lead": 10**23}, "sensitivity.lead"),
        ({"labels": ["q"]}, {"of": "loss", "loss": {"class_name": Path("x")}}, "sensitivity.loss"),
        (
            {"labels": ["q"], "label_scaling": {"mean": [0.0, 1.0], "std": [1.0, 1.0]}},
            {"of": "loss", "loss": "mse"},
            "series.label_scaling",
        ),
        (
            {"labels": ["q"], "label_scaling": {"mean": [0.0], "std": [1.0, 1.0]}},
            {"of": "loss", "loss": "mse"},
            "series.label_scaling",
        ),
        ({"labels": ["q", "t"], "time": "t"}, {"of": "loss", "loss": "mse"}, "series.labels"),
        ({"labels": ["q"], "weights": "s", "site": "s"}, {"of": "loss", "loss": "mse"}, "series.weights"),
    ],
)
def test_a_job_without_all_of_it_is_refused(series, asked, key):
    content = {
        "model": {"path": "a:b"},
        "series": {"path": "x.csv", **series},
        "sensitivity": asked,
        "run": {"path": "r"},
    }
    with pytest.raises(Refused) as refusal:
        Job.parse(content, Path("/jobs"))
    assert refusal.value.key == key
