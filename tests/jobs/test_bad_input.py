"""What cannot be served is refused with exit status 2 by the name of its culprit, and nothing of it is left."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from keras import layers

from tests.conftest import FEATURES, frame, sequential
from tests.jobs.bad_files import GARBAGE, content, directory, locked, members, save, with_config, with_part, without
from tests.jobs.bad_series import SERIES, TIMED
from tests.jobs.conftest import call

SECTIONS = {
    "model": 'path = "model.keras"',
    "series": 'path = "series.csv"\ntime = "time"',
    "run": 'path = "run"',
}


def job(**sections: str) -> str:
    """A job file with other sections, or with lines added to those that begin with a line break."""
    found = {name: SECTIONS.get(name, "") + text if text[:1] == "\n" else text for name, text in sections.items()}
    return "".join(f"[{name}]\n{text}\n" for name, text in {**SECTIONS, **found}.items())


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> bytes:
    """A small model's file."""
    file = tmp_path_factory.mktemp("good") / "model.keras"
    sequential((6, len(FEATURES)), layers.Flatten(), layers.Dense(4, "tanh"), layers.Dense(1)).save(file)
    return file.read_bytes()


@pytest.fixture
def home(tmp_path, archive, monkeypatch) -> Path:
    """A folder with all that a job needs but its job file."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "model.keras").write_bytes(archive)
    save(frame(60), tmp_path / "series.csv")
    return tmp_path


def refuse(home: Path, *culprits: str) -> None:
    before = sorted(home.rglob("*"))
    result = call("run", home / "job.toml", "--serial")
    assert result.exit_code == 2, result.stderr
    for culprit in culprits:
        assert culprit in result.stderr
    assert all(word in result.stderr for word in ("is refused", "given", "allowed", "do  "))
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 4000  # a screen
    assert result.stderr.replace("\n", "").isprintable()
    assert result.stdout == ""
    assert sorted(home.rglob("*")) == before


JOB_FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "model is refused"),
    "garbage": (GARBAGE, "not UTF-8"),
    "UTF-16": (job().encode("utf-16"), "not UTF-8"),
    "byte-order mark": ("\ufeff" + job(), "job file"),
    "NUL": (job() + "\0", "job file"),
    "torn": (job()[:-3], "job.toml: "),
    "no TOML": ("model: {path: model.keras}", "at line 1"),
    "JSON": ('{"model": {"path": "model.keras"}}', "at line 1"),
    "key twice": (job(run='path = "run"\npath = "walk"'), "job file"),
    "table twice": (job() + "[run]\n", "job file"),
    "array of tables": (job().replace("[run]", "[[run]]"), "run is refused"),
    "sections as a list": ("model = []\nseries = []\nrun = []\n", "run is refused"),
    "nested without end": ("model = " + "[" * 5000 + "]" * 5000, "job file"),
    "a number of 5000 digits": (job(windows="length = " + "9" * 5000), "job file"),
    "no model": ("[series]\npath = 'series.csv'\n[run]\npath = 'run'", "model is refused"),
    "unknown section": (job(window="length = 3"), "did you mean 'windows'"),
    "unknown key": (job(run='path = "run"\nworker = 2'), "did you mean 'workers'"),
    "key in other letters": (job(run='path = "run"\nWorkers = 2'), "run.Workers"),
    "key with a letter that looks alike": (job(run='path = "run"\n"w\u043erkers" = 2'), "run.w\u043erkers"),
    "empty key": (job(run='path = "run"\n"" = 2'), "run."),
    "date for a number": (job(windows="length = 2024-01-31"), "windows.length"),
    "time for a number": (job(run="\nworkers = 07:32:00"), "run.workers"),
    "truth for a number": (job(windows="stride = true"), "windows.stride"),
    "text for a number": (job(windows='length = "6"'), "windows.length"),
    "NaN": (job(windows="length = nan"), "windows.length"),
    "infinite": (job(run="\ngpus_per_worker = inf"), "run.gpus_per_worker"),
    "huge length": (job(windows="length = " + "9" * 30), "windows.length"),
    "length beyond 64 bits": (job(windows=f"length = {2**63}"), "windows.length"),
    "negative": (job(windows="length = -6"), "windows.length"),
    "no windows": (job(windows="length = 0"), "windows.length"),
    "no stride": (job(windows="stride = 0"), "windows.stride"),
    "huge stride": (job(windows=f"stride = {10**30}"), "windows.stride"),
    "hexadecimal number of 5000 digits": (job(windows="stride = 0x" + "f" * 5000), "job file"),
    "huge cores": (job(run=f"\ncpus_per_worker = {10**30}"), "run.cpus_per_worker"),
    "huge workers": (job(run=f"\nworkers = {10**30}"), "run.workers"),
    "huge memory": (job(run=f'\nmemory_per_worker = "{"9" * 400}TB"'), "run.memory_per_worker"),
    "no memory": (job(run='\nmemory_per_worker = ""'), "run.memory_per_worker"),
    "memory as a number": (job(run="\nmemory_per_worker = 4"), "run.memory_per_worker"),
    "many GPUs": (job(run="\ngpus_per_worker = 1e300"), "run.gpus_per_worker"),
    "negative lag": (job(sensitivity="max_lag = -1"), "sensitivity.max_lag"),
    "slice of words": (job(sensitivity='output_steps = "first:last"'), "sensitivity.output_steps"),
    "slice of 5000 digits": (job(sensitivity=f'output_steps = "{"9" * 5000}:"'), "sensitivity.output_steps"),
    "step beyond the outputs": (job(sensitivity=f"output_steps = [{10**25}]"), "sensitivity.output_steps"),
    "step that is a date": (job(sensitivity="output_steps = [1979-05-27]"), "sensitivity.output_steps"),
    "no outputs": (job(sensitivity="outputs = []"), "sensitivity.outputs"),
    "outputs in a table": (job(sensitivity="outputs = {a = 1}"), "sensitivity.outputs"),
    "unknown output": (job(sensitivity='outputs = ["\u202eflow"]'), "sensitivity.outputs"),
    "unknown head": (job(sensitivity='of = ""'), "sensitivity.of"),
    "unknown kernel": (job(sensitivity='kernel = "Gradient"'), "sensitivity.kernel"),
    "dtype": (job(run='\ndtype = "float32 "'), "run.dtype"),
    "scaling not finite": (job(series="\nscaling = {mean = [nan, 0.0], std = [1.0, 1.0]}"), "series.scaling.mean[0]"),
    "scaling of text": (job(series='\nscaling = {mean = ["0", 0.0], std = [1.0, 1.0]}'), "series.scaling.mean[0]"),
    "scaling that overflows": (
        job(series="\nscaling = {mean = [0.0, 0.0], std = [1.0, 1e-320]}"),
        "'heat'",
    ),
    "scaling of half": (job(series="\nscaling = {mean = [0.0, 0.0]}"), "series.scaling.std"),
    "feature twice": (job(series='\nfeatures = ["rain", "rain"]'), "series.features"),
    "feature without a name": (job(series='\nfeatures = ["rain", ""]'), "series.features"),
    "feature with a line break": (job(series='\nfeatures = ["rain\\n", "heat"]'), "series.features"),
    "features in other letters": (job(series='\nfeatures = ["Rain", "heat"]'), "series.features"),
    "time without a name": (job(series='path = "series.csv"\ntime = ""'), "series.time"),
    "model without a path": (job(model='path = ""'), "model.path"),
    "series without a path": (job(series='path = ""'), "series.path"),
    "run without a path": (job(run='path = ""'), "run.path"),
    "run that is the job's folder": (job(run='path = "."'), "run.path"),
    "run that is the root": (job(run='path = "/"'), "run.path"),
    "run that is the series": (job(run='path = "series.csv"'), "run.path"),
    "run below a file": (job(run='path = "series.csv/run"'), "run.path"),
    "run path with NUL": (job(run='path = "run\\u0000"'), "run.path"),
    "model path with NUL": (job(model='path = "model\\u0000.keras"'), "model.path"),
    "series path with NUL": (job(series='path = "series\\u0000.csv"'), "series.path"),
    "run path too long": (job(run=f'path = "{"r" * 300}"'), "run.path"),
    "run path much too long": (job(run=f'path = "{"run/" * 2000}"'), "run.path"),
    "run path too long for its files": (job(run=f'path = "{"run/" * 990}"'), "too long for files below it"),
    "model path too long": (job(model=f'path = "{"m" * 300}.keras"'), "model.path"),
    "series path too long": (job(series=f'path = "{"s" * 300}.csv"'), "series.path"),
    "run in a pseudo file system": (job(run='path = "/proc/run"'), "run.path"),
    "nobody's home": (job(run='path = "~nobody-of-this-name/run"'), "run.path"),
    "run at a URL of another kind": (job(run='path = "ftp://host/run"'), "run.path"),
    "series at a URL without a bucket": (job(series='path = "s3://"'), "series.path"),
    "model at a URL without a bucket": (job(model='path = "s3:///model.keras"'), "model.path"),
    "series that is a device": (job(series='path = "/dev/zero"'), "series.path"),
    "model in another format": (job(model='path = "job.toml"'), "model.path"),
    "model that is a device": (job(model='path = "/dev/null"'), "model.path"),
    "shell in the function's name": (job(model="path = \"os:system('true')\""), "model.path"),
    "function of no module": (job(model='path = "no.such.module:build"'), "no.such.module:build"),
    "function that is not there": (job(model='path = "json:build"'), "json:build"),
    "function with dots only": (job(model='path = "a..b:build"'), "a..b:build"),
}


@pytest.mark.parametrize("name", JOB_FILES)
def test_a_bad_job_file_is_refused_by_its_key(home, name):
    text, culprit = JOB_FILES[name]
    content(text)(home / "job.toml")
    refuse(home, culprit)


@pytest.mark.parametrize("make", [lambda file: None, directory, lambda file: file.symlink_to(file)])
def test_a_job_file_that_cannot_be_read_is_refused(home, make):
    make(home / "job.toml")
    refuse(home, "job file is refused", "job.toml")


def write_series(home: Path, write: Callable[[Path], None], name: str, lines: str) -> None:
    write(home / name)
    content(job(series=f'path = "{name}"\n{lines}'))(home / "job.toml")


def test_a_path_is_a_path_whatever_a_shell_would_make_of_it(home):
    content(job(run='path = "a\\nb; $(touch c) `touch d` \'"'))(home / "job.toml")
    before = {file.name for file in home.iterdir()}
    assert call("run", home / "job.toml", "--serial").exit_code == 0
    assert {file.name for file in home.iterdir()} - before == {"a\nb; $(touch c) `touch d` '"}


@pytest.mark.parametrize("name", SERIES)
def test_a_bad_series_is_refused_by_its_row_column_or_file(home, name):
    *written, culprit = SERIES[name]
    write_series(home, *written)
    refuse(home, culprit)


def stored_lambda(_: bytes) -> bytes:
    return saved(sequential((6, 2), layers.Lambda(lambda x: x * 2.0, name="twice")))


def saved(model) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        model.save(file)
        return file.read_bytes()


def others_weights(archive: bytes) -> bytes:
    other = saved(sequential((6, 2), layers.Flatten(), layers.Dense(5, "tanh"), layers.Dense(1)))
    return with_part("model.weights.h5", members(other)["model.weights.h5"])(archive)


MODEL_FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no bytes": (lambda _: b"", "model.keras (BadZipFile"),
    "garbage": (lambda _: GARBAGE, "model.keras (BadZipFile"),
    "first half": (lambda archive: archive[: len(archive) // 2], "model.keras (BadZipFile"),
    "second half": (lambda archive: archive[len(archive) // 2 :], "model.keras"),
    "HDF5": (lambda archive: members(archive)["model.weights.h5"], "model.keras (BadZipFile"),
    "locked": (locked, "password"),
    "no architecture": (without("config.json"), "config.json"),
    "no weights": (without("model.weights.h5"), "model.weights.h5"),
    "architecture is no JSON": (with_part("config.json", b"{'class_name': 'Sequential'}"), "JSONDecodeError"),
    "architecture of garbage": (with_part("config.json", GARBAGE), "UnicodeDecodeError"),
    "architecture of nothing": (with_part("config.json", b"null"), "model.keras"),
    "architecture is a list": (with_part("config.json", b"[1, 2]"), "model.keras"),
    "architecture without end": (with_part("config.json", b"[" * 100_000), "RecursionError"),
    "empty architecture": (with_part("config.json", b"{}"), "model.keras"),
    "a layer's settings are null": (
        with_part("config.json", b'{"class_name": "Lambda", "config": null}'), "model.keras"
    ),
    "unknown class": (with_config('"Dense"', '"Dents"'), "Dents"),
    "class of another module": (
        with_config('keras.layers", "class_name": "Dense"', 'os", "class_name": "system"'), "'system'"
    ),
    "unknown activation": (with_config('"tanh"', '"tank"'), "tank"),
    "stored code": (stored_lambda, "'twice'"),
    "weights of another shape": (others_weights, "(12, 4)"),
    "weights of garbage": (with_part("model.weights.h5", GARBAGE), "model.keras"),
    "no size": (with_config('"units": 4', '"units": 0'), "Dense"),
    "size of text": (with_config('"units": 4', '"units": "four"'), "four"),
    "another size": (with_config('"units": 4', '"units": 5'), "expected axis -1"),
    "input of another shape": (with_config('[null, 6, 2]', '[null, 6, 3]'), "expected axis -1"),
    "input without a shape": (with_config('[null, 6, 2]', 'null'), "model.keras"),
    "unknown dtype": (with_config('"float32"', '"float31"'), "float31"),
}  # fmt: skip


def write_model(home: Path, archive: bytes, change: Callable[[bytes], bytes]) -> None:
    (home / "model.keras").write_bytes(change(archive))
    content(job())(home / "job.toml")


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_bad_model_file_is_refused_by_its_part(home, archive, name):
    change, culprit = MODEL_FILES[name]
    write_model(home, archive, change)
    refuse(home, "model.path is refused", culprit)


@pytest.mark.parametrize(
    ("name", "code", "culprit"),
    [
        ("unwritten", "def build(:", "SyntaxError"),
        ("unwilling", "raise OSError('no disk')", "OSError: no disk"),
        ("leaving", "import os, sys\nsys.exit('no licence')", "SystemExit: no licence"),
        ("encoded", "build = '\xff'".encode("latin-1"), "SyntaxError"),
        ("lacking", "import no_such_package", "no_such_package"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused(home, name, code, culprit):
    content(code)(home / f"{name}.py")
    content(job(model=f'path = "{name}:build"'))(home / "job.toml")
    refuse(home, f"{name}:build", culprit)


FUNCTIONS: dict[str, str] = {
    "raises": "RuntimeError: no weights today nor tomorrow",
    "exits": "SystemExit: 3",
    "aborts": "KeyError",
    "recurses": "RecursionError",
    "gives_nothing": "returns NoneType",
    "gives_a_class": "returns type",
    "wants_an_argument": "'size'",
    "not_callable": "not callable",
    "not_there": "not_there",
    "two_inputs": "2 inputs",
    "stateful": "'memory'",
    "normalized_over_the_batch": "'norm'",
    "random": "'drop'",
    "reduced_over_the_batch": "'centre'",
    "without_a_batch": "(6, 2) for 2 windows",
    "with_a_batch_by_chance": "(2,) for 5 windows",
    "one_output_for_all": "(1, 3) for 2 windows",
    "a_scalar": "() for 2 windows",
    "no_outputs": "(2, 6, 0)",
    "text": "an input of string",
    "whole_numbers": "of whole numbers",
    "integers": "of int32",
    "complex_numbers": "of complex64",
    "ragged": "RaggedTensor",
    "sparse": "SparseTensor",
    "images": "('batch', 6, 2, 3)",
    "single_numbers": "('batch',)",
    "four_axes": "('batch', 3, 2, 2)",
    "outputs_of_several_lengths": "all has 6 steps, last has 1 steps",
    "steps_left_open": "windows.length",
    "failing_when_called": "[7]",
    "never_built": "not for you",
    "answering_nothing": "NoneType",
    "without_a_gradient": "no gradient of rough",
}


def write_function(home: Path, name: str) -> None:
    length = "" if name == "steps_left_open" else "length = 6"
    content(job(model=f'path = "tests.jobs.bad_models:{name}"', windows=length))(home / "job.toml")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bad_model_function_is_refused_by_what_it_does(home, name):
    write_function(home, name)
    refuse(home, FUNCTIONS[name])


def mutated(data: bytes, seed: int) -> bytes:
    """The same with a few bytes changed, or a part of it gone, doubled or replaced."""
    chance, changed = random.Random(seed), bytearray(data)
    start = chance.randrange(len(data))
    stop = min(len(data), start + chance.choice((1, 1, 8, 64, len(data))))
    match chance.randrange(4):
        case 0:
            for _ in range(chance.choice((1, 4, 32))):
                changed[chance.randrange(len(data))] = chance.randrange(256)
        case 1:
            del changed[start:stop]
        case 2:
            changed[start:start] = data[start:stop]
        case _:
            changed[start:stop] = chance.randbytes(stop - start)
    return bytes(changed)


def reshaped(archive: bytes, seed: int) -> bytes:
    """An archive whose architecture alone is mutated, as its checksums do not tell."""
    return with_part("config.json", mutated(members(archive)["config.json"], seed))(archive)


# What is refused later, and cheaply, where a mutation does no harm.
NO_MODEL, NO_OUTPUT = 'path = "tests.jobs.bad_models:gives_nothing"', 'of = "flow"'


def fuzzed(home: Path, form: str, seed: int) -> None:
    file = home / f"x.{form}"
    if form == "toml":
        text = job(
            windows="length = 6\nstride = 1", sensitivity=NO_OUTPUT, run='path = "run"\nmemory_per_worker = "2GB"'
        )
        return content(mutated(text.encode(), seed))(home / "job.toml")
    if form in ("keras", "json"):
        archive = (home / "model.keras").read_bytes()
        content((mutated if form == "keras" else reshaped)(archive, seed))(home / "x.keras")
        return content(job(model='path = "x.keras"', sensitivity=NO_OUTPUT))(home / "job.toml")
    save(frame(60), file)
    content(mutated(file.read_bytes(), seed))(file)
    lines = f'path = "{file.name}"' + ("" if form == "npy" else f"\n{TIMED}")
    content(job(model=NO_MODEL, series=lines))(home / "job.toml")


@pytest.mark.parametrize("form", ["toml", "csv", "csv.gz", "parquet", "npy", "keras", "json"])
def test_whatever_the_bytes_it_is_served_or_refused(home, form):
    for seed in range(40):
        fuzzed(home, form, seed)
        before = sorted(home.rglob("*"))
        result = call("run", home / "job.toml", "--serial")
        assert result.exit_code in ((0, 2) if form == "toml" else (2,)), (seed, result.stderr)
        assert "Traceback" not in result.stderr
        assert ("is refused" in result.stderr) == (result.exit_code == 2), (seed, result.stderr)
        assert result.exit_code == 0 or sorted(home.rglob("*")) == before, seed
