"""A Ray head of a test's own, in processes of its own, with its job API on loopback and a token of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from tests.jobs.conftest import PATIENCE, SENSITIVITY

ROOT = Path(__file__).parents[2]
RANDOM = ("node-manager", "object-manager", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
PORTS = (*RANDOM, "min-worker", "max-worker", "dashboard-agent-listen")


@dataclass(frozen=True)
class Head:
    address: str
    token: str

    @property
    def environment(self) -> dict[str, str]:
        """Of whoever may submit jobs."""
        ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "PYTHONPATH": str(ROOT)}
        return {**_plain(), **ours}

    def submit(self, *arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
        """The command as a user gives it."""
        command = [*SENSITIVITY, "submit", *map(str, arguments)]
        known = {**self.environment, **environment}
        return subprocess.run(command, cwd=cwd, env=known, capture_output=True, text=True, timeout=PATIENCE)

    def job(self, submission_id: str) -> dict[str, Any]:
        answer = requests.get(
            f"{self.address}/api/jobs/{submission_id}", headers={"Authorization": f"Bearer {self.token}"}, timeout=30
        )
        return answer.json()

    def wait_for(self, submission_id: str, status: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while (found := self.job(submission_id)["status"]) != status:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)


@contextlib.contextmanager
def started(installed: Path) -> Iterator[Head]:
    """installed: a folder whose packages the nodes have installed."""
    home = Path(tempfile.mkdtemp(prefix="head", dir="/tmp"))  # sockets have short names
    head = Head(f"http://127.0.0.1:{(port := free_port())}", uuid.uuid4().hex)
    ports = ["--port=0", *(f"--{name}-port=0" for name in PORTS), f"--dashboard-port={port}"]
    names = ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--temp-dir={home}", "--num-cpus=2"]
    with open(home / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *ports, *names],
            env={**head.environment, **_of_a_node(installed)},
            stdout=said,
            stderr=said,
        )
    try:
        _wait_until_up(head, process, home / "said")
        yield head
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(home, ignore_errors=True)


def _plain() -> dict[str, str]:
    """This environment without other clusters, and without what tests lend to Ray."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SENSITIVITY_"))}


def _of_a_node(installed: Path) -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(installed),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # everything on loopback
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_worker_register_timeout_seconds": "300",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_up(head: Head, process: subprocess.Popen, said: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{head.address}/api/version", timeout=30).status_code == 401:
                return
        time.sleep(0.2)
