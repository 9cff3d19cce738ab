"""A run in a notebook: how far it is, what it is of, what to try next."""

from __future__ import annotations

from dataclasses import dataclass

from ..store import Run
from . import words
from .facts import sections, told
from .markup import joined, tag
from .state import State, next_commands, state_of

FACTS = {
    "Run": ("Computed",),
    "Model": ("Output",),
    "Series and windows": ("Features", "Windows"),
}


@dataclass(frozen=True)
class Overview:
    """Where a run stood when it was asked for; a notebook shows it as a block."""

    state: State

    def facts(self) -> list[tuple[str, str]]:
        found = sections(self.state)
        shown = {**FACTS, "Run": (told(self.state.terms.nouns), "Computed")}
        return [(name, value) for heading, names in shown.items() for name, value in found[heading] if name in names]

    def __repr__(self) -> str:
        lines = [str(self.state.run.place), words.coverage(self.state), ""]
        lines += [f"{name:12} {value}" for name, value in self.facts()]
        lines += ["", "try next:", *(f"  {command}" for command, _ in next_commands(self.state))]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        coverage = self.state.coverage
        done = coverage.computed + coverage.skipped
        bar = tag("progress", value=done, max=max(1, coverage.windows), aria_label="windows that are done")
        facts = [joined([tag("dt", name), tag("dd", value)]) for name, value in self.facts()]
        commands = [tag("li", tag("code", command), f" {what}") for command, what in next_commands(self.state)]
        title = tag("p", tag("strong", self.state.name), " ", bar, f" {words.percent(done / max(1, coverage.windows))}")
        text = tag("p", words.coverage(self.state))
        return tag("div", title, text, tag("dl", *facts), tag("p", "Try next:"), tag("ul", *commands))


def overview(run: Run | str) -> Overview:
    """How far a run is, its main facts and what to try next, from its records alone: the last line of a notebook's
    cell. Raises `Refused` where there is no run.
    """
    return Overview(state_of(Run.open(run)))
