"""Where a run stands: what its records say, read once."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..commits import Failure, Odd, each_failure
from ..lease import Owner, owner
from ..plots.terms import TERMS, Terms
from ..query.roles import JACOBIAN, PRODUCTS
from ..standing import Standing, stand
from ..store import Run
from ..tally import Tally

SHOWN = 20


@dataclass(frozen=True)
class Coverage:
    """Windows of a run, which add up to all of them.

    computed: committed, with derivatives. skipped: committed, without, for a missing value. failed: of shards given up.
    missing: neither.
    """

    computed: int
    skipped: int
    failed: int
    missing: int

    @property
    def windows(self) -> int:
        return self.computed + self.skipped + self.failed + self.missing

    @property
    def complete(self) -> bool:
        return not self.failed and not self.missing

    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("computed", "skipped", "failed", "missing")}


@dataclass(frozen=True)
class State:
    """failures: the first `SHOWN` of `failed` shards that are not done. odd: records that do not count. driver: who is
    at work.
    """

    run: Run
    standing: Standing
    coverage: Coverage
    failures: tuple[Failure, ...]
    failed: int
    odd: tuple[Odd, ...]
    driver: Owner | None

    @property
    def tally(self) -> Tally:
        return self.standing.tally

    @property
    def name(self) -> str:
        return name_of(self.run)

    @property
    def terms(self) -> Terms:
        """What it computes is called."""
        return TERMS[self.run.content.get("product", JACOBIAN)]

    @property
    def scaled(self) -> bool:
        """Whether its entries are each by one feature."""
        of = PRODUCTS[self.run.content.get("product", JACOBIAN)]
        return of.scaled and of.sources > 0 and self.run.job.sensitivity.wrt == "input"

    @property
    def path(self) -> str:
        """As a shell takes it."""
        return shlex.quote(str(self.run.place))


def name_of(run: Run) -> str:
    """The last part of its path."""
    return PurePosixPath(str(run.place).rstrip("/")).name or "run"


def state_of(run: Run) -> State:
    odd: list[Odd] = []
    driver = owner(run.place)  # first: all that a driver commits, it commits before it is gone
    standing = stand(run, odd.append)
    failures: list[Failure] = []
    failed = given_up = 0
    for failure in each_failure(run):
        if not standing.done[failure.shard]:
            failed += 1
            given_up += (failure.stop - failure.start) if failure.given_up else 0
            failures += [failure] if failed <= SHOWN else []
    tally = standing.tally
    coverage = Coverage(
        computed=tally.computed,
        skipped=tally.windows - tally.computed,
        failed=given_up,
        missing=run.layout.windows - tally.windows - given_up,
    )
    return State(run, standing, coverage, tuple(failures), failed, tuple(odd[:SHOWN]), driver)


def next_commands(state: State) -> list[tuple[str, str]]:
    """What to do next, a command and what it gives: to the end first, where the run has not come to it."""
    path, coverage = state.path, state.coverage
    found = []
    if state.driver is not None:
        found.append((f"sensitivity status {path} --watch", "follows the driver that is at work"))
    elif not coverage.complete:
        again = "" if coverage.missing else " --retry-failed"
        found.append((f"sensitivity resume {path}{again}", "computes what is missing"))
    if coverage.computed:
        own, letter = state.terms, state.terms.letter
        moves = "what each feature moves the output by" if own.plain else f"how large {own.nouns} are"
        each = "by lag and feature" if own.plain else "each by itself"
        means = f"mean {letter}, mean |{letter}| and rms of {letter} {each}"
        found += [
            (f"sensitivity query {path} importance --ci 0.9", f"{moves}, as a table"),
            (f"sensitivity query {path} lag-profile --format csv", means),
            (f"sensitivity top {path}{' --scaled' * state.scaled}", f"the windows with the largest {own.nouns}"),
            (f"sensitivity plot {path} window -o window.png", f"one window: input, prediction and {own.nouns}"),
        ]
    return [*found, (f"sensitivity verify {path}", "re-reads every committed chunk against its checksum")]
