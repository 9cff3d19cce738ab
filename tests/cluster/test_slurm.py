"""The Slurm script, run by bash with a Slurm that records how it is called and does one node's part."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from tests.cluster.files import CLUSTER, parsed, text

SCRIPT = CLUSTER / "slurm.sh"
PATIENCE = 120.0  # seconds, with a busy machine
SCONTROL = """#!/bin/bash
printf '%s\\0' scontrol "$@" >>"$RECORD"; printf '\\n' >>"$RECORD"
if [[ $1 == show ]]; then printf 'node17\\nnode18\\nnode19\\n'; fi
"""
SRUN = """#!/bin/bash
printf '%s\\0' srun "$@" >>"$RECORD"; printf '\\n' >>"$RECORD"
env >"$RECORD.env"
while [[ $1 != -- ]]; do shift; done
shift
if [[ ${RAY_STARTS:-yes} == yes ]]; then "$@"; fi
"""
# Finishes when asked to, with shards missing; else as soon as nothing holds it.
SENSITIVITY = """#!/bin/bash
trap 'exit 1' TERM
touch "$RECORD.begun"
while [[ -e $RECORD.held ]]; do sleep 0.05; done
exit "${STATUS:-0}"
"""


@dataclass(frozen=True)
class Slurm:
    record: Path
    env: dict[str, str]

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True, timeout=PATIENCE)

    @contextmanager
    def begun(self) -> Iterator[subprocess.Popen]:
        """A job whose run has begun, and goes on until it is released."""
        Path(f"{self.record}.held").touch()
        with subprocess.Popen(["bash", str(SCRIPT), "job.toml"], env=self.env) as job:
            try:
                deadline = time.monotonic() + PATIENCE
                while not Path(f"{self.record}.begun").exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                yield job
            finally:
                self.release()

    def release(self) -> None:
        Path(f"{self.record}.held").unlink(missing_ok=True)

    def calls(self, name: str) -> list[list[str]]:
        calls = [line.split("\0")[:-1] for line in self.record.read_text().splitlines()]
        return [call[1:] for call in calls if call[0] == name]


@pytest.fixture
def slurm(tmp_path) -> Iterator[Slurm]:
    for name, content in {"scontrol": SCONTROL, "srun": SRUN, "sensitivity": SENSITIVITY}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    user = f"test{os.getpid()}"
    yield Slurm(
        tmp_path / "record",
        {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RECORD": str(tmp_path / "record"),
            "USER": user,
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "node[17-19]",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_CPUS_PER_TASK": "32",
        },
    )
    Path(f"/tmp/{user}-123456.driver").unlink(missing_ok=True)


def symmetric_run(call: list[str]) -> tuple[click.Context, list[str], list[str]]:
    """Of a recorded `srun`: what Ray makes of it, what it hands on to `ray start`, and the command on the head."""
    from ray.scripts.symmetric_run import curate_and_validate_ray_start_args
    from ray.scripts.symmetric_run import symmetric_run as command

    words = call[call.index("ray") + 2 :]
    ours, entrypoint = words[: words.index("--")], words[words.index("--") + 1 :]
    context = command.make_context("symmetric-run", list(ours), resilient_parsing=True)
    return context, curate_and_validate_ray_start_args(ours), entrypoint


def test_it_is_sound_bash():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "pip install '.[test]' brings shellcheck"
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(SCRIPT, os.X_OK)


def test_one_ray_a_node_and_the_run_on_the_first(slurm):
    assert slurm.run("job.toml", "--retry-failed").returncode == 0
    assert slurm.calls("scontrol") == [["show", "hostnames", "node[17-19]"]]
    [call] = slurm.calls("srun")
    assert call[: call.index("ray")] == [
        *("--export=ALL", "--ntasks-per-node=1", "--cpus-per-task=32", "--kill-on-bad-exit=1"),
    ]
    assert call[call.index("ray") + 1] == "symmetric-run"

    context, start, entrypoint = symmetric_run(call)
    assert (context.params["address"], context.params["min_nodes"]) == ("node17:23456", 3)
    assert start == ["--num-cpus=32"]
    run = parsed(entrypoint[entrypoint.index("sensitivity") :])
    assert run.info_name == "run"
    assert (run.params["job"], run.params["address"]) == (Path("job.toml"), "auto")
    assert run.params["retry_failed"]


def test_ray_start_knows_the_options(slurm):
    from ray.scripts.scripts import start

    slurm.run("job.toml")
    _, options, _ = symmetric_run(slurm.calls("srun")[0])
    assert start.make_context("start", options).params["num_cpus"] == 32


def test_every_job_has_a_token_of_its_own_and_says_nothing_to_others(slurm):
    tokens = set()
    for _ in range(2):
        slurm.run("job.toml")
        env = dict(line.split("=", 1) for line in Path(f"{slurm.record}.env").read_text().splitlines() if "=" in line)
        assert (env["RAY_AUTH_MODE"], env["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")
        assert int(env["RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"]) > 30
        assert env["RAY_TMPDIR"] == f"/tmp/{env['USER']}-123456"
        tokens.add(env["RAY_AUTH_TOKEN"])
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)
    assert len(tokens) == 2


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_run_s_exit_status_is_the_job_s(slurm, status):
    assert slurm.run("job.toml", STATUS=str(status)).returncode == status
    assert not [call for call in slurm.calls("scontrol") if call[0] == "requeue"]


def test_a_run_that_never_began_is_not_taken_for_one_that_is_done(slurm):
    """`ray symmetric-run` ends with 0 where Ray cannot start; the job may have been on this node before."""
    assert slurm.run("job.toml").returncode == 0
    assert slurm.run("job.toml", RAY_STARTS="no").returncode == 1


def test_when_time_is_up_the_run_ends_in_order_and_the_job_is_queued_again(slurm):
    with slurm.begun() as job:
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=PATIENCE) == 1
    assert slurm.calls("scontrol")[-1] == ["requeue", "123456"]


def test_a_run_that_is_done_when_time_is_up_is_not_queued_again(slurm):
    with slurm.begun() as job:
        Path(f"/tmp/{slurm.env['USER']}-123456.driver").write_text("999999999")  # the signal finds nobody
        job.send_signal(signal.SIGUSR1)
        slurm.release()
        assert job.wait(timeout=PATIENCE) == 0
    assert slurm.calls("scontrol") == [["show", "hostnames", "node[17-19]"]]


def test_without_a_job_it_says_how_it_is_used(slurm):
    done = slurm.run()
    assert "usage: sbatch slurm.sh JOB" in done.stderr
    assert done.returncode != 0
    assert not slurm.record.exists()


def test_slurm_is_told_of_whole_nodes_a_signal_and_the_queue():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text("slurm.sh"), re.MULTILINE))
    assert (asked["ntasks-per-node"], asked["signal"]) == ("1", "B:USR1@180")
    assert {"exclusive", "requeue"} <= set(asked)
    grace = re.search(r"--grace (\d+)", text("slurm.sh"))
    assert grace
    assert 2 * int(grace[1]) < 180
