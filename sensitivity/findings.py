"""What pydantic finds wrong with a job file, as refusals in our words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from .errors import Refused, RefusedTogether, suggested

SHOWN_AT_ONCE = 5  # one screen

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a table",
    "dict_type": "a table",
    "too_short": "at least one value",
    "string_pattern_mismatch": "a path or URL, without NUL characters",
}

_WORD = re.compile("'([^']*)'")  # as pydantic quotes what is allowed

# Of keys that take several kinds of values.
_TAKES = {
    "output_steps": 'a list of numbers such as [0, -1], or a slice in quotes such as "10:" or "::24"',
    "vectors": 'a list of "sum", "mean" and "last", or the path of a .npy file',
    "directions": 'a list of features, such as ["rain"], or the path of a .npy file',
    "baseline": '"zero", "mean", the number of a window, or the path of a .npy file',
    "outputs": 'a list of names or numbers, such as ["output_0"] or [0]',
}


def refusals(error: ValidationError, content: dict[str, Any], table: Any, where: str = " in the job file") -> Refused:
    """One refusal per key of `table`: the branches of a union are allowed values of the same key."""
    keys: dict[str, list[Any]] = {}
    for finding in error.errors():
        keys.setdefault(_key(finding["loc"], content), []).append(finding)
    found = [_refusal(key, findings, table, where) for key, findings in keys.items()]
    return found[0] if len(found) == 1 else RefusedTogether(found[:SHOWN_AT_ONCE])


def _key(loc: tuple[int | str, ...], content: Any) -> str:
    """The path of a finding as far as the file knows it; union branches add parts that are no keys."""
    parts: list[str] = []
    here = content
    for part in loc:
        if isinstance(here, dict):
            parts.append(str(part))
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            parts[-1] += f"[{part}]"
            here = here[part]
        else:
            break
    return ".".join(parts) or "job file"


def _refusal(key: str, findings: list[Any], table: Any, where: str) -> Refused:
    kind, given = findings[0]["type"], findings[0]["input"]
    if kind == "missing":
        return Refused(key, given="nothing", allowed="this key is needed", remedy=f"add {key}{where}")
    if kind == "extra_forbidden":
        return unknown_key(key, given, _keys_beside(key, table))
    if kind == "value_error":
        return findings[0]["ctx"]["error"]  # every validator here raises Refused
    allowed = " or ".join(dict.fromkeys(_allowed(finding) for finding in findings))
    allowed = _TAKES.get(key.rpartition(".")[2].partition("[")[0], allowed)
    known = [word for finding in findings for word in _WORD.findall(finding.get("ctx", {}).get("expected", ""))]
    return Refused(
        key, given=f"{given!r}", allowed=allowed, remedy=suggested(given, known, otherwise=f"change {key}{where}")
    )


def _allowed(finding: Any) -> str:
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "literal_error":
        return context["expected"].replace("'", '"')
    if kind == "greater_than_equal":
        return f"{context['ge']} or more"
    if kind == "greater_than":
        return f"more than {context['gt']}"
    if kind == "less_than":
        return f"less than {context['lt']}"
    return _EXPECTED.get(kind, finding["msg"])


def _keys_beside(key: str, table: Any) -> list[str]:
    """The keys that the table holding `key` may have."""
    for part in key.split(".")[:-1]:
        annotation = table.model_fields[part].annotation
        table = next(t for t in (annotation, *getattr(annotation, "__args__", ())) if hasattr(t, "model_fields"))
    return [name for name in table.model_fields if name != "directory"]


def unknown_key(
    key: str, given: object, allowed: Sequence[str], *, instead: str = "take it out of the job file"
) -> Refused:
    """instead: what to do where nothing is called much like it."""
    remedy = suggested(key.rpartition(".")[2], allowed, instead)
    return Refused(key, given=f"{given!r} (an unknown key)", allowed=", ".join(allowed), remedy=remedy)
