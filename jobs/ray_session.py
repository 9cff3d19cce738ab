"""Ray for the length of a run: joined or started, and what nodes it has."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from sensitivity import machine
from sensitivity.errors import Refused
from sensitivity.placement import Node
from sensitivity.plan import Workers

from .resources import MEMORY_SHARE

CONNECT_SECONDS = 5.0


@contextlib.contextmanager
def session(address: str | None, workers: Workers | None = None) -> Iterator[list[Node]]:
    """Ray for the length of a run: an existing cluster at `address`, else one of our own on this machine.

    A session that is open already is used and left open. workers: what one of our own is to hold. Yields the nodes
    that are there.
    """
    ours = not ray.is_initialized()
    with contextlib.redirect_stdout(sys.stderr):  # Ray tells of dead workers on stdout, which is for results
        if ours:
            _connect(address, workers)
        try:
            yield list(nodes().values())
        finally:
            if ours:
                ray.shutdown()


def nodes() -> dict[str, Node]:
    """What workers may have of each node that is alive and has any cores for them, by Ray's id."""
    alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    return {name: _node(has) for name, has in alive.items() if has.get("CPU")}


def _node(has: dict[str, float]) -> Node:
    memory = has.get("memory", machine.available_memory())
    return Node(int(has["CPU"]), int(has.get("GPU", 0)), int(memory * MEMORY_SHARE))


def _connect(address: str | None, workers: Workers | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        if workers is not None:
            quiet |= {"num_cpus": workers.count * workers.cpus, "_memory": workers.count * workers.memory}
        ray.init(address="local", include_dashboard=False, **quiet)
        return
    _require_reachable(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(address, error) from error


def _require_reachable(address: str) -> None:
    """Ray itself would try for ten minutes, and hear no Ctrl-C."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> Refused:
    return Refused(
        "--address",
        given=f"{address} ({str(error).strip().partition(chr(10))[0]})",
        allowed="a Ray cluster that can be reached, such as 10.0.0.5:6379 or auto",
        remedy="check the address with `ray status --address ADDRESS`, or leave it out to run on this machine",
    )
