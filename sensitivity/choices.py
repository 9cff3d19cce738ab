"""Choices of earlier workers, kept in a file so that others and a resumed run start at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .job import SensitivitySection
from .places import Place
from .setting import Choice
from .versions import numeric

if TYPE_CHECKING:
    from .facts import CallFacts

TUNING = "tuning.json"


def purpose(fingerprint: dict[str, str], facts: CallFacts, wanted: SensitivitySection, kind: str) -> dict[str, Any]:
    """What a choice holds for: the model, what is asked of it, the kind of device and the versions."""
    return {
        "kind": kind,
        "model": fingerprint,
        "of": wanted.of,
        **wanted.model_dump(mode="json", include={"output_steps", "outputs", "max_lag"}),
        **({} if facts.product == "jacobian" else {"product": facts.product, "rows": facts.rows}),
        **({} if wanted.wrt == "input" else {"wrt": wanted.wrt}),
        "asked": wanted.knobs,
        "input_shape": list(facts.input_shape),
        "target_shape": list(facts.target_shape),
        "dtype": facts.dtype,
        "versions": numeric(),
    }


def remembered(place: Place, wanted: dict[str, Any]) -> Choice | None:
    """The choice kept in a run for that purpose; None where there is none that can be read."""
    for entry in _entries(place):
        if entry.get("for") == wanted:
            try:
                return Choice.from_json(entry["choice"])
            except (KeyError, TypeError):  # of another version, or damaged
                return None
    return None


def remember(place: Place, wanted: dict[str, Any], choice: Choice) -> None:
    """Keep the choice, in place of an earlier one for the same purpose.

    Two workers of different kinds that write at once may lose one entry, which costs a tuning and no more.
    """
    others = [entry for entry in _entries(place) if entry.get("for") != wanted]
    place.write_json(TUNING, {"settings": [*others, {"for": wanted, "choice": choice.to_json()}]})


def _entries(place: Place) -> list[dict[str, Any]]:
    found = (place.read_json(TUNING) or {}).get("settings")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
