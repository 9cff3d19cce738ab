"""How many of the rows of a call are differentiated at a time."""

from __future__ import annotations

from ..setting import Setting


def side_by_side(setting: Setting) -> int | None:
    """`parallel_iterations` for TensorFlow, whose own default lets ten iterations of a loop be under way at once.

    That is no faster on one core, and took nine times the memory of one for LSTM(32) over 100 steps.
    """
    if setting.experimental_use_pfor:
        return setting.parallel_iterations
    return setting.parallel_iterations or 1
