"""Lags, features, outputs and output steps that a question is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from ..errors import Refused, suggested
from .roles import roles_of


def select(
    dataset: xr.Dataset, lags: Any = None, features: Any = None, outputs: Any = None, output_steps: Any = None
) -> xr.Dataset:
    """The part of a dataset with these labels. Raises `Refused` for labels it does not have.

    Of products with other dims, of the one that plays the part: lags are source steps, features are units, parameters
    or directions, outputs are vectors.

    Numbers (lags, output_steps): one, a list, "0,1,5", or a range "0:24", "24:", ":24" with both ends. Names (features,
    outputs): one or a list.
    """
    for role, wanted in (("lag", lags), ("output_step", output_steps)):
        if wanted is not None:
            dim = _playing(dataset, role, wanted)
            dataset = _chosen(dataset, role, dim, _numbers(dataset, role, dim, wanted))
    for role, names in (("feature", features), ("output", outputs)):
        if names is not None:
            listed = [names] if isinstance(names, str) else [str(name) for name in names]
            dataset = _chosen(dataset, role, _playing(dataset, role, names), listed)
    return dataset


def _playing(dataset: xr.Dataset, role: str, wanted: Any) -> str:
    roles = roles_of(dataset)
    if own := roles.of(role):
        return own[0]
    raise Refused(f"{role}s", given=wanted, allowed=f"nothing: {roles} has no {role}", remedy="leave it out")


def _chosen(dataset: xr.Dataset, role: str, dim: str, wanted: list[Any]) -> xr.Dataset:
    if dim not in dataset.dims:
        raise Refused(
            f"{role}s", given=wanted, allowed=f"nothing: one {dim} has been chosen already", remedy="leave it out"
        )
    known = dataset[dim].values.tolist()
    missing = [label for label in wanted if label not in known]
    if missing or not wanted:
        raise Refused(
            f"{role}s",
            given=", ".join(map(str, missing)) or "none",
            allowed=", ".join(map(str, known[:50])) + (", …" if len(known) > 50 else ""),
            remedy=suggested(missing, known, f"name one {dim} of these or more"),
        )
    return dataset.isel({dim: _sliced(sorted({known.index(label) for label in wanted}))})


def _sliced(places: list[int]) -> slice | list[int]:
    """Neighbours as a slice, which copies nothing."""
    together = places == list(range(places[0], places[-1] + 1))
    return slice(places[0], places[-1] + 1) if together else places


def _numbers(dataset: xr.Dataset, role: str, dim: str, wanted: Any) -> list[int]:
    known = np.atleast_1d(dataset[dim].values)
    try:
        if isinstance(wanted, str) and ":" in wanted:
            low, high = (int(end) if end.strip() else None for end in wanted.split(":"))
            inside = (known >= (known.min() if low is None else low)) & (
                known <= (known.max() if high is None else high)
            )
            return [int(label) for label in known[inside]]
        if isinstance(wanted, str):
            return [int(part) for part in wanted.split(",")]
        return [int(label) for label in (wanted if isinstance(wanted, Iterable) else [wanted])]
    except (TypeError, ValueError) as error:
        raise Refused(
            f"{role}s", given=wanted, allowed="numbers, or a range with both ends", remedy="write 0,1,5 or 0:24"
        ) from error
