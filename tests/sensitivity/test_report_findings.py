"""What a report says of its numbers: sentences that are true, also of runs that are not as usual."""

from __future__ import annotations

import re

import numpy as np
import pytest
from keras import layers

from sensitivity.report import words, writing
from tests.conftest import frame, sequential
from tests.sensitivity.test_query import half_done  # noqa: F401
from tests.sensitivity.test_report import done, read, rows, small, texts  # noqa: F401


def test_findings_are_true(tmp_path):
    """A linear model: its derivatives are known."""
    model = sequential((4, 2), layers.Flatten(), layers.Dense(1))
    weights = np.zeros((4, 2), "float32")
    weights[-1, 0], weights[-2, 1] = -3.0, 1.0
    model.set_weights([weights.reshape(8, 1), np.zeros(1, "float32")])
    said = texts(read(done(tmp_path, model, frame(400)), tmp_path), "li").replace("\u00a0", " ")
    assert "rain moves the output most: 7" in said
    assert "A rise of rain at lag 0, where it counts most, lowers the output in 100 % of windows." in said
    assert "A rise of heat at lag 1, where it counts most, raises the output in 100 % of windows." in said
    assert "The newest lag of 4 holds at least half of the influence of all features together" in said
    assert "At the oldest lag influence has faded to 0 %" in said


def bent(features: int, weights: list[float], bias: float = 0.0):
    """max(0, w · x + b) of the newest step: a derivative that is there in some windows only."""
    model = sequential((1, features), layers.Flatten(), layers.Dense(1, activation="relu"))
    model.set_weights([np.array(weights, "float32").reshape(features, 1), np.full(1, bias, "float32")])
    return model


def test_what_has_no_effect_in_some_windows_is_not_said_to_lower(tmp_path):
    table = frame(500)
    run = done(tmp_path, bent(2, [1.0, 0.0], -float(table["rain"].quantile(0.7))), table)
    said = texts(read(run, tmp_path), "li").replace("\u00a0", " ")
    assert "A rise of rain at lag 0, where it counts most, raises the output in 30 % of windows" in said
    assert "lowers it in 0 % and has no effect in 70 %" in said


def test_a_feature_that_never_varies_is_told_apart_from_a_series_that_does_not(tmp_path):
    model = sequential((1, 2), layers.Flatten(), layers.Dense(1))
    model.set_weights([np.array([[1.0], [0.0]], "float32"), np.zeros(1, "float32")])
    said = texts(read(done(tmp_path, model, frame(60).assign(rain=2.0)), tmp_path), "li")
    assert "depends only on inputs that do not vary over the series" in said
    assert "largest single derivative" not in said


def test_intervals_that_cannot_be_told_are_not_shown(tmp_path):
    said = read(done(tmp_path, table=frame(8)), tmp_path)
    assert "interval" not in texts(said, "li")
    assert "…" not in "".join(row[1] for row in rows(said, "Importance: mean"))
    assert "circular block bootstrap" not in texts(said, "p")


def test_without_memory_for_any_sum_that_is_said(small, tmp_path):  # noqa: F811
    page = read(small, tmp_path, memory=1000)
    assert "There is no memory for sums" in texts(page, "p")
    assert "finite" not in texts(page, "p")
    assert not page.all("figure")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(999.7, "1,000"), (1e7, "1·10⁷"), (1234.5, "1,234"), (0.00012345, "0.000123"), (-0.5, "−0.5"), (np.nan, "–")],
)
def test_numbers_have_three_digits(value, shown):
    assert words.number(value) == shown


def test_shares_near_none_and_all_keep_their_signs():
    assert words._interval((0.0004, 0.998)).replace("\u00a0", " ") == "90 % interval < 0.1 % to > 99 %"


def test_windows_that_are_committed_meanwhile_are_not_in_it(half_done, tmp_path, monkeypatch):  # noqa: F811
    """A report is of one moment: the run goes on between its looking and its reading."""
    record = half_done.place.path / "commits" / "00000000.json"
    content = record.read_text()
    record.unlink()
    seen = writing.state_of

    def then_committed(run):
        state = seen(run)
        record.write_text(content)
        return state

    monkeypatch.setattr(writing, "state_of", then_committed)
    page = read(half_done, tmp_path)
    computed = re.search(r"What follows is of (\d+) windows", texts(page, "p")).group(1)
    assert f"{computed} of 55 windows" in texts(page, "text")
