"""Where a run stands, from its records alone, and how one ended."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass

from sensitivity.commits import Failure, Odd, each_failure
from sensitivity.lease import owner
from sensitivity.plan import human_bytes
from sensitivity.progress import duration
from sensitivity.setting import Setting
from sensitivity.standing import stand
from sensitivity.store import RESULTS, Run
from sensitivity.tally import SHOWN, Tally
from sensitivity.versions import differences

from .driver import Summary, say

DONE, INCOMPLETE = 0, 1
WORKERS_SHOWN = 10


def conclude(summary: Summary) -> int:
    """Say how a run ended, and give its exit status."""
    place = summary.run.place
    if summary.computed:
        say(f"computed {summary.computed:,} windows at {summary.rate:,.0f} windows/s")
    for line in _not_finite(summary.not_finite, summary.not_finite_shards):
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


def _not_finite(by_shard: Mapping[int, int], shards: int) -> list[str]:
    lines = [f"shard {i}: {count:,} derivatives are NaN or infinite" for i, count in list(by_shard.items())[:SHOWN]]
    more = shards - len(lines)
    return [*lines, f"and in {more:,} shards more"] if more else lines


@dataclass(frozen=True)
class View:
    """Where a run stands, in words. at_work: a driver is."""

    text: str
    complete: bool
    at_work: bool


def look(run: Run) -> View:
    """Shards done, failed and missing; rate and time left; workers and their settings; from records alone."""
    odd: list[Odd] = []
    driver = owner(run.place)  # first: all that a driver commits, it commits before it is gone
    standing = stand(run, odd.append)
    failed, given_up, shown = 0, 0, []
    for failure in each_failure(run):
        if not standing.done[failure.shard]:
            failed += 1
            given_up += failure.given_up
            shown += [_failure(failure)] if failed <= SHOWN else []
    layout, tally = run.layout, standing.tally
    waiting = layout.shard_count - tally.shards - given_up
    lines = [
        ("run", str(run.place)),
        ("driver", str(driver or "none at work")),
        ("shards", f"{tally.shards:,} done, {given_up:,} failed, {waiting:,} missing, of {layout.shard_count:,}"),
        ("windows", f"{tally.windows:,} of {layout.windows:,} committed, {run.skipped:,} skipped for gaps"),
    ]
    for change in run.content.get("version_changes", []):
        lines += [("versions", f"changed: {text}") for text in differences(change["from"], change["to"])]
    if tally.shards:
        lines += [*_pace(run, tally, at_work=driver is not None), *_from_records(tally)]
    lines += [("odd", str(record)) for record in odd[:SHOWN]]
    lines += [("failed", failure) for failure in shown]
    if failed > SHOWN:
        lines.append(("", f"and {failed - SHOWN:,} more, in {run.place}/failures"))
    if tally.shards < layout.shard_count and driver is None:
        lines.append(("to go on", resume_command(run.place, retry_failed=not waiting)))
    text = "\n".join(f"{name:10} {value}" for name, value in lines)
    return View(text, tally.shards == layout.shard_count, driver is not None)


def _pace(run: Run, tally: Tally, *, at_work: bool) -> list[tuple[str, str]]:
    """Of the driver that is or was the last at work."""
    last = tally.sessions[max(tally.sessions)]
    lines = [("rate", f"{last.rate:,.0f} windows/s over {duration(last.finished - last.started)}")]
    left = run.layout.windows - tally.windows
    if left and at_work and last.windows:
        took = max(time.time(), last.finished) - last.started
        lines.append(("time left", duration(left * took / last.windows)))
    return lines


def _from_records(tally: Tally) -> list[tuple[str, str]]:
    lines = [
        ("attempts", ", ".join(f"{n:,} shards at attempt {number}" for number, n in sorted(tally.attempts.items()))),
        (
            "memory",
            f"{human_bytes(tally.peak_memory)} at most in one worker, {human_bytes(tally.projected_memory)} projected",
        ),
    ]
    for content, count in tally.settings.most_common():
        setting = Setting.from_json(json.loads(content))
        lines += [("setting", f"{setting}: {count:,} shards"), *(("", f"lost: {what}") for what in setting.lost)]
    lines += [("chosen", why) for why in tally.reasons]
    lines += [("workers", f"{len(tally.workers):,} so far"), *_workers(tally)]
    return lines + [("not finite", line) for line in _not_finite(tally.not_finite, tally.not_finite_shards)]


def _workers(tally: Tally) -> list[tuple[str, str]]:
    """Those heard of last."""
    settings = {setting: f"setting {i}, " for i, (setting, _) in enumerate(tally.settings.most_common(), 1)}
    latest = sorted(tally.workers.items(), key=lambda one: -one[1][0].finished)[:WORKERS_SHOWN]
    lines = []
    for (host, pid), (pace, setting) in latest:
        which = settings[setting] if len(settings) > 1 else ""
        ago = duration(max(0.0, time.time() - pace.finished))
        lines.append(("", f"{host}:{pid}  {pace.shards:,} shards, {pace.rate:,.0f} windows/s, {which}last {ago} ago"))
    more = len(tally.workers) - len(latest)
    return [*lines, ("", f"and {more:,} more")] if more else lines


def _failure(failure: Failure) -> str:
    reason = failure.reason.partition("\n")[0]
    windows = f"windows {failure.start}–{failure.stop - 1}"
    again = "" if failure.given_up else ", to be tried again"
    return f"shard {failure.shard} ({windows}), {failure.attempts} attempts on {failure.host}{again}: {reason}"


def watch(run: Run, seconds: float) -> int:
    """Show the report again and again on a terminal, until no driver is at work; the exit status."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            view = look(run)
            live.update(Text(view.text), refresh=True)
            if not view.at_work:
                return DONE if view.complete else INCOMPLETE
            time.sleep(seconds)
