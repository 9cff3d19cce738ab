"""Lazy statistics over the store: weighted sums that add up, in one pass, in bounded memory."""

from __future__ import annotations

from .ask import FACTORIES, ask, ask_together, asking, statistic
from .columns import with_columns
from .compare import compare, difference
from .inputs import with_inputs
from .opening import of_site, of_sites, open_run
from .rows import rows
from .selection import select
from .top import top
from .trend import trend

importance = asking("importance")
lag_profile = asking("lag-profile")
mean = asking("mean")
mean_abs = asking("mean-abs")
rms = asking("rms")
std = asking("std")
minimum = asking("min")
maximum = asking("max")
share_positive = asking("share-positive")
summary = asking("summary")
quantiles = asking("quantiles")
effective_memory = asking("effective-memory")
gradient_input = asking("gradient-input")
elasticity = asking("elasticity")
dgsm = asking("dgsm")
active_subspace = asking("active-subspace")

__all__ = [
    "FACTORIES",
    "active_subspace",
    "ask",
    "ask_together",
    "compare",
    "dgsm",
    "difference",
    "effective_memory",
    "elasticity",
    "gradient_input",
    "importance",
    "lag_profile",
    "maximum",
    "mean",
    "mean_abs",
    "minimum",
    "of_site",
    "of_sites",
    "open_run",
    "quantiles",
    "rms",
    "rows",
    "select",
    "share_positive",
    "statistic",
    "std",
    "summary",
    "top",
    "trend",
    "with_columns",
    "with_inputs",
]
