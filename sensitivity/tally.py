"""What commit records add up to: sums of parts are the sums of the whole, in any order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .commits import Commit

SHOWN = 20


@dataclass(frozen=True)
class Pace:
    """Shards and computed windows of one worker, or of one driver's time; started, finished: seconds since 1970."""

    shards: int
    windows: int
    started: float
    finished: float

    @property
    def rate(self) -> float:
        """Windows a second, from the first shard's start to the last commit."""
        return self.windows / max(self.finished - self.started, 1e-9)

    def __add__(self, other: Pace) -> Pace:
        started, finished = min(self.started, other.started), max(self.finished, other.finished)
        return Pace(self.shards + other.shards, self.windows + other.windows, started, finished)


@dataclass(frozen=True)
class Tally:
    """What commit records add up to: tallies of parts add up to that of the whole.

    windows, computed: of all shards. peak_memory, projected_memory: the largest bytes of any worker. attempts,
    settings, reasons: shards by number of the attempt, setting (as JSON), and why that was chosen. workers: by host and
    process, with the setting last used. sessions: by the lease's token. not_finite: derivatives of the first `SHOWN` of
    `not_finite_shards` shards that have any.
    """

    shards: int = 0
    windows: int = 0
    computed: int = 0
    peak_memory: int = 0
    projected_memory: int = 0
    attempts: Counter[int] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    workers: Mapping[tuple[str, int], tuple[Pace, str]] = field(default_factory=dict)
    sessions: Mapping[int, Pace] = field(default_factory=dict)
    not_finite: Mapping[int, int] = field(default_factory=dict)
    not_finite_shards: int = 0

    @classmethod
    def of(cls, record: Commit) -> Tally:
        setting = json.dumps(record.setting, sort_keys=True)
        pace = Pace(1, record.computed, record.started, record.finished)
        return cls(
            shards=1,
            windows=record.stop - record.start,
            computed=record.computed,
            peak_memory=record.peak_memory,
            projected_memory=record.projected_memory,
            attempts=Counter([record.attempt]),
            settings=Counter([setting]),
            reasons=Counter([record.why] if record.why else ()),
            workers={(record.host, record.pid): (pace, setting)},
            sessions={record.token: pace},
            not_finite={record.shard: record.not_finite} if record.not_finite else {},
            not_finite_shards=int(record.not_finite > 0),
        )

    def __add__(self, other: Tally) -> Tally:
        return sum_up([self, other])

    def to_json(self) -> dict[str, Any]:
        settings = list(self.settings)
        index = {setting: i for i, setting in enumerate(settings)}
        plain = {name: getattr(self, name) for name in _NUMBERS}
        return plain | {
            "attempts": list(self.attempts.items()),
            "settings": list(self.settings.items()),
            "reasons": list(self.reasons.items()),
            "workers": [
                (*who, *asdict(pace).values(), index[setting]) for who, (pace, setting) in self.workers.items()
            ],
            "sessions": [(token, *asdict(pace).values()) for token, pace in self.sessions.items()],
            "not_finite": list(self.not_finite.items()),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Tally:
        settings = [setting for setting, _ in content["settings"]]
        return cls(
            **{name: content[name] for name in _NUMBERS},
            attempts=Counter(dict(content["attempts"])),
            settings=Counter(dict(content["settings"])),
            reasons=Counter(dict(content["reasons"])),
            workers={(host, pid): (Pace(*pace), settings[i]) for host, pid, *pace, i in content["workers"]},
            sessions={token: Pace(*pace) for token, *pace in content["sessions"]},
            not_finite=dict(content["not_finite"]),
        )


_SUMS, _LARGEST = ("shards", "windows", "computed", "not_finite_shards"), ("peak_memory", "projected_memory")
_NUMBERS, _COUNTS = (*_SUMS, *_LARGEST), ("attempts", "settings", "reasons")


def sum_up(tallies: Iterable[Tally]) -> Tally:
    """One tally of many, in any order."""
    found: dict[str, Any] = {name: Counter() for name in _COUNTS} | dict.fromkeys(_NUMBERS, 0)
    workers: dict[tuple[str, int], tuple[Pace, str]] = {}
    sessions: dict[int, Pace] = {}
    not_finite: dict[int, int] = {}
    for tally in tallies:
        for name in _SUMS:
            found[name] += getattr(tally, name)
        for name in _LARGEST:
            found[name] = max(found[name], getattr(tally, name))
        for name in _COUNTS:
            found[name].update(getattr(tally, name))
        for who, mine in tally.workers.items():
            workers[who] = _joined(workers[who], mine) if who in workers else mine
        for token, pace in tally.sessions.items():
            sessions[token] = sessions[token] + pace if token in sessions else pace
        not_finite.update(tally.not_finite)
    first = {shard: not_finite[shard] for shard in sorted(not_finite)[:SHOWN]}
    return Tally(**found, workers=workers, sessions=sessions, not_finite=first)


def _joined(one: tuple[Pace, str], other: tuple[Pace, str]) -> tuple[Pace, str]:
    latest = max(one, other, key=lambda part: part[0].finished)
    return one[0] + other[0], latest[1]
