"""Refusals in the words of Python: of functions' arguments, where a job file has keys."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .errors import Refused, RefusedTogether

P = ParamSpec("P")
R = TypeVar("R")

# What a job's keys are called as arguments; those of [sensitivity] have the same names.
_ARGUMENTS = {
    "model.path": "model",
    "model.inputs": "windows",
    "series.path": "windows",
    "series.features": "windows",
    "series.scaling": "windows",
    "series.labels": "labels",
    "series.weights": "sample_weight",
    "windows.length": "windows",
    "windows.stride": "windows",
    "run.memory_per_worker": "memory",
    "run.shard_windows": "windows_per_call",
    "run.dtype": "model",
}
_KEY = re.compile(r"(?<![\w./])(?:sensitivity|model|series|windows|run)\.[a-z_]+(?![\w(])(?:\.\w+)*")
_VALUES = {"= true": "= True", "= false": "= False"}


def with_arguments_named(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose refusals name its arguments, and none of a job file's keys."""

    @functools.wraps(function)
    def named(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except Refused as refusal:
            raise in_python(refusal) from refusal.__cause__

    return named


def in_python(refusal: Refused) -> Refused:
    """The same refusal to those who called a function."""
    if isinstance(refusal, RefusedTogether):
        return RefusedTogether([in_python(one) for one in refusal.refusals])
    return Refused(
        as_argument(refusal.key),
        given=refusal.given,
        allowed=as_argument(refusal.allowed),
        remedy=refusal.in_python or as_argument(refusal.remedy),
    )


def as_argument(text: str) -> str:
    """A text with arguments' names in place of a job's keys, and Python's values in place of TOML's."""
    found = _KEY.sub(_named, text)
    for value, own in _VALUES.items():
        found = found.replace(value, own)
    return found


def _named(match: re.Match[str]) -> str:
    section, key = match[0].split(".")[:2]
    return key if section == "sensitivity" else _ARGUMENTS.get(f"{section}.{key}", match[0])
