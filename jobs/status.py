"""Where a run stands, from its records alone, and how one ended."""

from __future__ import annotations

import shlex
from collections import Counter

from sensitivity.commits import Commit, Failure, Odd, each_commit, read_failures
from sensitivity.lease import owner
from sensitivity.plan import human_bytes
from sensitivity.setting import Setting
from sensitivity.store import RESULTS, Run
from sensitivity.versions import differences

from .driver import Summary, say

DONE, INCOMPLETE = 0, 1
SHOWN = 20


def conclude(summary: Summary) -> int:
    """Say how a run ended, and give its exit status."""
    place = summary.run.place
    if summary.computed:
        say(f"computed {summary.computed:,} windows at {summary.rate:,.0f} windows/s")
    for line in _not_finite(summary.not_finite):
        say(line)
    for failure in summary.failed[:5]:
        say(_failure(failure))
    if summary.complete:
        print(f"{place}/{RESULTS}")
        return DONE
    why = f"ended with {len(summary.failed)} failed shards"
    if summary.stopped is not None:
        why = "stopped"
        say(summary.stopped)
    say(f"{why}: {summary.done:,} of {summary.shards:,} shards are committed")
    if not summary.intact:
        say(f"what stands there now:  sensitivity status {shlex.quote(str(place))}")
        return INCOMPLETE
    only_failed = summary.done + len(summary.failed) == summary.shards
    say(f"to go on:  {resume_command(place, retry_failed=only_failed)}")
    return INCOMPLETE


def resume_command(place: object, *, retry_failed: bool = False) -> str:
    """The command that goes on, as a shell takes it."""
    return f"sensitivity resume {shlex.quote(str(place))}{' --retry-failed' if retry_failed else ''}"


def _not_finite(by_shard: dict[int, int]) -> list[str]:
    lines = [f"shard {i}: {count:,} derivatives are NaN or infinite" for i, count in list(by_shard.items())[:SHOWN]]
    more = len(by_shard) - len(lines)
    return [*lines, f"and in {more:,} shards more"] if more else lines


def report(run: Run) -> str:
    odd: list[Odd] = []
    commits = {record.shard: record for record in each_commit(run, odd.append)}
    failures = {i: failure for i, failure in read_failures(run).items() if i not in commits}
    given_up = sum(failure.given_up for failure in failures.values())
    layout = run.layout
    done = sum(record.stop - record.start for record in commits.values())
    waiting = layout.shard_count - len(commits) - given_up
    lines = [
        ("run", str(run.place)),
        ("driver", str(owner(run.place) or "none at work")),
        ("shards", f"{len(commits):,} done, {given_up:,} failed, {waiting:,} missing, of {layout.shard_count:,}"),
        ("windows", f"{done:,} of {layout.windows:,} committed, {run.skipped:,} skipped for gaps in the series"),
    ]
    for change in run.content.get("version_changes", []):
        lines += [("versions", f"changed: {text}") for text in differences(change["from"], change["to"])]
    if commits:
        lines += _from_records(list(commits.values()))
    lines += [("odd", str(record)) for record in odd[:SHOWN]]
    lines += [("failed", _failure(failure)) for failure in list(failures.values())[:SHOWN]]
    if len(failures) > SHOWN:
        lines.append(("", f"and {len(failures) - SHOWN:,} more, in {run.place}/failures"))
    if len(commits) < layout.shard_count:
        lines.append(("to go on", resume_command(run.place, retry_failed=not waiting)))
    return "\n".join(f"{name:10} {value}" for name, value in lines)


def _from_records(records: list[Commit]) -> list[tuple[str, str]]:
    computed, seconds = sum(r.computed for r in records), sum(r.seconds for r in records)
    workers = {(r.host, r.pid) for r in records}
    attempts = Counter(r.attempt for r in records)
    settings = Counter(Setting.from_json(r.setting) for r in records)
    lines = [
        (
            "throughput",
            f"{computed / seconds if seconds else 0:,.0f} windows/s a worker, {len(workers)} workers so far",
        ),
        ("attempts", ", ".join(f"{count:,} shards at attempt {number}" for number, count in sorted(attempts.items()))),
        (
            "memory",
            f"{human_bytes(max(r.peak_memory for r in records))} at most in one worker, "
            f"{human_bytes(max(r.projected_memory for r in records))} projected",
        ),
    ]
    for setting, count in settings.most_common():
        lines += [("setting", f"{setting}: {count:,} shards"), *(("", f"lost: {what}") for what in setting.lost)]
    lines += [("chosen", why) for why in {r.why: None for r in records if r.why}]
    return lines + [
        ("not finite", line) for line in _not_finite({r.shard: r.not_finite for r in records if r.not_finite})
    ]


def _failure(failure: Failure) -> str:
    reason = failure.reason.partition("\n")[0]
    windows = f"windows {failure.start}–{failure.stop - 1}"
    again = "" if failure.given_up else ", to be tried again"
    return f"shard {failure.shard} ({windows}), {failure.attempts} attempts on {failure.host}{again}: {reason}"
