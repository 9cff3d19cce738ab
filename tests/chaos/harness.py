"""Runs that are killed again and again, at named points and at random moments, and must end as if undisturbed.

    python -m tests.chaos.harness --runs 60 --kills 200 --starts 30

Each run is a real `sensitivity run` on a real Ray of several processes. Kills are spread over it: the driver, a worker,
Ray's own node process; by SIGKILL, or SIGTERM for the driver. After each death of the driver `resume` goes on, until
the run is complete. What is checked: every commit record that was ever there is still there, byte for byte (nothing
committed is lost or computed again); the store is bit-identical to an undisturbed run's; `verify` finds no damage.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HOOKS = Path(__file__).parent / "hooks"
ROOT = Path(__file__).parents[2]
IN_WORKERS = (
    *("before data", "mid chunk", "amid data", "after data", "after sync"),
    *("before record", "mid record", "after record"),
)
IN_DRIVER = ("during tuning", "during template", "before job.json", "driver hears")
AT_RANDOM = ("driver", "worker", "worker", "node", "head", "terminate driver")
COMMAND = [sys.executable, "-c", "from jobs.cli import main; main()"]
PATIENCE = 300.0  # seconds for one command, on a busy machine
SHARDS = 24
STARTS = "double starts"

MODEL = """
import keras, numpy as np
from keras import layers
model = keras.Sequential([keras.Input((6, 2)), layers.LSTM(5), layers.Dense(2)])
values = np.random.default_rng(1)
model.set_weights([values.uniform(-0.5, 0.5, weight.shape) for weight in model.get_weights()])
model.save("model.keras")
"""
JOB = """
model.path = "model.keras"
series = {path = "series.csv", time = "time"}
sensitivity.windows_per_call = 2
run = {path = "run", shard_windows = 100, workers = 2}
"""


@dataclass
class Tally:
    runs: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def count(self, what: str) -> None:
        self.kills[what] = self.kills.get(what, 0) + 1

    @property
    def killed(self) -> int:
        return sum(count for what, count in self.kills.items() if what != STARTS)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {what}" for what, count in sorted(self.kills.items()))
        return f"{self.runs} runs, {self.killed} kills ({kinds}): {len(self.wrong)} wrong"


class Stage:
    """A job, its series and model, and the store of an undisturbed run, which every killed run must equal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {"PYTHONPATH": os.pathsep.join([str(HOOKS), str(ROOT)]), "CHAOS_DIR": str(folder / "plan")}
        quiet = {"RAY_worker_niceness": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.environment = {**os.environ, **quiet, **environment}
        self.plan = folder / "plan"
        self.plan.mkdir()
        (folder / "job.toml").write_text(JOB)
        _write_series(folder / "series.csv", 100 * SHARDS + 5)
        subprocess.run([sys.executable, "-c", MODEL], cwd=folder, env=self.environment, check=True, capture_output=True)
        status = self.start("run", "job.toml", "--serial").wait(PATIENCE)
        assert status == 0, self.said()
        (folder / "run").rename(folder / "undisturbed")
        self.expected = store(folder / "undisturbed")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with (self.folder / "said").open("w") as said:
            return subprocess.Popen(
                [*COMMAND, *arguments], cwd=self.folder, env=self.environment, stdout=said, stderr=said
            )

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def clear(self) -> None:
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        for left in self.plan.iterdir():
            left.unlink()


def _write_series(file: Path, steps: int) -> None:
    values = random.Random(7)
    rows = (f"{step},{values.gauss(0, 1):.6f},{values.gauss(0, 1):.6f}" for step in range(steps))
    file.write_text("time,rain,heat\n" + "\n".join(rows) + "\n")


def store(run: Path) -> dict[str, bytes]:
    """Every byte of the store, and what else there should be nothing left of."""
    files = [file for file in sorted(run.rglob("*")) if file.is_file()]
    kept = {str(file.relative_to(run)): file for file in files}
    ours = ("lease/", "commits/0", "job.json", "tuning.json")
    return {name: file.read_bytes() for name, file in kept.items() if not name.startswith(ours)}


def records(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "commits").glob("0*.json")}


def kill_through(stage: Stage, points: list[str], rng: random.Random, tally: Tally) -> None:
    """One run with kills at these points, named ones and random moments, then resumed until it is complete."""
    stage.clear()
    for number, point in enumerate(point for point in points if point not in AT_RANDOM):
        (stage.plan / f"{number:03d} {point}").touch()
    moments = [point for point in points if point in AT_RANDOM]
    run, seen, status = stage.folder / "run", {}, -1
    commands = 0
    while status != 0:
        commands += 1
        if commands > len(points) + 3:
            tally.wrong.append(f"{points}: {commands} commands do not end it: {stage.said()[-2000:]}")
            break
        known = run / "job.json"
        process = stage.start("resume", "run") if known.exists() else stage.start("run", "job.toml")
        status = _disturbed(process, run, moments, rng, tally)
        after = _settled(run)
        lost = [name for name, content in seen.items() if after.get(name) != content]
        if lost:
            tally.wrong.append(f"{points}: committed shards lost or computed again: {lost}")
        seen = after
        if status == 2 or (status == 1 and "Traceback" in stage.said()):
            tally.wrong.append(f"{points}: exit status {status}: {stage.said()[-2000:]}")
            break
    tally.runs += 1
    for point in set(points) - set(AT_RANDOM):
        for _ in range(points.count(point) - len(list(stage.plan.glob(f"* {point}")))):
            tally.count(point)
    _check(stage, points, tally)


def _check(stage: Stage, points: list[str], tally: Tally) -> None:
    found = store(stage.folder / "run")
    if found != stage.expected:
        names = sorted(name for name in found.keys() | stage.expected if found.get(name) != stage.expected.get(name))
        commits = map(json.loads, records(stage.folder / "run").values())
        settings = [(record["shard"], record["setting"]) for record in commits if record["setting"]["lost"]]
        tally.wrong.append(f"{points}: the store differs from the undisturbed run's: {names[:5]}, {settings}")
    verified = stage.start("verify", "run").wait(PATIENCE)
    if verified != 0 or len(records(stage.folder / "run")) != SHARDS:
        tally.wrong.append(f"{points}: not verified: {stage.said()[-2000:]}")


def _disturbed(process: subprocess.Popen[str], run: Path, moments: list[str], rng: random.Random, tally: Tally) -> int:
    """Wait for a driver's end, killing at random moments on the way; its exit status, negative where it was killed."""
    deadline = time.monotonic() + PATIENCE
    target = _next_target(run, rng) if moments else SHARDS + 1
    while process.poll() is None:
        if time.monotonic() > deadline:
            tally.wrong.append("hangs")
            process.kill()
        if len(records(run)) >= target and moments:
            what = moments.pop()
            time.sleep(rng.uniform(0, 0.3))
            if _kill(process, what):
                tally.count(f"random {what}")
            else:
                moments.insert(0, what)
            target = _next_target(run, rng)
        time.sleep(0.01)
    return process.returncode


def _next_target(run: Path, rng: random.Random) -> int:
    """Strike after some more commits, while there is something left to do."""
    return min(len(records(run)) + rng.randint(0, 6), SHARDS - 2)


def _kill(driver: subprocess.Popen[str], what: str) -> bool:
    if what.endswith("driver"):
        driver.send_signal(signal.SIGTERM if what.startswith("terminate") else signal.SIGKILL)
        return True
    name = {"worker": "ray::ShardWorker", "node": "raylet/raylet", "head": "gcs/gcs_server"}[what]
    victims = [pid for pid in descendants(driver.pid) if name in _command(pid)]
    if not victims:
        return False
    os.kill(random.choice(victims), signal.SIGKILL)
    return True


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that these started."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        parents.setdefault(parent, []).append(int(status.parent.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _settled(run: Path) -> dict[str, bytes]:
    """The commit records once no orphaned worker adds to them any more."""
    before = records(run)
    while True:
        time.sleep(0.5)
        after = records(run)
        if after == before:
            return after
        before = after


def start_two(stage: Stage, tally: Tally) -> None:
    """Two drivers at the same moment: one computes, the other is refused."""
    stage.clear()
    drivers = [stage.start("run", "job.toml", "--serial") for _ in range(2)]
    statuses = sorted(driver.wait(PATIENCE) for driver in drivers)
    if statuses != [0, 2]:
        tally.wrong.append(f"two drivers ended with {statuses}: {stage.said()[-2000:]}")
    tally.count(STARTS)
    _check(stage, ["two drivers"], tally)


def plans(runs: int, kills: int, rng: random.Random) -> list[list[str]]:
    """Kills for each run: every named point comes, and random moments as often."""
    named = [*IN_WORKERS, *IN_DRIVER]
    points = [named[i // 2 % len(named)] if i % 2 else rng.choice(AT_RANDOM) for i in range(kills)]
    rng.shuffle(points)
    return [points[i::runs] for i in range(runs)] if runs else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--starts", type=int, default=0, help="of two drivers at the same moment, before the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder to work in, which stays")
    given = parser.parse_args()
    rng, tally = random.Random(given.seed), Tally()
    with tempfile.TemporaryDirectory() as folder:
        if given.keep is not None:
            given.keep.mkdir()
        stage = Stage(given.keep or Path(folder))
        acts = [functools.partial(start_two, stage, tally)] * given.starts
        acts += [
            functools.partial(kill_through, stage, points, rng, tally) for points in plans(given.runs, given.kills, rng)
        ]
        while acts and not tally.wrong:
            acts.pop(0)()
            print(tally, *tally.wrong, sep="\n", flush=True)
            if not acts and given.runs and tally.killed < given.kills:  # runs may end before their last moment comes
                points = plans(1, min(4, given.kills - tally.killed), rng)[0]
                acts.append(functools.partial(kill_through, stage, points, rng, tally))
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
