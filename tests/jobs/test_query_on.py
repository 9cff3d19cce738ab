"""Queries give the same wherever they are computed, and say what went wrong there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dask
import numpy as np
import pytest
import xarray as xr

from jobs import query_on
from jobs.prepare import prepare
from jobs.query_on import on
from sensitivity import open_run, query
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.placement import Node
from sensitivity.store import Run
from sensitivity.worker import Worker
from tests.conftest import frame
from tests.jobs.conftest import call

NAMES = ["mean", "quantiles", "elasticity", "active-subspace"]
ASKED = {"by": "rain:3", "where": "heat > -1"}
SENT = """
import sys
from click.testing import CliRunner
from jobs.cli import main
assert CliRunner().invoke(main, ["query", sys.argv[1], "importance"]).exit_code == 0
print([name for name in ("distributed", "ray", "tensorflow", "keras", "matplotlib") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def cluster(s3_server):
    """The address of a Dask cluster of two processes, which know the S3 server."""
    from distributed import LocalCluster

    quiet = {"dashboard_address": ":0", "silence_logs": 50, "env": s3_server.environment}
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", **quiet) as made:
        yield made.scheduler_address


@pytest.fixture(params=["dask", "ray"])
def elsewhere(request) -> str:
    if request.param == "dask":
        return request.getfixturevalue("cluster")
    request.getfixturevalue("ray_session")
    return "ray"


@pytest.fixture
def make_run(write_job) -> Callable[..., Run]:
    """A run of five shards, of which one is missing."""

    def make(**where: str) -> Run:
        file = write_job(series=frame(200), run={"shard_windows": 40, **where})
        run = prepare(Job.load(file), [Node(2, 0, 8 * 10**9)]).open_or_create()
        worker = Worker(run.place)
        for shard in list(run.layout.shards())[:-1]:
            worker.compute(shard)
        return run

    return make


def answers(run: Run, where: str) -> list[xr.Dataset]:
    with on(where):
        return list(dask.compute(query.ask(open_run(str(run.place)), NAMES, **ASKED))[0].values())


def test_a_cluster_gives_what_threads_give(make_run, elsewhere, s3):
    run = make_run(path=f"{s3.home}/run")
    for found, expected in zip(answers(run, elsewhere), answers(run, "threads"), strict=True):
        xr.testing.assert_identical(found, expected)


def test_only_sums_go_from_worker_to_worker(make_run, cluster):
    from distributed import Client

    run = make_run()
    with Client(cluster) as client:
        client.run(lambda dask_worker: dask_worker.transfer_outgoing_log.clear())
        answers(run, cluster)
        logs = client.run(
            lambda dask_worker: [str(key) for sent in dask_worker.transfer_outgoing_log for key in sent["keys"]]
        )
    sent = [key for keys in logs.values() for key in keys]
    assert any("sums-" in key for key in sent)
    assert not [key for key in sent if "xarray" in key or "_read" in key or "concatenate" in key]


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


def test_errors_come_through(make_run, elsewhere):
    home = Path(str(make_run().place))
    damage(home / "series.zarr" / "series" / "c" / "0" / "0")
    with on(elsewhere), pytest.raises(Refused, match="copy of the series is damaged"):
        query.gradient_input(open_run(home)).compute()
    damage(home / "results.zarr" / "jacobian" / "c.2.0.0.0.0")
    done = call("query", home, "importance", "--on", elsewhere)
    assert done.exit_code == 2
    assert "sensitivity verify" in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:1", "ray:127.0.0.1:1", "http://127.0.0.1:1", "cluster"])
def test_an_address_where_nothing_answers(where, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(query_on, "CONNECT_SECONDS", 1)
    with pytest.raises(Refused, match="--on") as refusal, on(where):
        pass
    assert where.removeprefix("ray:") in str(refusal.value)
    assert dask.config.get("scheduler", None) is None, "left behind for whatever is computed next"


def test_distributed_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(Refused, match=r"pip install 'sensitivity-jobs\[distributed\]'"), on("tcp://127.0.0.1:1"):
        pass


def test_threads_load_nothing_else(make_run):
    command = [sys.executable, "-c", SENT, str(make_run().place)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def tried(file: Path, error: type[Exception]) -> int:
    """Fails the first time."""
    with file.open("a") as told:
        told.write("x")
    if file.stat().st_size == 1:
        raise error("not now")
    return os.getpid()


def test_ray_tries_again_what_may_pass(ray_session, tmp_path):
    from jobs.ray_tasks import get

    assert get({"a": (tried, tmp_path / "store", OSError), "b": (abs, "a")}, [["b"], "a"]) != os.getpid()
    with pytest.raises(ValueError, match="^not now$"):
        get({"a": (tried, tmp_path / "value", ValueError), "b": (abs, "a")}, "b")
    assert (tmp_path / "value").stat().st_size == 1


def test_ray_has_a_bounded_number_of_tasks_in_flight(ray_session, monkeypatch):
    from jobs import ray_tasks

    seen = []
    wait = ray_tasks._wait
    monkeypatch.setattr(ray_tasks, "PER_CPU", 1)
    monkeypatch.setattr(ray_tasks, "_wait", lambda pending, most: (wait(pending, most), seen.append(len(pending))))
    graph = {("x", i): (np.square, i) for i in range(8)} | {"sum": (sum, [("x", i) for i in range(8)])}
    assert ray_tasks.get(graph, "sum") == 140
    assert max(seen) < 2


def test_a_report_says_the_same_wherever_it_is_computed(elsewhere, make_run, tmp_path):
    run = make_run()
    pages = []
    for where in ("threads", elsewhere):
        result = call("report", run.place, "-o", tmp_path / "report.html", "--on", where)
        assert result.exit_code == 0, result.stderr
        pages.append((tmp_path / "report.html").read_text().partition("<footer>")[0])
    assert "<figure>" in pages[0]
    assert pages[0] == pages[1]
