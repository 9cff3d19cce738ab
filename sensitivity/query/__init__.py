"""Lazy statistics over the store: weighted sums that add up, in one pass, in bounded memory."""

from __future__ import annotations

from .opening import of_site, of_sites, open_run
from .rows import rows
from .statistics import STATISTICS, importance, lag_profile, sums

__all__ = ["STATISTICS", "importance", "lag_profile", "of_site", "of_sites", "open_run", "rows", "sums"]
