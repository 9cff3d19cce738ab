"""The run directory: created whole or not at all, opened and compared; shards written and committed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .choices import purpose, remember, remembered
from .durable import read_json, sync_files, write_json
from .errors import Refused
from .job import Job, SensitivitySection, SeriesSection
from .plan import Layout, Plan
from .series import Survey, Windows, ingest, ingested, is_sliceable
from .setting import Choice

if TYPE_CHECKING:
    import keras

    from .audit import Audit
    from .model import ModelFacts

RESULTS, COMMITS, FAILURES, JOB, TUNING = "results.zarr", "commits", "failures", "job.json", "tuning.json"
MODEL, WEIGHTS, SERIES = "model.keras", "model.weights.h5", "series.zarr"
_CREATING = ".creating"
_KEYS = {
    *("job", "identity", "fingerprints", "versions", "survey", "model", "layout", "skipped", "ingested", "choice"),
    *("model_file", "audit"),
}
_LIBRARIES = ("sensitivity-jobs", "tensorflow", "keras", "numpy", "zarr", "xarray", "ray")


@dataclass(frozen=True)
class Run:
    """A run directory that is whole: everything that was decided before the first shard."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Raises `Refused` where there is no run at `path`."""
        path = Path(path).absolute()
        content = read_json(path / JOB)
        if content is None or not _KEYS <= set(content):
            raise Refused(
                "run directory",
                given=f"{path} ({'no readable ' + JOB + ' in it' if path.is_dir() else 'no such directory'})",
                allowed="a directory made by `sensitivity run`",
                remedy="check the path, or start the run with `sensitivity run JOB`",
            )
        if not (path / RESULTS / "zarr.json").exists():
            raise Refused(
                "run directory",
                given=f"{path}, without its {RESULTS}",
                allowed="a run directory that is whole",
                remedy="restore it, or remove the directory and run the job again",
            )
        return cls(path, content)

    @cached_property
    def job(self) -> Job:
        return Job.model_validate(self.content["job"])

    @cached_property
    def survey(self) -> Survey:
        return Survey.from_json(self.content["survey"])

    @cached_property
    def layout(self) -> Layout:
        return Layout(**self.content["layout"])

    @cached_property
    def facts(self) -> ModelFacts:
        from .model import ModelFacts

        return ModelFacts.from_json(self.content["model"])

    @property
    def windows(self) -> Windows:
        return Windows(self.survey.steps, self.content["model"]["length"], self.job.windows.stride)

    @property
    def fingerprint(self) -> str:
        return self.content["fingerprints"]["job"]

    @property
    def skipped(self) -> int:
        """Windows that touch a missing value."""
        return self.content["skipped"]

    @property
    def choice(self) -> Choice:
        """The setting that the run was planned with, and why; each commit record says which one was used."""
        return Choice.from_json(self.content["choice"])

    def remembered(self, wanted: SensitivitySection, kind: str) -> Choice | None:
        """The choice that an earlier worker of that kind made for the same knobs."""
        return remembered(self.path / TUNING, self._purpose(wanted, kind))

    def remember(self, wanted: SensitivitySection, choice: Choice) -> None:
        remember(self.path / TUNING, self._purpose(wanted, choice.kind), choice)

    def _purpose(self, wanted: SensitivitySection, kind: str) -> dict[str, Any]:
        return purpose(self.content["fingerprints"]["model"], self.facts, wanted, kind)

    @property
    def results(self) -> Path:
        return self.path / RESULTS

    @property
    def series(self) -> SeriesSection:
        """Where workers read the series: the job's source, or its ingested copy."""
        section = self.job.series
        return ingested(section, self.path / SERIES) if self.content["ingested"] else section

    def require_series(self, survey: Survey) -> None:
        """Refuse to go on with a series that is not the one this run began with."""
        if survey.fingerprint != self.survey.fingerprint:
            raise Refused(
                "series.path",
                given=f"{self.series.path}, whose content has changed since the run began",
                allowed="the series as it was",
                remedy="restore it, or run the job into a new run directory",
            )


def identity(job: Job, survey: Survey, facts: ModelFacts, model: dict[str, str]) -> dict[str, Any]:
    """What two runs must share to be the same run; how the work is spread over workers is not part of it."""
    scaling, chosen = job.series.scaling, facts.selection
    return {
        "model architecture": model["architecture"],
        "model weights": model["weights"],
        "series content": survey.fingerprint,
        "series.features": list(survey.features),
        "series.scaling": scaling.model_dump() if scaling else None,
        "windows.length": facts.length,
        "windows.stride": job.windows.stride,
        "sensitivity.of": job.sensitivity.of,
        "sensitivity.wrt": job.sensitivity.wrt,
        "sensitivity.output_steps": None if chosen.steps is None else list(chosen.steps),
        "sensitivity.outputs": None if chosen.channels is None else list(facts.outputs),
        "sensitivity.max_lag": job.sensitivity.max_lag,
        "run.dtype": job.run.dtype,
    }


def require_same(run: Run, job: Job, wanted: dict[str, Any]) -> None:
    """Refuse a run directory that holds another job, naming every difference."""
    have = run.content["identity"]
    differences = [
        f"{key}: the run has {have.get(key)!r}, the job {value!r}"
        for key, value in wanted.items()
        if have.get(key) != value
    ]
    shards = run.layout.shard_windows
    if job.run.shard_windows not in ("auto", shards) and min(job.run.shard_windows, run.layout.windows) != shards:
        differences.append(f"run.shard_windows: the run has {shards}, the job {job.run.shard_windows}")
    if differences:
        raise Refused(
            "run.path",
            given=f"{run.path}, a run of something else\n" + "\n".join(differences),
            allowed="an empty path, or a run of the same job, model and series",
            remedy="choose another run.path, or undo the difference",
        )


def require_free(path: Path) -> None:
    """Refuse a path where no directory can be made, or one that holds anything but a creation that never finished."""
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise Refused(
            "run.path",
            given=f"{path}, where {parent} is {'not writable' if parent.is_dir() else 'a file'}",
            allowed="a path where a directory can be made",
            remedy="choose another path",
        )
    if _is_being_created(path):
        raise Refused(
            "run.path",
            given=f"{path}, which another process is creating at this moment",
            allowed="one driver a run",
            remedy="let that process go on, or end it",
        )
    if path.is_dir() and any(path.iterdir()) and not _is_unfinished(path):
        raise Refused(
            "run.path",
            given=f"{path}, a directory with other files in it",
            allowed="an empty path, or a run of the same job, model and series",
            remedy="choose another path, or empty that one",
        )


def _is_being_created(path: Path) -> bool:
    """Whether a living process of this machine is at it; of other machines nothing can be known."""
    creator = read_json(path / _CREATING) or {}
    if creator.get("host") != socket.gethostname() or creator.get("pid") in (None, os.getpid()):
        return False
    try:
        os.kill(creator["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not (path / JOB).exists()


def _is_unfinished(path: Path) -> bool:
    return (path / _CREATING).exists() and not (path / JOB).exists()


def create(job: Job, survey: Survey, model: keras.Model, fingerprints: dict[str, str], plan: Plan, audit: Audit) -> Run:
    """Make the run directory. `job.json` comes last: without it there is no run, and nothing is left behind."""
    path = Path(job.run.path)
    require_free(path)
    was_there = path.exists()
    path.mkdir(parents=True, exist_ok=True)
    _empty(path)
    try:
        write_json(path / _CREATING, {"host": socket.gethostname(), "pid": os.getpid()})
        _fill(path, job, survey, model, fingerprints, plan, audit)
        run = Run.open(path)
        load_run_model(run)  # what a worker will do first: better refused now
    except BaseException:
        _empty(path)
        if not was_there:
            path.rmdir()
        raise
    (path / _CREATING).unlink()
    return run


def _empty(path: Path) -> None:
    """Leaves the directory itself, which may be a mount point."""
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _fill(
    path: Path, job: Job, survey: Survey, model: keras.Model, fingerprints: dict[str, str], plan: Plan, audit: Audit
) -> None:
    from .template import write_template

    (path / COMMITS).mkdir()
    (path / FAILURES).mkdir()
    model_file = _keep_model(path, job, model)
    copied = not is_sliceable(job.series)
    if copied:
        ingest(job.series, survey, path / SERIES)
    windows = Windows(survey.steps, plan.facts.length, job.windows.stride)
    write_template(path / RESULTS, survey, windows, plan.facts, plan.layout)
    write_json(path / TUNING, {"settings": []})
    if plan.choice.by == "timed":
        remember(path / TUNING, purpose(fingerprints, plan.facts, job.sensitivity, plan.choice.kind), plan.choice)
    wanted = identity(job, survey, plan.facts, fingerprints)
    layout = asdict(plan.layout)
    content = {
        "job": job.model_dump(),
        "identity": wanted,
        "fingerprints": {
            "job": hashlib.blake2b(json.dumps([wanted, layout], sort_keys=True).encode(), digest_size=16).hexdigest(),
            "model": fingerprints,
            "series": survey.fingerprint,
        },
        "versions": _versions(),
        "survey": survey.to_json(),
        "model": plan.facts.to_json(),
        "layout": layout,
        "skipped": plan.skipped,
        "ingested": copied,
        "model_file": model_file,
        "choice": plan.choice.to_json(),
        "audit": audit.to_json(),
    }
    sync_files(sorted(file for file in path.rglob("*") if file.is_file()))
    write_json(path / JOB, content)


def _keep_model(path: Path, job: Job, model: keras.Model) -> str:
    """The model as a file where it is one or can be one; else its weights, to go with the function that builds it."""
    from .loading import fingerprint, load_file

    if not job.model.is_function:
        shutil.copyfile(job.model.path, path / MODEL)
        return MODEL
    try:
        model.save(path / MODEL)
        same = fingerprint(load_file(path / MODEL)) == fingerprint(model)
    except Exception:  # Keras cannot write or read back this class: the reason differs with every class
        same = False
    if same:
        return MODEL
    (path / MODEL).unlink(missing_ok=True)
    model.save_weights(path / WEIGHTS)
    return WEIGHTS


def load_run_model(run: Run) -> keras.Model:
    """The run's own copy of the model, checked against its fingerprint and cast to the run's dtype."""
    from .loading import cast, fingerprint, load_file, load_model

    file = run.path / run.content["model_file"]
    if not file.exists():
        raise Refused(
            "run directory",
            given=f"{run.path}, without its {file.name}",
            allowed="a run directory that is whole",
            remedy="restore the file, or run the job into a new run directory",
        )
    if file.name == MODEL:
        model = load_file(file)
        model = cast(model, run.job.run.dtype)
    else:
        model = load_model(run.job.model, run.job.directory, run.job.run.dtype)
        model(np.zeros((1, *run.facts.input_shape), run.facts.dtype))  # builds a model that waits for its input
        model.load_weights(file)
    if fingerprint(model) != run.content["fingerprints"]["model"]:
        raise Refused(
            "model",
            given=f"the copy in {run.path}, or the function that builds it, has changed since the run began",
            allowed="the model as it was",
            remedy="restore it, or run the job into a new run directory",
        )
    return model


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
