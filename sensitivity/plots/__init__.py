"""Pictures for people who would rather look than read.

`wanted` says what pictures need of a run, lazily; `draw` makes a figure of that, computed; `save` writes it. `show` and
`plot` do all of it for one picture.
"""

from __future__ import annotations

from .kinds import KINDS, Kind, possible, wanted
from .look import influence
from .pictures import Picture, draw, plot, save, show

__all__ = ["KINDS", "Kind", "Picture", "draw", "influence", "plot", "possible", "save", "show", "wanted"]
