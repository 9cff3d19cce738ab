"""Several nodes on one machine: where workers go, and what follows when nodes come and go."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from jobs.driver import How, run_job
from sensitivity.job import Job
from tests.jobs.conftest import PATIENCE, contents, rerouted, small_job, start, until
from tests.jobs.test_runners import committed, wait_for_commits


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Ray cluster of processes of its own, of which this process is no part; its head takes no workers."""
    nodes = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, "num_cpus": 0})
    yield nodes
    nodes.shutdown()


@pytest.fixture
def nodes(cluster) -> Iterator[Cluster]:
    """The same, of which a test's own nodes are removed after it."""
    yield cluster
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)


def where(run: Path) -> Counter:
    records = [json.loads(content) for content in committed(run).values()]
    return Counter(record["pid"] for record in records)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return err


def test_a_run_goes_on_as_nodes_come_and_go(write_job, tmp_path, nodes, held):
    """The first node is held at a shard until the second has taken part."""
    small_job(write_job)
    held.hold(5)
    first = nodes.add_node(num_cpus=1)
    process = start("run", "job.toml", "--address", nodes.address, cwd=tmp_path)
    until(lambda: held.is_reached(5), process)
    wait_for_commits(tmp_path / "run", 4, process)
    assert len(where(tmp_path / "run")) == 1
    nodes.add_node(num_cpus=1)
    until(lambda: len(where(tmp_path / "run")) == 2, process)
    nodes.remove_node(first, allow_graceful=False)
    held.release()
    finish(process)
    assert len(committed(tmp_path / "run")) == 20
    assert run_job(Job.load(rerouted(tmp_path / "job.toml", "serial")), How(serial=True)).complete
    assert contents(tmp_path / "run") == contents(tmp_path / "serial")


def test_an_autoscaled_cluster_is_asked_for_all_workers_and_waited_for(write_job, tmp_path, nodes):
    small_job(write_job, workers=2, gpus_per_worker=0.5, memory_per_worker="2GB")
    refused = start("run", "job.toml", "--address", nodes.address, cwd=tmp_path)
    _, err = refused.communicate(timeout=PATIENCE)
    assert refused.returncode == 2
    assert "--autoscale" in err
    process = start("run", "job.toml", "--address", nodes.address, "--autoscale", cwd=tmp_path)
    until(lambda: (tmp_path / "run" / "job.json").exists(), process)
    nodes.add_node(num_cpus=2, num_gpus=1)
    finish(process)
    assert len(committed(tmp_path / "run")) == 20


PLACED = """
import json, sys
import ray
from types import SimpleNamespace
from jobs import roster as rosters
from jobs.deaths import Origin
from jobs.ray_session import nodes, session
from jobs.roster import Demand, Roster
from sensitivity.job import Job
from sensitivity.placement import place

class Light:
    def __init__(self, *_):
        pass

    def origin(self):
        return Origin.here()

rosters.ShardWorker = Light
found = []
with session(sys.argv[1]) as there:
    for gpus in (1.0, 0.5, 2.0, 0.0):
        run = {"path": "run", "gpus_per_worker": gpus}
        content = {"model": {"path": "m.keras"}, "series": {"path": "s.csv"}, "run": run}
        job = Job.model_validate({**content, "directory": "."})
        workers = place(job, there, 1000, 100)
        roster = Roster(SimpleNamespace(job=job), SimpleNamespace(by="given"), Demand(workers, nodes))
        hired = [roster.hire() for _ in range(workers.count)]
        origins = ray.get([origin for _, origin in hired], timeout=300)
        ids = [ray.get(seat.actor.__ray_call__.remote(lambda _: ray.get_gpu_ids())) for seat, _ in hired]
        found.append([workers.count, [[nodes()[o.node].gpus, i] for o, i in zip(origins, ids)]])
        for seat in list(roster.seats):
            roster.leave(seat)
print(json.dumps(found))
"""


def test_workers_have_the_gpus_that_they_ask_for(nodes):
    """On a node with two GPUs and one with one: whole ones, shares of them, two at once, none."""
    nodes.add_node(num_cpus=4, num_gpus=2)
    nodes.add_node(num_cpus=4, num_gpus=1)
    script = [sys.executable, "-c", PLACED, nodes.address]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    by_gpu = [Counter((node, gpu) for node, gpus in workers for gpu in gpus or [None]) for _, workers in found]
    assert [count for count, _ in found] == [3, 6, 1, 8]
    assert by_gpu[0] == {(2, 0): 1, (2, 1): 1, (1, 0): 1}
    assert by_gpu[1] == {(2, 0): 2, (2, 1): 2, (1, 0): 2}
    assert by_gpu[2] == {(2, 0): 1, (2, 1): 1}
    assert by_gpu[3] == {(2, None): 4, (1, None): 4}
