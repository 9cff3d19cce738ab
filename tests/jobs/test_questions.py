"""What the command line answers to those who ask in vain, or stop listening."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from jobs.cli import main
from jobs.driver import How, run_job
from sensitivity.job import Job
from tests.conftest import job_writer
from tests.jobs.conftest import KNOBS


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    file = job_writer(folder)(sensitivity=KNOBS, run={"shard_windows": 20})
    run_job(Job.load(file), How(serial=True))
    return folder / "run"


def asked(*arguments: object):
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["mean", "--between", "a", "b"], "by is refused"),
        (["mean", "--ci", "0.9", "--seed", "-1"], "seed is refused"),
        (["trend", "--by", "hour", "--between", "1", "2"], "--between is refused"),
        (["mean", "--where", "_quoted_0_ > 1"], "where is refused"),
    ],
)
def test_mistakes_are_not_taken_for_damage(run, more, said):
    found = asked("query", run, *more)
    assert found.exit_code == 2
    assert said in found.stderr


def test_damage_is_told_as_such(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    chunks = [one for one in (tmp_path / "run/results.zarr/jacobian").rglob("*") if one.is_file()]
    for one in chunks:
        if one.name != "zarr.json":
            one.write_bytes(b"torn" * 10)
    found = asked("query", tmp_path / "run", "mean")
    assert found.exit_code == 2
    assert "verify" in found.stderr


def test_a_table_of_top_windows_needs_no_series(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/series.zarr")
    assert asked("top", tmp_path / "run", "--format", "csv").stdout.startswith("rank,time,")
    assert asked("top", tmp_path / "run", "--format", "json").exit_code != 0


def test_missing_values_of_a_column_are_no_group_in_json(run, tmp_path):
    (tmp_path / "columns.csv").write_text("time,regime\n2020-01-01 12:00:00,1\n2020-01-01 13:00:00,2\n")
    found = asked("query", run, "mean", "--columns", tmp_path / "columns.csv", "--by", "regime", "--format", "json")
    assert {row["regime"] for row in json.loads(found.stdout)} == {1.0, 2.0}
