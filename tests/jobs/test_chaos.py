"""A real run on real processes, killed at every kind of point; `python -m tests.chaos.harness` is the long version."""

from __future__ import annotations

import random

from tests.chaos.harness import Stage, Tally, kill_through

POINTS = ["mid chunk", "after data", "before record", "mid record", "after record"]


def test_killed_at_named_points_and_at_random_a_run_ends_as_if_undisturbed(tmp_path):
    tally = Tally()
    kill_through(Stage(tmp_path), [*POINTS, "worker"], random.Random(1), tally)
    assert tally.wrong == []
    assert set(POINTS) <= set(tally.kills), tally
