"""The demo whole, but for the training: one epoch of it."""

from __future__ import annotations

import re
import runpy

import xarray as xr

from jobs import demo
from jobs.cli import main
from sensitivity.progress import progress
from tests.jobs.conftest import call


def test_demo(tmp_path, ray_session, monkeypatch, capfd):
    monkeypatch.setattr(demo, "EPOCHS", 1)
    result = call("demo", tmp_path / "demo")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"the model explains -?\d+% of the squared change", result.stderr)
    for title in ("Importance: mean", "Lag profile: the same by lag"):
        assert title in result.stdout
    pictures = {file.name for file in (tmp_path / "demo").glob("*.png")}
    assert pictures == {"lag-profile.png", "heatmap.png"}
    assert "26,264 windows" in (tmp_path / "demo" / "report.html").read_text()
    assert f"written: {tmp_path / 'demo' / 'report.html'}" in result.stderr
    dataset = xr.open_zarr(tmp_path / "demo" / "runs" / "soil" / "results.zarr")
    assert dataset["jacobian"].shape == (26_285, 1, 1, 20, 9)
    assert int(dataset["skipped"].sum()) == 21
    assert (dataset["jacobian"].isnull().all(["output_step", "output", "lag", "feature"]) == dataset["skipped"]).all()
    commands = re.findall(r"^  sensitivity (.+)$", result.stderr, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert call(*command.split()).exit_code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["soil_moisture", "demo/runs/soil"])
    capfd.readouterr()
    runpy.run_module("jobs.examples.soil_moisture")
    told = capfd.readouterr().out
    for part in ("All 26,285 windows are done", "half of |J| within", "by season", "less where it is dry", "by night"):
        assert part in told
    assert "NaN" not in told
    assert {file.name for file in tmp_path.glob("*.svg")} == {"lag-profile.svg", "heatmap.svg", "month-lag.svg"}
    again = call("demo", tmp_path / "demo")
    assert again.exit_code == 0
    assert "12 of 12 shards are committed" in again.stderr


def test_demo_needs_a_directory(tmp_path):
    (tmp_path / "file").touch()
    assert call("demo", tmp_path / "file").exit_code == 2
    assert main.name == "main"


def test_progress_on_a_terminal_has_rate_and_time_left(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress(100, 20) as advance:
        advance(80, 0.0)
    shown = capsys.readouterr().err
    assert "100/100" in shown
    assert "windows/s" in shown
