"""A panel of many sites through the whole job: as if each site were run by itself, and selectable by name."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from click.testing import CliRunner
from keras import layers

import sensitivity
from jobs.cli import main
from jobs.driver import How, resume, run_job
from sensitivity import query
from sensitivity.checksums import SEAL
from sensitivity.commits import forget, read_commits
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.store import Run, job_seal
from tests.conftest import cut, frame, sequential, tape_jacobian, worst
from tests.jobs.conftest import KNOBS, contents

SITES = {"01013500": 70, "NA": 4, "Isar, oben": 45}
LENGTH, STRIDE = 6, 2


def tables() -> dict[str, pd.DataFrame]:
    found = {name: frame(steps, seed=i) for i, (name, steps) in enumerate(SITES.items())}
    for i, table in enumerate(found.values()):
        table["time"] += pd.Timedelta(minutes=30 * i)  # no unit of the first site's serves the others
    found["01013500"].loc[20, "rain"] = np.nan
    return found


def together() -> pd.DataFrame:
    return pd.concat([table.assign(site=name) for name, table in tables().items()], ignore_index=True)


@pytest.fixture
def model():
    return sequential((LENGTH, 2), layers.GRU(4), layers.Dense(1))


def job(write_job, model, form: str = "csv", mixed: bool = False) -> Job:
    table = together()
    if mixed:
        table = table.iloc[np.argsort(table.groupby("site").cumcount(), kind="stable")]
    file = write_job(
        model,
        series={"path": f"series.{form}", "features": ["rain", "heat"]},
        windows={"stride": STRIDE},
        sensitivity=KNOBS,
        run={"shard_windows": 10},
    )
    if form == "parquet":
        table.to_parquet(file.parent / "series.parquet", row_group_size=16)
    else:
        table.to_csv(file.parent / "series.csv", index=False)
    return Job.load(file)


def expected_jacobian(model, table: pd.DataFrame) -> np.ndarray:
    return tape_jacobian(model, cut(table[["rain", "heat"]].to_numpy("float32"), LENGTH, STRIDE))


@pytest.mark.parametrize(("form", "mixed"), [("csv", True), ("parquet", False)])
def test_a_panel_is_its_sites_one_by_one(write_job, model, form, mixed):
    summary = run_job(job(write_job, model, form, mixed), How(serial=True))
    assert summary.complete
    assert summary.run.content["ingested"] == (form == "csv")
    assert summary.run.layout.shard_count == 6  # of which one holds windows of two sites
    dataset = sensitivity.open_run(summary.run.place.path)
    plain = xr.open_zarr(summary.run.results)
    assert plain["site"].dims == ("time",)
    np.testing.assert_array_equal(plain["site"], dataset["site"])
    for name, table in tables().items():
        if len(table) < LENGTH:
            assert name not in dataset["site"].values
            continue
        own, reference = dataset.sel(site=name), expected_jacobian(model, table)
        last = table["time"].to_numpy()[LENGTH - 1 :: STRIDE]
        np.testing.assert_array_equal(own["time"], last[: len(reference)])
        skipped = np.isnan(reference).any(axis=(1, 2, 3))
        np.testing.assert_array_equal(own["skipped"], skipped)
        assert np.isnan(own["jacobian"].values[skipped]).all()
        assert worst(own["jacobian"].values[~skipped, 0], reference[~skipped]) < 1e-5
    some = dataset.sel(site="Isar, oben").sel(time=slice("2020-01-01 12:00", "2020-01-02"))
    assert 0 < some.sizes["time"] < 20


def test_sites_that_come_mixed_give_the_bytes_of_sites_that_come_apart(write_job, model, tmp_path):
    run_job(job(write_job, model, mixed=True), How(serial=True))
    (tmp_path / "run").rename(tmp_path / "mixed")
    run_job(job(write_job, model, "parquet"), How(serial=True))
    assert contents(tmp_path / "run") == contents(tmp_path / "mixed")


def test_a_panel_on_ray_is_resumed_to_the_serial_bytes(write_job, model, ray_session, tmp_path):
    wanted = job(write_job, model)
    run_job(wanted, How(serial=True))
    before = contents(tmp_path / "run")
    for index in (0, 3, 5):
        forget(Run.open(tmp_path / "run"), index)
    again = resume(tmp_path / "run", How())
    assert again.complete
    assert again.done - again.already == 3
    assert len(read_commits(again.run)) == 6
    assert contents(tmp_path / "run") == before


def test_query_and_plot_tell_sites_apart(write_job, model, tmp_path):
    wanted = job(write_job, model)
    run_job(wanted, How(serial=True))
    run = str(tmp_path / "run")
    asked = ["query", run, "lag-profile", "--format", "json"]
    runner = CliRunner()
    pooled = json.loads(runner.invoke(main, asked).stdout)
    assert "site" not in pooled[0]
    rows = json.loads(runner.invoke(main, [*asked, "--site", "Isar, oben", "--site", "01013500"]).stdout)
    assert next(iter(rows[0])) == "site"
    assert list(dict.fromkeys(row["site"] for row in rows)) == ["Isar, oben", "01013500"]
    for row in rows:
        reference = expected_jacobian(model, tables()[row["site"]])
        entries = reference[:, 0, LENGTH - 1 - row["lag"], ["rain", "heat"].index(row["feature"])]
        known = entries[np.isfinite(reference).all(axis=(1, 2, 3))]
        assert row["count"] == len(known)
        assert row["mean"] == pytest.approx(known.mean(), abs=1e-6)
    both = query.of_sites(query.importance, sensitivity.open_run(run), ["01013500", "Isar, oben"])
    assert both["importance"].dims[0] == "site"
    refused = runner.invoke(main, [*asked, "--site", "NA"])
    assert refused.exit_code == 2
    assert "01013500, Isar, oben" in refused.stderr
    picture = tmp_path / "one.svg"
    assert runner.invoke(main, ["plot", run, "heatmap", "-o", str(picture), "--site", "01013500"]).exit_code == 0
    assert "30 of 33 windows" in picture.read_text()


def test_a_site_of_one_window_is_a_slice_like_any_other(write_job, tmp_path):
    model = sequential((LENGTH, 2), layers.GRU(4, return_sequences=True), layers.Dense(1))
    knobs = {"kernel": "scan", "windows_per_call": 2}
    file = write_job(model, sensitivity=knobs, series={"features": ["rain", "heat"]})
    parts = {"z": frame(9), "one": frame(LENGTH, seed=1), "a": frame(8, seed=2)}
    table = pd.concat([part.assign(site=name) for name, part in parts.items()])
    table.to_csv(tmp_path / "series.csv", index=False)
    run_job(Job.load(file), How(serial=True))
    dataset = sensitivity.open_run(tmp_path / "run")
    for name, windows in (("z", 4), ("one", 1), ("a", 3)):
        own = query.of_site(dataset, name)
        assert own.sizes["time"] == windows
        assert own["jacobian"].dims == dataset["jacobian"].dims
        assert set(own["site"].values) == {name}
    asked = ["query", str(tmp_path / "run"), "lag-profile", "--format", "json", "--site", "one", "--site", "z"]
    rows = json.loads(CliRunner().invoke(main, asked).stdout)
    reference = tape_jacobian(model, parts["one"][["rain", "heat"]].to_numpy("float32")[None])
    for row in rows[: LENGTH * LENGTH * 2]:
        step, feature = row["output_step"] - row["lag"], ["rain", "heat"].index(row["feature"])
        assert (row["site"], row["count"]) == ("one", int(step >= 0))  # else the lag is before the window
        if step >= 0:
            assert row["mean"] == pytest.approx(reference[0, row["output_step"], 0, step, feature], abs=1e-6)


def test_a_run_begun_before_there_were_sites_goes_on(write_job, model, tmp_path):
    table = together().iloc[:70].drop(columns=["heat", "time"]).assign(site=np.arange(70.0))
    columns = {name: ("time", table[name].to_numpy()) for name in table}
    xr.Dataset(columns).to_zarr(tmp_path / "series.zarr", consolidated=False)
    series = {"path": "series.zarr", "time": None, "features": ["rain", "site"]}
    run_job(Job.load(write_job(model, series=series, sensitivity=KNOBS, run={"shard_windows": 10})), How(serial=True))
    run = Run.open(tmp_path / "run")
    before = contents(tmp_path / "run")
    content = json.loads((tmp_path / "run" / "job.json").read_text())
    del content["survey"]["sites"], content["survey"]["grouped"], content["job"]["series"]["site"]
    content["job"]["series"]["features"] = None
    content[SEAL] = job_seal({key: value for key, value in content.items() if key != SEAL})
    (tmp_path / "run" / "job.json").write_text(json.dumps(content))
    forget(run, 3)
    assert resume(tmp_path / "run", How(serial=True)).complete
    assert contents(tmp_path / "run") == before


def test_a_run_without_sites_has_none_to_ask_for(write_job, tmp_path):
    run_job(Job.load(write_job()), How(serial=True))
    dataset = sensitivity.open_run(tmp_path / "run")
    assert "site" not in dataset.coords
    with pytest.raises(Refused, match="the series has no sites"):
        query.of_site(dataset, "a")


def test_labels_of_sites_are_verified_and_restored(write_job, model, tmp_path):
    run_job(job(write_job, model), How(serial=True))
    run, runner = tmp_path / "run", CliRunner()
    before = contents(run)
    assert runner.invoke(main, ["verify", str(run)]).exit_code == 0
    shutil.rmtree(run / "results.zarr" / "site")
    (run / "series.zarr" / "site" / "c" / "0").write_bytes(b"damage")
    assert runner.invoke(main, ["verify", str(run)]).exit_code == 1
    runner.invoke(main, ["verify", "--repair", str(run)])
    assert runner.invoke(main, ["verify", str(run)]).exit_code == 0
    assert contents(run) == before


def test_another_series_under_the_same_name_is_another_run(write_job, model, tmp_path):
    wanted = job(write_job, model, "parquet")
    run_job(wanted, How(serial=True))
    renamed = together().replace({"site": {"NA": "NB"}})
    renamed.to_parquet(tmp_path / "series.parquet", row_group_size=16)
    with pytest.raises(Refused, match="series content"):
        run_job(wanted, How(serial=True))
    with pytest.raises(Refused, match="has changed since the run began"):
        resume(tmp_path / "run", How(serial=True))


def test_rows_that_were_mixed_since_are_not_read_as_if_they_stood_together(write_job, model, tmp_path):
    """Sites, times and values are the same; where they stand is not."""
    wanted = job(write_job, model, "parquet")
    run_job(wanted, How(serial=True))
    forget(Run.open(tmp_path / "run"), 0)
    job(write_job, model, "parquet", mixed=True)
    for again in (lambda: run_job(wanted, How(serial=True)), lambda: resume(tmp_path / "run", How(serial=True))):
        with pytest.raises(Refused, match="has changed since the run began"):
            again()


@pytest.mark.parametrize(("form", "where"), [("csv", "copied into the run directory"), ("parquet", "read where it is")])
def test_plan_counts_sites_and_says_where_workers_read(write_job, model, tmp_path, form, where):
    job(write_job, model, form)
    answer = CliRunner().invoke(main, ["plan", str(tmp_path / "job.toml")])
    assert "sites            3, of which 1 is shorter than a window" in answer.stdout
    assert where in answer.stdout
