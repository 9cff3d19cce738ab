"""What goes along with a job, as data: which files, what its job file says there, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import sensitivity
from jobs import parcel
from jobs.parcel import FILES, JOB_FILE, our_code, pack, pinned, toml
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.plan import human_bytes


@pytest.fixture
def folder(tmp_path) -> Path:
    """A job's directory, in which nothing is what it says, but for its name."""
    for name in ("model.keras", "series.csv"):
        (tmp_path / name).write_bytes(b"x" * 10)
    return tmp_path


def job(folder: Path, **sections) -> Job:
    """sections: a path, or keys."""
    content = {"model": {"path": "model.keras"}, "series": {"path": "series.csv"}, "run": {"path": "s3://bucket/run"}}
    for name, given in sections.items():
        content.setdefault(name, {}).update(given if isinstance(given, dict) else {"path": given})
    return Job.parse(content, folder)


def names(packed: parcel.Parcel) -> list[str]:
    return [item.name for item in packed.items]


def put(folder: Path, *files: str, size: int = 1) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"#" * size)


def test_local_files_go_along_and_the_job_file_names_them_where_they_come_to_lie(folder, tmp_path_factory):
    packed = pack(job(folder))
    assert sorted(names(packed)) == [f"{FILES}/model/model.keras", f"{FILES}/series/series.csv"]
    assert packed.takes_series
    there = tmp_path_factory.mktemp("there")
    packed.write(there)
    assert (there / FILES / "series" / "series.csv").read_bytes() == b"x" * 10
    Job.load(there / JOB_FILE, elsewhere=["s3://bucket"])


def test_arrays_that_a_product_is_made_of_go_along(folder, tmp_path_factory):
    put(folder, "arrays/d.npy")
    packed = pack(job(folder, sensitivity={"product": "jvp", "directions": "arrays/d.npy"}))
    assert f"{FILES}/directions/d.npy" in names(packed)
    there = tmp_path_factory.mktemp("there")
    packed.write(there)
    asked = Job.load(there / JOB_FILE, elsewhere=["s3://bucket"]).sensitivity
    assert asked.directions == str(there / FILES / "directions" / "d.npy")
    rules = job(folder, sensitivity={"product": "vjp", "vectors": ["sum", "last"]})
    assert Job.parse(tomllib.loads(pack(rules).text), folder).sensitivity.vectors == ("sum", "last")


def test_what_the_cluster_sees_stays_where_it_is(folder):
    urls = job(folder, model="gs://bucket/m.keras", series="s3://bucket/s.zarr")
    assert pack(urls).items == ()
    assert not pack(urls).takes_series
    mounted = job(folder, model="/lab/m.keras", series="/lab/s.csv", run="/lab/runs/a")
    assert pack(mounted, ["/lab"]).items == ()
    assert Job.parse(tomllib.loads(pack(mounted, ["/lab/"]).text), Path("/elsewhere")) == mounted.model_copy(
        update={"directory": "/elsewhere"}
    )


def test_what_only_the_cluster_sees_is_not_looked_for_here(folder):
    text = toml({"model": {"path": "/lab/m.keras"}, "series": {"path": "/lab/s.csv"}, "run": {"path": "/lab/run"}})
    (folder / "job.toml").write_text(text)
    assert Job.load(folder / "job.toml", elsewhere=["/lab"]).series.path == "/lab/s.csv"
    with pytest.raises(Refused, match="no such file"):
        Job.load(folder / "job.toml", elsewhere=["/lab/m.keras", "/la"])
    (folder / "job.toml").write_text(text.replace("s.csv", "s.xlsx"))
    with pytest.raises(Refused, match=r"series\.path"):
        Job.load(folder / "job.toml", elsewhere=["/lab"])


ODD = 'a "b" \\ ü 𝄞 \x7f \t \x01 \n\' #'


@pytest.mark.parametrize(
    "sections",
    [
        {"series": {"time": ODD, "features": [ODD + "2", "x"], "scaling": {"mean": [1e-30, -0.0], "std": [1e22, 3.0]}}},
        {"windows": {"length": 20, "stride": 3}, "sensitivity": {"output_steps": "::24", "outputs": ["flow", 2]}},
        {"sensitivity": {"output_steps": [0, -1], "max_lag": 0, "experimental_use_pfor": False, "of": ODD}},
        {"run": {"workers": 4, "gpus_per_worker": 0.25, "memory_per_worker": "4GB", "dtype": "float64"}},
        {"run": {"path": "az://bucket/" + "ü"}},
    ],
)
def test_the_job_is_the_same_there(folder, sections):
    here = job(folder, **sections)
    there = Job.parse(tomllib.loads(pack(here).text), folder)
    assert there.model.path == str(folder / FILES / "model" / "model.keras")
    same = {"model": here.model, "series": there.series.model_copy(update={"path": here.series.path})}
    assert there.model_copy(update=same) == here


def test_a_zarr_goes_along_whole_hidden_files_and_links_too(folder):
    put(folder, "store/.zgroup", "store/rain/.zarray", "chunks/0.0")
    (folder / "store" / "rain" / "c").symlink_to(folder / "chunks")
    (folder / "chunks" / "circle").symlink_to(folder / "store")
    (folder / "weather.zarr").symlink_to(folder / "store")
    packed = pack(job(folder, model="s3://b/m.keras", series="weather.zarr"))
    inside = [".zgroup", "rain/.zarray", "rain/c/0.0"]
    assert names(packed) == [f"{FILES}/series/weather.zarr/{name}" for name in inside]
    assert f'path = "{FILES}/series/weather.zarr"' in packed.text


def test_a_package_goes_along_without_what_is_no_code(folder):
    put(folder, "nets/__init__.py", "nets/deep/lstm.py", "nets/deep/weights.h5", "nets/jobs.py")
    put(folder, "nets/.git/config", "nets/__pycache__/x.pyc", "nets/old.pyc", "nets/venv/pyvenv.cfg", "nets/venv/a.py")
    put(folder, "nets/run/job.json", "nets/run/results.zarr/zarr.json", "nets/settings/job.json")
    put(folder, "helper.py", ".hidden.py", "other/__init__.py", "notes.txt", "jobs.py")
    put(folder, "nets/huge.csv", size=parcel.BULKY + 1)
    packed = pack(job(folder, model="nets.deep.lstm:build", series="s3://b/s.zarr"))
    assert names(packed) == [
        *("nets/__init__.py", "nets/deep/lstm.py", "nets/deep/weights.h5", "nets/jobs.py", "nets/settings/job.json"),
        "helper.py",
    ]
    assert "nets.deep.lstm:build" in packed.text
    [note] = packed.notes
    assert f"--code {folder / 'nets' / 'huge.csv'}" in note


def test_a_module_and_those_beside_it_go_along_and_what_was_asked_for(folder, tmp_path_factory):
    put(folder, "net.py", "helper.py")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    put(elsewhere, "shared_layers/__init__.py", "one.py")
    asked = [elsewhere / "shared_layers", elsewhere / "one.py"]
    packed = pack(job(folder, model="net:build", series="s3://b/s.zarr"), code=asked)
    assert sorted(names(packed)) == ["helper.py", "net.py", "one.py", "shared_layers/__init__.py"]
    assert packed.notes == ()


def test_a_module_that_would_hide_one_of_pythons_own_goes_along_only_if_asked_for(folder):
    put(folder, "net.py", "calendar.py", "signal.py", "nets/signal.py")
    model = job(folder, model="net:build", series="s3://b/s.zarr")
    packed = pack(model, code=[folder / "signal.py", folder / "nets"])
    assert sorted(names(packed)) == ["net.py", "nets/signal.py", "signal.py"]
    [note] = packed.notes
    assert f"--code {folder / 'calendar.py'}" in note


def test_an_installed_module_must_be_there(folder):
    put(folder, "helper.py")
    packed = pack(job(folder, model="lab_models:build", series="s3://b/s.zarr"))
    assert packed.items == ()
    assert "the cluster must have it installed" in packed.notes[0]


@pytest.mark.parametrize("run", ["runs/a", "/labs/a", "~/runs"])
def test_a_run_directory_on_the_heads_own_disk_is_refused(folder, run):
    with pytest.raises(Refused, match=r"(?s)run\.path is refused.*--shared"):
        pack(job(folder, run=run), ["/lab"])


def test_too_much_is_refused_with_each_files_size(folder, monkeypatch):
    monkeypatch.setattr(parcel, "LIMIT", 1000)
    put(folder, "weather.zarr/a", "weather.zarr/b", size=450)
    put(folder, "model.keras", size=101)
    with pytest.raises(Refused) as refused:
        pack(job(folder, series="weather.zarr"))
    assert f"{folder}/weather.zarr ({human_bytes(900)})" in str(refused.value)
    assert f"{folder}/model.keras ({human_bytes(101)})" in str(refused.value)
    assert "--shared" in str(refused.value)
    put(folder, "model.keras", size=100)
    assert len(pack(job(folder, series="weather.zarr")).items) == 3


def test_code_of_one_name_or_of_our_name_is_refused(folder):
    put(folder, "a/net.py", "b/net.py", "sensitivity.py")
    with pytest.raises(Refused, match="different names"):
        pack(job(folder), code=[folder / "a" / "net.py", folder / "b" / "net.py"])
    with pytest.raises(Refused, match="rename the module"):
        pack(job(folder, model="sensitivity:build"))


def test_our_own_code_goes_along_as_it_runs():
    found = {item.name: item.source for item in our_code()}
    assert found["sensitivity/__init__.py"] == Path(sensitivity.__file__)
    assert {"jobs/cli.py", "sensitivity/kernels/__init__.py", "jobs/data/README.md"} <= set(found)
    assert not [name for name in found if "__pycache__" in name]


def test_what_we_depend_on_is_pinned_but_for_ray():
    found = dict(text.split("==") for text in pinned())
    import numpy

    assert found["numpy"] == numpy.__version__
    assert "dask[array]" in found
    assert not {"ray", "ray[default]", "pytest"} & set(found)
