"""Both runners, the same store: bit for bit, whatever dies on the way."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import xarray as xr
from keras import layers

from jobs import crew, ledger, ray_runner, ray_session, roster
from jobs.driver import How, resume, run_job
from jobs.ledger import Ledger
from jobs.prepare import prepare
from sensitivity.commits import read_commits, read_failures
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.placement import Node
from sensitivity.plan import Plan, Workers
from sensitivity.store import Run
from tests.conftest import cut, frame, sequential, tape_jacobian, worst
from tests.jobs.conftest import PATIENCE, contents, rerouted, small_job, start, until


def lstm_job(write_job, steps: int = 400, **sections):
    model = sequential((6, 2), layers.LSTM(5, activation="relu"), layers.Dense(3), layers.Dense(1))
    return write_job(model, frame(steps), **{"run": {"shard_windows": 50}, **sections})


def test_ray_and_serial_give_the_same_bytes_and_the_tapes_numbers(write_job, ray_session, tmp_path):
    file = lstm_job(write_job)
    for name, how in (("parallel", How()), ("serial", How(serial=True))):
        summary = run_job(Job.load(rerouted(file, name)), how)
        assert summary.complete
        assert summary.computed == 395
    assert contents(tmp_path / "parallel") == contents(tmp_path / "serial")
    commits = read_commits(Run.open(tmp_path / "parallel")).values()
    assert {record.attempt for record in commits} == {1}
    dataset = xr.open_zarr(tmp_path / "parallel" / "results.zarr")
    import keras

    model = keras.models.load_model(tmp_path / "model.keras")
    windows = cut(frame(400)[["rain", "heat"]].to_numpy("float32"), 6)
    assert worst(dataset["jacobian"].values[:, 0], tape_jacobian(model, windows)) < 1e-5


def test_what_a_process_holds_for_others_is_no_part_of_its_workers_memory(write_job):
    """As a notebook does that runs a job itself."""
    others = np.ones(2 * 10**8)
    assert run_job(Job.load(small_job(write_job, memory_per_worker="1.4 GB")), How(serial=True)).complete
    assert others.nbytes == 1.6e9


def test_sequence_to_sequence(write_job, tmp_path):
    model = sequential((100, 1), layers.LSTM(4, return_sequences=True), layers.TimeDistributed(layers.Dense(1)))
    table = frame(109, ("rain",))
    summary = run_job(Job.load(write_job(model, table)), How(serial=True))
    assert summary.complete
    dataset = xr.open_zarr(tmp_path / "run" / "results.zarr")
    assert dataset["jacobian"].shape == (10, 100, 1, 100, 1)
    windows = tf.constant(cut(table[["rain"]].to_numpy("float32"), 100))
    for step in (0, 57, 99):
        with tf.GradientTape() as tape:
            tape.watch(windows)
            output = model(windows)[:, step]
        assert worst(dataset["jacobian"].values[:, step, 0], tape.gradient(output, windows).numpy()) < 1e-5
    above = np.triu(np.ones((100, 100), bool), 1)
    assert not dataset["jacobian"].values[:, :, 0, :, 0][:, above].any()


def test_a_second_run_computes_only_what_is_missing(write_job, ray_session, tmp_path, capsys):
    job = Job.load(lstm_job(write_job))
    run_job(job, How(serial=True))
    before = contents(tmp_path / "run")
    for index in (1, 5):
        (tmp_path / "run" / "commits" / f"{index:08d}.json").unlink()
    summary = run_job(job, How())
    assert (summary.already, summary.done) == (6, 8)
    assert "6 of 8 shards are committed, 2 to compute" in capsys.readouterr().err
    (tmp_path / "run" / "commits" / "00000007.json").unlink()
    (tmp_path / "job.toml").unlink()
    (tmp_path / "model.keras").unlink()
    (tmp_path / "series.csv").unlink()
    assert resume(tmp_path / "run", How(serial=True)).already == 7
    assert contents(tmp_path / "run") == before


POISON = """
import os, signal, sys
import keras, tensorflow as tf
from keras import layers

def harm(windows):
    if windows.max() > 50:
        {harm}
    return windows

@tf.custom_gradient
def checked(windows):
    harmless = tf.ensure_shape(tf.numpy_function(harm, [windows], tf.float32), windows.shape)
    return harmless, lambda upstream: upstream

def build():
    keras.utils.set_random_seed(1)
    source = keras.Input((6, 2))
    safe = layers.Lambda(checked, output_shape=(6, 2))(source)
    return keras.Model(source, layers.Dense(1)(layers.Flatten()(safe)))
"""


def poisoned(write_job, tmp_path: Path, harm: str, name: str) -> Job:
    """A job whose model comes to harm on the windows of shard 3."""
    (tmp_path / f"{name}.py").write_text(POISON.format(harm=harm))
    table = frame(200)
    table.loc[180, "rain"] = 100.0
    file = write_job(series=table, run={"shard_windows": 50})
    file.write_text(file.read_text().replace('path = "model.keras"', f'path = "{name}:build"'))
    return Job.load(file)


@pytest.mark.parametrize("how", [How(), How(serial=True)], ids=["ray", "serial"])
def test_a_shard_that_fails_three_times_is_recorded_and_the_others_go_on(write_job, ray_session, tmp_path, how):
    name = f"raising_{'serial' if how.serial else 'ray'}"
    job = poisoned(write_job, tmp_path, 'raise RuntimeError("too much rain")', name)
    summary = run_job(job, how)
    assert not summary.complete
    assert [(failure.shard, failure.attempts) for failure in summary.failed] == [(3, 3)]
    run = Run.open(tmp_path / "run")
    assert sorted(read_commits(run)) == [0, 1, 2]
    assert "too much rain" in read_failures(run)[3].reason


def test_a_worker_that_dies_is_replaced_and_only_its_shard_is_blamed(write_job, ray_session, tmp_path):
    flag = tmp_path / "died"
    harm = f"os.path.exists({str(flag)!r}) or (open({str(flag)!r}, 'w').close(), os.kill(os.getpid(), 9))"
    summary = run_job(poisoned(write_job, tmp_path, harm, "dying_once"), How())
    assert summary.complete
    attempts = {index: record.attempt for index, record in read_commits(summary.run).items()}
    assert attempts == {0: 1, 1: 1, 2: 1, 3: 2}


def test_a_shard_that_kills_every_worker_is_given_up(write_job, ray_session, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "DEATHS", 2)
    summary = run_job(poisoned(write_job, tmp_path, "os.kill(os.getpid(), 9)", "deadly"), How())
    assert [(failure.shard, failure.attempts) for failure in summary.failed] == [(3, 2)]
    assert summary.done == 3


def test_workers_that_die_of_their_first_call_begin_with_a_smaller_one(write_job, ray_session, tmp_path, monkeypatch):
    monkeypatch.setattr(roster, "was_for_memory", lambda *_: True)
    (tmp_path / "greedy.py").write_text(
        POISON.format(harm="os.kill(os.getpid(), 9)").replace("windows.max() > 50", "len(windows) > 5")
    )
    knobs = {"kernel": "gradient", "windows_per_call": 10}
    file = write_job({"path": "greedy:build"}, run={"shard_windows": 10, "workers": 1}, sensitivity=knobs)
    run, plan = started(Job.load(file))
    outcomes = on_ray(run, plan, plan.workers)
    assert {(record.attempt, record.setting["windows_per_call"]) for record in outcomes} == {(1, 5)}
    assert len(outcomes) == run.layout.shard_count


def on_ray(run: Run, plan: Plan, workers: Workers) -> list:
    demand = roster.Demand(workers, ray_session.nodes)
    return list(ray_runner.run_on_ray(run, Ledger(run.layout.shards()), plan.choice, demand))


def started(job: Job) -> tuple[Run, Plan]:
    prepared = prepare(job, [Node(2, 0, 8 * 10**9)])
    return prepared.open_or_create(), prepared.plan


def test_a_worker_that_ray_cannot_start_is_not_waited_for(write_job, ray_session):
    run, plan = started(Job.load(write_job(run={"shard_windows": 10})))
    outcomes = on_ray(run, plan, replace(plan.workers, count=5))  # on two cores
    assert len(outcomes) == run.layout.shard_count


def test_a_shard_that_failed_everywhere_does_not_wait_for_a_worker_that_never_comes(
    write_job, ray_session, tmp_path, monkeypatch
):
    monkeypatch.setattr(crew, "PATIENCE_SECONDS", 3.0)
    run, plan = started(poisoned(write_job, tmp_path, 'raise RuntimeError("too much rain")', "waiting"))
    outcomes = on_ray(run, plan, replace(plan.workers, count=4))  # on two cores
    assert sorted(read_commits(run)) == [0, 1, 2]
    assert [outcome.attempts for outcome in outcomes if outcome.shard == 3] == [1, 2, 3]


def test_a_worker_that_no_node_can_hold_is_refused(write_job, ray_session):
    with pytest.raises(Refused, match="at most 2, the cores of one node"):
        run_job(Job.load(write_job(run={"cpus_per_worker": 64})), How(address="auto"))


def test_workers_that_cannot_be_set_up_end_the_run(write_job, ray_session):
    run, plan = started(Job.load(write_job()))
    (run.place.path / "model.keras").write_bytes(b"no model")
    with pytest.raises(Refused, match="model"):
        on_ray(run, plan, plan.workers)


def test_a_dead_address_is_refused_at_once():
    with pytest.raises(Refused, match="127.0.0.1:1"):
        ray_session._require_reachable("127.0.0.1:1")


BROKEN_NODE = """
import os, pathlib

if not os.path.exists({flag!r}) and "ShardWorker" in pathlib.Path("/proc/self/cmdline").read_text():
    pathlib.Path({flag!r}).touch()
    os.environ["BROKEN_NODE"] = "1"
"""


def test_one_broken_worker_does_not_use_up_the_shards(write_job, ray_session, tmp_path):
    """The first worker to come fails at everything it is given; the other one does the work."""
    job = poisoned(write_job, tmp_path, "pass", "half_broken")
    module = tmp_path / "half_broken.py"
    text = module.read_text().replace(
        "windows.max() > 50:\n        pass", "os.environ.get('BROKEN_NODE'):\n        raise OSError"
    )
    module.write_text(BROKEN_NODE.format(flag=str(tmp_path / "flag")) + text)
    summary = run_job(job, How())
    assert (tmp_path / "flag").exists()
    assert summary.complete
    assert read_failures(summary.run) == {}


def test_workers_are_placed_on_the_clusters_gpus(write_job, ray_session, tmp_path, monkeypatch):
    """Two logical GPUs: workers ask Ray for one each and compute on what is really there."""
    hired = []
    options = roster.ray.actor.ActorClass.options
    monkeypatch.setattr(
        roster.ray.actor.ActorClass, "options", lambda self, **given: hired.append(given) or options(self, **given)
    )
    summary = run_job(Job.load(write_job(run={"shard_windows": 20})), How(address="auto"))
    assert summary.complete
    assert [(one["num_gpus"], one["num_cpus"]) for one in hired] == [(1.0, 1), (1.0, 1)]


def committed(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "commits").glob("0*.json")}


def wait_for_commits(run: Path, count: int, process: subprocess.Popen) -> None:
    until(lambda: len(committed(run)) >= count, process)


@pytest.mark.parametrize("options", [("--serial",), ()], ids=["serial", "ray"])
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(write_job, tmp_path, held, options):
    """Its fourth shard is held until it has ended."""
    small_job(write_job)
    held.hold(3)
    process = start("run", "job.toml", *options, cwd=tmp_path)
    wait_for_commits(tmp_path / "run", 2, process)
    until(lambda: held.is_reached(3), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert out == ""
    assert "Traceback" not in err
    done = committed(tmp_path / "run")
    assert "00000003.json" not in done
    assert f"stopped: {len(done)} of 20 shards are committed" in err
    assert f"sensitivity resume {tmp_path / 'run'}" in err
