"""README is true: its job file is a job, its commands run, its Python runs, in the order they stand there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from keras import layers

from jobs.cli import main
from tests.conftest import frame, sequential

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found
    return found.group(1)


def test_the_readme_from_job_file_to_dask(tmp_path, ray_session, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("soil.toml").write_text(block("toml"))
    features = tomllib.loads(block("toml"))["series"]["features"]
    model = sequential((20, 2), layers.LSTM(3), layers.Dense(1))
    model.save("soil.keras")
    frame(200, tuple(features)).assign(site="01013500").to_csv("weather.csv", index=False)

    commands = re.findall(r"^    sensitivity (.+?)(?:  +#.*)?$", README, re.MULTILINE)
    names = [command.split()[0] for command in commands]
    reading = ["query", "query", "top", "compare", "plot", "recurrent", "report"]
    assert names == ["plan", "run", "submit", "resume", "status", "verify", *reading]
    for command in commands:
        if command.startswith("submit "):  # needs a cluster: tests/jobs/test_submit.py runs it on one
            continue
        result = CliRunner().invoke(main, shlex.split(command))
        assert result.exit_code == 0, result.output
    assert Path("heatmap.png").exists()
    assert Path("soil.html").exists()

    known = {"model": model, "windows": np.zeros((4, 20, 2), "float32")}
    exec(block("python"), known)
    assert known["ds"]["committed"].all()
    assert known["j"].shape == (4, 1, 20, 2)
