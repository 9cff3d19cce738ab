from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from sensitivity.errors import Refused, RefusedTogether
from sensitivity.job import Job
from sensitivity.sections import parse_bytes

MINIMAL = {"model": {"path": "a.b:c"}, "series": {"path": "x.csv"}, "run": {"path": "runs/x"}}


def parse(**sections):
    content = {name: dict(section) for name, section in MINIMAL.items()}
    for name, section in sections.items():
        content[name] = {**content.get(name, {}), **section} if isinstance(section, dict) else section
    return Job.parse(content, Path("/jobs"))


def test_defaults_and_paths_relative_to_the_job_file():
    job = parse()
    assert (job.series.path, job.run.path, job.model.path) == ("/jobs/x.csv", "/jobs/runs/x", "a.b:c")
    assert job.windows.stride == 1
    assert job.windows.length is None
    assert job.run.dtype == "float32"
    assert job.run.memory_bytes is None


@pytest.mark.parametrize(
    ("sections", "key", "part"),
    [
        ({"windows": {"lenght": 3}}, "windows.lenght", "did you mean 'length'"),
        ({"foo": {"x": 1}}, "foo", "model, series, windows, sensitivity, run"),
        ({"directory": "/x"}, "directory", "unknown key"),
        ({"windows": {"length": "20"}}, "windows.length", "a whole number"),
        ({"windows": {"length": 20.0}}, "windows.length", "a whole number"),
        ({"windows": {"length": 0}}, "windows.length", "1 or more"),
        ({"windows": {"stride": True}}, "windows.stride", "a whole number"),
        ({"series": {"features": []}}, "series.features", "at least one"),
        ({"series": {"features": ["a", "a"]}}, "series.features", "more than once"),
        ({"series": {"features": ["a", 3]}}, "series.features[1]", "a text in quotes"),
        ({"series": {"features": ["a", "t"], "time": "t"}}, "series.features", "time column"),
        ({"series": {"scaling": {"mean": [0.0], "std": [0.0]}}}, "series.scaling.std[0]", "more than 0"),
        ({"series": {"scaling": {"mean": [0.0], "std": [1.0, 2.0]}}}, "series.scaling", "one mean and one std"),
        ({"series": {"scaling": {"mean": [0.0], "std": [float("nan")]}}}, "series.scaling.std[0]", "finite"),
        (
            {"series": {"features": ["a", "b"], "scaling": {"mean": [0.0], "std": [1.0]}}},
            "series.scaling",
            "2 features",
        ),
        ({"sensitivity": {"kernel": "scam"}}, "sensitivity.kernel", '"gradient"'),
        ({"sensitivity": {"product": "curl"}}, "sensitivity.product", '"jacobian", "vjp"'),
        ({"sensitivity": {"vectors": ["sum"]}}, "sensitivity.vectors", "with vjp alone"),
        ({"sensitivity": {"product": "vjp", "vectors": "v.csv"}}, "sensitivity.vectors", ".npy"),
        ({"sensitivity": {"product": "jvp", "directions": ["a", "a"]}}, "sensitivity.directions", "each once"),
        ({"sensitivity": {"product": "hvp", "directions": 3}}, "sensitivity.directions", "a list of features"),
        ({"sensitivity": {"windows_per_call": 0}}, "sensitivity.windows_per_call", "1 or more"),
        ({"sensitivity": {"experimental_use_pfor": 1}}, "sensitivity.experimental_use_pfor", "true or false"),
        (
            {"sensitivity": {"kernel": "gradient", "experimental_use_pfor": True}},
            "sensitivity.kernel",
            "batch_jacobian",
        ),
        (
            {"sensitivity": {"experimental_use_pfor": True, "parallel_iterations": 1}},
            "sensitivity.parallel_iterations",
            "2 or more",
        ),
        ({"run": {"workers": 3.5}}, "run.workers", "a whole number"),
        ({"run": {"workers": "many"}}, "run.workers", '"auto"'),
        ({"run": {"gpus_per_worker": -1.0}}, "run.gpus_per_worker", "0"),
        ({"run": {"gpus_per_worker": 1.5}}, "run.gpus_per_worker", "fraction"),
        ({"run": {"memory_per_worker": "4 apples"}}, "run.memory_per_worker", "4GB"),
        ({"run": {"dtype": "float16"}}, "run.dtype", '"float64"'),
        ({"series": {"path": "ftp://host/x.zarr"}}, "series.path", "s3://"),
        ({"run": {"path": 3}}, "run.path", "a text in quotes"),
        ({"model": {}, "run": "x"}, "run", "a table"),
    ],
)
def test_a_bad_value_is_refused_by_its_key(sections, key, part):
    with pytest.raises(Refused) as refusal:
        parse(**sections)
    assert refusal.value.key == key
    assert part in str(refusal.value)


def test_a_missing_key_is_named():
    with pytest.raises(Refused) as refusal:
        Job.parse({"model": {}, "series": {"path": "x.csv"}, "run": {"path": "r"}}, Path("/jobs"))
    assert refusal.value.key == "model.path"


def test_everything_wrong_is_said_at_once():
    with pytest.raises(RefusedTogether) as refusal:
        parse(windows={"length": 0, "strid": 2})
    assert {one.key for one in refusal.value.refusals} == {"windows.length", "windows.strid"}


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("job.toml", "[model", "job file"),
        ("job.toml", None, "job file"),
    ],
)
def test_an_unreadable_job_file_is_refused(tmp_path, name, content, key):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(Refused) as refusal:
        Job.load(tmp_path / name)
    assert refusal.value.key == key


@pytest.mark.parametrize(
    ("files", "model", "series", "key"),
    [
        ([], "m.keras", "s.csv", "model.path"),
        (["m.keras"], "m.keras", "s.csv", "series.path"),
        (["m.h5", "s.csv"], "m.h5", "s.csv", "model.path"),
        (["saved/x", "s.csv"], "saved", "s.csv", "model.path"),
        (["m.keras", "s.txt"], "m.keras", "s.txt", "series.path"),
        (["m.keras", "s.csv", "run"], "m.keras", "s.csv", "run.path"),
    ],
)
def test_missing_and_foreign_files_are_refused(tmp_path, files, model, series, key):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "job.toml").write_text(f'model.path = "{model}"\nseries.path = "{series}"\nrun.path = "run"\n')
    with pytest.raises(Refused) as refusal:
        Job.load(tmp_path / "job.toml")
    assert refusal.value.key == key


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4_000_000_000), ("512MiB", 512 << 20), ("1.5 kB", 1500), ("7B", 7), ("2tb", 2 * 10**12)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4", "0GB", "-1GB", "GB", "1e9B", "4 GB 2"])
def test_what_is_no_size(text):
    with pytest.raises(Refused):
        parse_bytes(text)


def test_refusals_survive_pickling():
    one = Refused("a.b", given=1, allowed="2", remedy="3")
    both = RefusedTogether([one, one])
    assert str(pickle.loads(pickle.dumps(one))) == str(one)
    assert str(pickle.loads(pickle.dumps(both))) == str(both)
