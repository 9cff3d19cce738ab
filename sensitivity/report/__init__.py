"""A run as one self-contained HTML page: facts, findings, pictures, tables; and as a block in a notebook."""

from __future__ import annotations

from .glance import Overview, overview
from .state import name_of
from .writing import write

__all__ = ["Overview", "name_of", "overview", "write"]
