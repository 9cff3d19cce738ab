"""Where a run stands, from its records alone, and how one ended."""

from __future__ import annotations

from collections import Counter

from sensitivity.commits import Commit, Failure, read_commits, read_failures
from sensitivity.plan import human_bytes
from sensitivity.setting import Setting
from sensitivity.store import RESULTS, Run

from .driver import Summary, say

DONE, INCOMPLETE = 0, 1
FAILURES_SHOWN = 20


def conclude(summary: Summary) -> int:
    """Say how a run ended, and give its exit status."""
    path = summary.run.path
    if summary.computed:
        say(f"computed {summary.computed:,} windows at {summary.rate:,.0f} windows/s")
    for failure in summary.failed[:5]:
        say(_failure(failure))
    if summary.complete:
        print(path / RESULTS)
        return DONE
    why = "stopped" if summary.interrupted else f"ended with {len(summary.failed)} failed shards"
    say(f"{why}: {summary.done:,} of {summary.shards:,} shards are committed")
    say(f"to go on:  sensitivity resume {path}")
    return INCOMPLETE


def report(run: Run) -> str:
    commits, failures = read_commits(run), read_failures(run)
    failures = {index: failure for index, failure in failures.items() if index not in commits}
    layout = run.layout
    done = sum(record.stop - record.start for record in commits.values())
    waiting = layout.shard_count - len(commits) - len(failures)
    lines = [
        ("run", str(run.path)),
        ("shards", f"{len(commits):,} done, {len(failures):,} failed, {waiting:,} missing, of {layout.shard_count:,}"),
        ("windows", f"{done:,} of {layout.windows:,} committed, {run.skipped:,} skipped for gaps in the series"),
    ]
    if commits:
        lines += _from_records(list(commits.values()))
    lines += [("failed", _failure(failure)) for failure in list(failures.values())[:FAILURES_SHOWN]]
    if len(failures) > FAILURES_SHOWN:
        lines.append(("", f"and {len(failures) - FAILURES_SHOWN:,} more, in {run.path / 'failures'}"))
    if len(commits) < layout.shard_count:
        lines.append(("to go on", f"sensitivity resume {run.path}"))
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
    not_finite = sum(r.not_finite for r in records)
    if not_finite:
        shards = [r.shard for r in records if r.not_finite]
        lines.append(
            (
                "not finite",
                f"{not_finite:,} derivatives are NaN or infinite, in {len(shards):,} shards from {shards[0]}",
            )
        )
    return lines


def _failure(failure: Failure) -> str:
    reason = failure.reason.partition("\n")[0]
    windows = f"windows {failure.start}–{failure.stop - 1}"
    return f"shard {failure.shard} ({windows}), {failure.attempts} attempts on {failure.host}: {reason}"
