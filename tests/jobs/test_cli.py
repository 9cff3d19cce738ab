"""The commands as a user types them: exit status, stdout for results, stderr for messages."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from jobs.tables import render
from tests.conftest import frame, sequential
from tests.jobs.conftest import call


def test_help_is_quick_and_names_every_command():
    code = "import sys; from jobs.cli import main\n"
    code += "try: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('tensorflow', 'ray', 'xarray', 'pandas', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    commands = ("demo", "plan", "run", "submit", "resume", "status", "verify", "query", "plot", "recurrent")
    assert all(f"\n  {command} " in done.stdout for command in commands)


def coupled():
    source = keras.Input((6, 2))
    return keras.Model(source, layers.UnitNormalization(axis=0, name="norm")(source))


def stateful():
    source = keras.Input((6, 2), batch_size=1)
    return keras.Model(source, layers.LSTM(2, stateful=True, name="memory")(source))


def broken_times():
    table = frame(60)
    table.loc[[10, 11], "time"] = table.loc[[11, 10], "time"].to_numpy()
    return table


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"windows": {"lenght": 6}}, "windows.lenght"),
        ({"windows": {"length": 7}}, "windows.length"),
        ({"windows": {"stride": 0}}, "windows.stride"),
        ({"series": {"path": "absent.csv"}}, "series.path"),
        ({"series": {"features": ["rain", "snow"]}}, "series.features"),
        ({"series": {"features": ["rain"]}}, "series.features"),
        ({"series": {"scaling": {"mean": [0.0], "std": [1.0]}}}, "series.scaling"),
        ({"model": {"path": "absent.keras"}}, "model.path"),
        ({"model": {"path": "no_module:build"}}, "model.path"),
        ({"model": {"path": "s3://bucket/model.keras"}}, "model.path"),
        ({"run": {"memory_per_worker": "300MB"}}, "run.memory_per_worker"),
        ({"run": {"memory_per_worker": "900TB"}}, "run.memory_per_worker"),
        ({"run": {"workers": 4000}}, "run.workers"),
        ({"run": {"gpus_per_worker": 1}}, "run.gpus_per_worker"),
        ({"sensitivity": {"of": "flow"}}, "sensitivity.of"),
        ({"model": coupled}, "'norm'"),
        ({"model": stateful}, "'memory'"),
        ({"series": lambda: frame(5)}, "windows.length"),
        ({"series": lambda: frame(60, ("rain", "heat", "wind"))}, "series.features"),
        ({"series": broken_times}, "row 11"),
    ],
    ids=lambda given: given if isinstance(given, str) else str(getattr(next(iter(given.values())), "__name__", given)),
)
def test_what_is_invalid_is_explained_on_one_screen_and_nothing_is_written(write_job, tmp_path, arguments, key):
    file = write_job(**{name: value() if callable(value) else value for name, value in arguments.items()})
    before = sorted(tmp_path.rglob("*"))
    for command in (["plan", file], ["run", file, "--serial"]):
        result = call(*command)
        assert result.exit_code == 2, result.stderr
        assert key in result.stderr
        assert all(word in result.stderr for word in ("given", "allowed", "do  "))
        assert len(result.stderr.splitlines()) <= 24
        assert result.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ({"sensitivity": {"kernel": "batch_jacobain"}}, "batch_jacobian"),
        ({"sensitivity": {"product": "hesian"}}, "hessian"),
        ({"run": {"dtype": "flaot64"}}, "float64"),
        ({"series": {"features": ["Rain", "heat"]}}, "rain"),
        ({"sensitivity": {"of": "outptu"}}, "output"),
        ({"sensitivity": {"outputs": ["otput"]}}, "output"),
    ],
)
def test_misspelt_values_of_a_job_get_a_suggestion(write_job, arguments, meant):
    found = call("plan", write_job(**arguments))
    assert found.exit_code == 2
    assert f"did you mean '{meant}'?" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["staus", "run"], "status"),
        (["query", "run", "lag-profil"], "lag-profile"),
        (["plot", "run", "heat-map", "-o", "x.png"], "heatmap"),
        (["query", "run", "importance", "--format", "jsno"], "json"),
    ],
)
def test_misspelt_words_of_a_command_get_a_suggestion(arguments, meant):
    found = call(*arguments)
    assert found.exit_code == 2
    assert f"'{meant}'" in found.stderr
    assert "did you mean" in found.stderr.lower()


@pytest.mark.parametrize("ending", ["h5", "hdf5"])
def test_a_model_of_the_former_format_is_told_to_be_saved_anew(write_job, tmp_path, ending):
    """Whether or not Keras could read it: it is not asked."""
    file = write_job()
    (tmp_path / f"soil.{ending}").write_bytes(b"no HDF5")
    file.write_text(file.read_text().replace("model.keras", f"soil.{ending}"))
    found = call("plan", file)
    assert found.exit_code == 2
    assert "model.path is refused" in found.stderr
    before, after = (str(tmp_path / f"soil.{one}") for one in (ending, "keras"))
    assert f"keras.models.load_model({before!r}, compile=False).save({after!r})" in found.stderr


EAGER = """
import keras

class Eager(keras.Model):
    def call(self, source):
        return source[:, -1] * float(source.numpy().std())

def build():
    model = Eager()
    model.build((None, 6, 2))
    return model
"""


def test_a_model_that_runs_eagerly_alone_is_told_so(write_job, tmp_path):
    (tmp_path / "eagerly.py").write_text(EAGER)
    found = call("plan", write_job({"path": "eagerly:build"}, windows={"length": 6}))
    assert found.exit_code == 2
    assert "runs eagerly and fails as a graph" in found.stderr
    assert "'SymbolicTensor' object has no attribute 'numpy'" in found.stderr
    assert "series.features" not in found.stderr


def test_kernel_gradient_for_several_outputs_is_refused(write_job):
    model = sequential((6, 2), layers.Flatten(), layers.Dense(3))
    result = call("run", write_job(model, sensitivity={"kernel": "gradient"}), "--serial")
    assert result.exit_code == 2
    assert "sensitivity.kernel" in result.stderr


@pytest.mark.parametrize("command", [["status"], ["verify"], ["resume"], ["query"], ["plot"], ["recurrent"]])
def test_what_is_no_run_is_refused(tmp_path, command):
    extra = {"query": ["importance"], "plot": ["heatmap", "-o", tmp_path / "x.png"]}.get(command[0], [])
    result = call(*command, tmp_path / "nowhere", *extra)
    assert result.exit_code == 2
    assert "run directory is refused" in result.stderr


def test_plan_says_what_will_be_done_and_writes_nothing(write_job, tmp_path):
    table = frame(60)
    table.loc[20, "rain"] = np.nan
    result = call("plan", write_job(series=table, run={"workers": 1, "shard_windows": 10}))
    assert result.exit_code == 0, result.stderr
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["windows"] == "55, of which 6 touch a missing value and are skipped"
    assert lines["shards"] == "6 of 10 windows"
    assert lines["chunk"].startswith("shape      10 × 1 × 1 × 6 × 2")
    assert "2,860 bytes" in lines["to"]
    assert lines["workers"].startswith("1 of 1 core")
    assert "projected" in lines
    assert lines["kernel"].startswith("gradient, 10 windows a call")
    assert "windows/s" in lines["chosen"]
    assert "audit" in lines
    assert not (tmp_path / "run").exists()


@pytest.fixture
def finished(write_job, tmp_path) -> Path:
    result = call("run", write_job(run={"shard_windows": 10}), "--serial")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "run" / "results.zarr")
    assert "0 of 6 shards are committed, 6 to compute" in result.stderr
    return tmp_path / "run"


def test_run_status_verify_query_plot(finished, tmp_path):
    status = call("status", finished)
    assert status.exit_code == 0
    assert "6 done, 0 failed, 0 missing, of 6" in status.stdout
    assert "6 shards at attempt 1" in status.stdout
    verified = call("verify", finished)
    assert verified.exit_code == 0
    assert "12 chunks, all as committed" in verified.stdout

    as_json = json.loads(call("query", finished, "importance", "--format", "json").stdout)
    assert [row["feature"] for row in as_json] == ["rain", "heat"]
    assert {"output_step", "output", "feature", "count", "importance", "share"} <= set(as_json[0])
    as_csv = list(csv.DictReader(io.StringIO(call("query", finished, "lag-profile", "--format", "csv").stdout)))
    assert len(as_csv) == 6 * 2
    assert list(as_csv[0])[:4] == ["output_step", "output", "lag", "feature"]
    assert "mean_abs" in call("query", finished, "lag-profile").stdout
    assert call("plot", finished, "heatmap", "-o", tmp_path / "x.png").exit_code == 0
    assert (tmp_path / "x.png").stat().st_size > 5000
    assert call("plot", finished, "heatmap", "-o", tmp_path / "x.bmp").exit_code == 2
    svg = ("-o", tmp_path / "x.svg")
    assert call("plot", finished, "comparison", *svg, "--against", finished).exit_code == 0
    assert call("plot", finished, "window", *svg, "--time", "2020-01-01T06:00", "--feature", "heat").exit_code == 0
    drawn = (tmp_path / "x.svg").read_text()
    assert "2020-01-01 06" in drawn
    assert "rain" not in drawn
    assert "comparison alone" in call("plot", finished, "heatmap", *svg, "--against", finished).stderr
    assert "step-lag of one output step" in call("plot", finished, "step-lag", *svg).stderr
    assert "allowed  output" in call("plot", finished, "heatmap", *svg, "--of", "level").stderr
    assert call("plot", finished, "heatmap", "-o", tmp_path / "no" / "x.png").exit_code == 2


def test_damage_is_found_and_an_incomplete_run_says_so(finished):
    (finished / "results.zarr" / "jacobian" / "c.2.0.0.0.0").write_bytes(b"damage")
    result = call("verify", finished)
    assert result.exit_code == 1
    assert result.stdout.startswith("shard 2: results.zarr/jacobian/c.2.0.0.0.0: ")
    assert "sensitivity verify --repair" in result.stderr
    damaged = call("query", finished, "importance")
    assert damaged.exit_code == 2
    assert "sensitivity verify" in damaged.stderr
    assert call("verify", finished, "--repair").exit_code == 1
    assert call("verify", finished).exit_code == 0
    assert "1 missing" in call("status", finished).stdout
    query = call("query", finished, "importance", "--format", "json")
    assert "the run is not complete: 45 of 55 windows" in query.stderr
    assert json.loads(query.stdout)[0]["count"] == 45
    assert call("resume", finished, "--serial").exit_code == 0
    assert call("verify", finished).exit_code == 0


def test_a_second_run_does_nothing_and_another_job_is_refused(finished, tmp_path):
    again = call("run", tmp_path / "job.toml", "--serial")
    assert again.exit_code == 0
    assert "6 of 6 shards are committed, 0 to compute" in again.stderr
    frame(60, seed=9).to_csv(tmp_path / "series.csv", index=False)
    other = call("run", tmp_path / "job.toml", "--serial")
    assert other.exit_code == 2
    assert "series content" in other.stderr


def test_a_failed_shard_ends_in_exit_one_and_shows_in_status(finished, monkeypatch):
    from sensitivity.worker import Worker

    (finished / "commits" / "00000001.json").unlink()
    monkeypatch.setattr(Worker, "compute", lambda *_: (_ for _ in ()).throw(RuntimeError("no such weather")))
    result = call("resume", finished, "--serial")
    assert result.exit_code == 1
    assert "shard 1 (windows 10–19), 3 attempts on" in result.stderr
    assert "RuntimeError: no such weather" in result.stderr
    assert f"sensitivity resume {finished} --retry-failed" in result.stderr
    assert result.stdout == ""
    status = call("status", finished).stdout
    assert "5 done, 1 failed, 0 missing" in status
    assert "no such weather" in status
    again = call("resume", finished, "--serial")
    assert again.exit_code == 1
    assert "0 to compute, 1 given up earlier" in again.stderr
    monkeypatch.undo()
    assert call("resume", finished, "--serial", "--retry-failed").exit_code == 0
    assert json.loads((finished / "commits" / "00000001.json").read_text())["attempt"] == 4
    assert not list((finished / "failures").iterdir())


def test_projected_memory_covers_the_real_peak(write_job):
    """A real worker in a process of its own: its peak stays under the plan, and the plan is not twice too high."""
    model = sequential((20, 2), layers.LSTM(64), layers.Dense(1))
    file = write_job(model, frame(3000))
    code = "from jobs.cli import main; main()"
    ran = subprocess.run([sys.executable, "-c", code, "run", str(file), "--serial"], check=True, capture_output=True)
    assert b"XLA service" not in ran.stderr
    assert b"oneDNN" not in ran.stderr
    planned = next(line for line in call("plan", file).stdout.splitlines() if line.startswith("projected memory"))
    number, unit, *_ = planned.partition("a worker, ")[2].split()
    projected = float(number) * {"MB": 1e6, "GB": 1e9}[unit]
    records = [json.loads(path.read_text()) for path in (file.parent / "run" / "commits").glob("*.json")]
    peak = max(record["peak_memory"] for record in records)
    assert peak <= projected <= 2 * peak


def test_what_is_unexpected_is_one_line_unless_asked_for_more(finished, monkeypatch):
    from sensitivity import integrity

    monkeypatch.setattr(integrity, "inspect", lambda *_, **__: 1 / 0)
    result = call("verify", finished)
    assert result.exit_code == 1
    assert "sensitivity: ZeroDivisionError: division by zero" in result.stderr
    monkeypatch.setenv("SENSITIVITY_TRACEBACKS", "1")
    assert isinstance(call("verify", finished).exception, ZeroDivisionError)


def test_tables_take_any_name():
    rows = [{"feature": "[red]b", "$x_i^$": 1.0}]
    text = render(rows, "table")
    assert "[red]b" in text
    assert "$x_i^$" in text


def test_tables_are_rows_of_labels_and_numbers():
    rows = [{"feature": "rain", "count": 12345, "mean": 0.000123456, "share": None}]
    assert json.loads(render(rows, "json")) == rows
    assert render(rows, "csv") == "feature,count,mean,share\nrain,12345,0.000123456,"
    text = render(rows, "table")
    assert all(part in text for part in ("feature", "12,345", "0.0001235", "–"))
