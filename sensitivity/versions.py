"""Which libraries compute here, and whether numbers may differ from those computed before."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from . import __version__

# Those that numbers come from, and those that move and keep them.
OURS = "sensitivity-jobs"
NUMERIC = (OURS, "tensorflow", "keras", "numpy")
_distributions = functools.cache(packages_distributions)
_OTHERS = ("zarr", "xarray", "obstore", "ray")


def versions() -> dict[str, str]:
    """Version by name; what is not installed is left out."""
    found = {name: version_of(name) for name in (*NUMERIC, *_OTHERS)}
    return {"python": platform.python_version(), **{name: text for name, text in found.items() if text}}


def numeric() -> dict[str, str | None]:
    """Of the libraries that numbers come from alone."""
    return {name: version_of(name) for name in NUMERIC}


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What may change numbers, in words."""
    return [
        f"{name}: the run has {before.get(name, 'none')}, here is {now.get(name, 'none')}"
        for name in NUMERIC
        if before.get(name) != now.get(name)
    ]


def version_of(name: str) -> str | None:
    """Of a library, whatever it was installed as: tensorflow may be tensorflow-cpu or a vendor's own.

    Of ourselves, what runs: a job takes us along to where something else may be installed.
    """
    if name == OURS:
        return __version__
    try:
        return version(name)
    except PackageNotFoundError:
        others = _distributions().get(name, [])
        return version(others[0]) if others else None
