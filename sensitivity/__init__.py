"""Derivatives of a time-series model's every output by every input at every lag, for every window of a record.

TensorFlow, Zarr and Dask are imported by what needs them, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import plots, query, recurrent, report
    from .api import (
        expected_gradients,
        gradient_norm,
        gram,
        hessian,
        hvp,
        integrated_gradients,
        jacobian,
        jvp,
        smooth_gradients,
        vjp,
    )
    from .errors import Refused
    from .job import Job
    from .query import open_run
    from .report import overview

__version__ = "0.1.0"
__all__ = [
    "Job",
    "Refused",
    "expected_gradients",
    "gradient_norm",
    "gram",
    "hessian",
    "hvp",
    "integrated_gradients",
    "jacobian",
    "jvp",
    "open_run",
    "overview",
    "plots",
    "query",
    "recurrent",
    "report",
    "smooth_gradients",
    "vjp",
]

_HOMES = {"Job": "job", "Refused": "errors", "open_run": "query", "overview": "report"}
_ROOMS = ("plots", "query", "recurrent", "report")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    if name in __all__:
        found = globals()[name] = getattr(importlib.import_module(f".{_HOMES.get(name, 'api')}", __name__), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
