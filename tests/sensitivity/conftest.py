"""Scans in few segments: how many there are is a matter of speed, and each takes a second to compile."""

from __future__ import annotations

import pytest


@pytest.fixture
def one_segment(monkeypatch):
    """All rows walk back from the last step, those of earlier steps as zeros."""
    _in_segments(monkeypatch, 1)


@pytest.fixture
def two_segments(monkeypatch):
    """Rows are added once."""
    _in_segments(monkeypatch, 2)


def _in_segments(monkeypatch, most: int) -> None:
    from sensitivity.kernels import walk

    monkeypatch.setattr(walk, "MOST_SEGMENTS", most)
