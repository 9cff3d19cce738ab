"""The run directory made: whole or not at all, by one driver."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .addresses import place_at, place_of
from .checksums import SEAL, checksum
from .choices import TUNING, purpose, remember
from .errors import Refused
from .folders import Folder
from .job import Job
from .lease import LEASE, Lease, LeaseLost, owned, require_owner
from .places import Place
from .plan import Plan
from .series import Survey, Windows, ingest, is_sliceable
from .store import COMMITS, FAILURES, JOB, MODEL, RESULTS, SERIES, WEIGHTS, Run, identity, job_seal, load_run_model
from .versions import versions

if TYPE_CHECKING:
    import keras

    from .audit import Audit


def require_free(home: Place) -> None:
    """Refuse a place where nothing can be made, or one that holds anything but a creation that never finished."""
    blocked = home.blocked() if isinstance(home, Folder) else None
    if blocked:
        raise Refused(
            "run.path",
            given=f"{home}, where {blocked}",
            allowed="a path where a directory can be made",
            remedy="choose another path",
        )
    names = home.names()
    if COMMITS in names and any(name.startswith("0") for name in home.names(COMMITS)):
        raise Refused(
            "run.path",
            given=f"{home}, a run with committed shards whose {JOB} is gone",
            allowed="an empty path, or a run of the same job, model and series",
            remedy=f"restore its {JOB} from a copy, or choose another path",
        )
    if names and LEASE not in names:
        raise Refused(
            "run.path",
            given=f"{home}, a directory with other files in it",
            allowed="an empty path, or a run of the same job, model and series",
            remedy="choose another path, or empty that one",
        )


@contextlib.contextmanager
def owning(home: Place) -> Iterator[Lease]:
    """Own the run at a place, or the place for a new one, of which nothing is left if it does not come to be.

    Raises `Refused` where another driver owns it, or where no run can be.
    """
    is_new = home.size(JOB) is None
    if is_new:
        require_free(home)
    with owned(home) as lease:
        try:
            yield lease
        finally:
            if is_new and not lease.made:
                _discard_unless_made(lease)


def _discard_unless_made(lease: Lease) -> None:
    lease.over.set()  # a heart would make the folder again
    here = lease.place.once()
    with contextlib.suppress(OSError, LeaseLost):  # of a store that has failed it was said; another's run is left
        require_owner(here, lease.owner)
        if here.size(JOB) is None:
            here.discard()


def create(
    lease: Lease | None,
    job: Job,
    survey: Survey,
    model: keras.Model,
    fingerprints: dict[str, str],
    plan: Plan,
    audit: Audit,
    *,
    trust_model: bool = False,
) -> Run:
    """Make the run directory under the lease; None: nobody else is near. `job.json` comes last: without it there is no
    run, and nothing is left behind.
    """
    home = lease.place if lease else place_at(job.run.path)
    require = lease.require if lease else lambda: None
    require_free(home)
    require()
    home.discard(keep=LEASE)
    try:
        content = _fill(home, job, survey, model, fingerprints, plan, audit)
        require()
        if not home.create(JOB, _as_json({**content, SEAL: job_seal(content)})):
            raise LeaseLost(f"{home} has been made by another driver")
        run = Run.open(home)
        load_run_model(replace(run, trust_model=trust_model))  # what a worker will do first: better refused now
    except BaseException:
        require()
        home.discard(keep=LEASE)
        raise
    if lease:
        lease.made = True
    return run


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def _fill(
    home: Place, job: Job, survey: Survey, model: keras.Model, fingerprints: dict[str, str], plan: Plan, audit: Audit
) -> dict[str, Any]:
    """Everything but job.json, of which the content is returned."""
    from .template import write_template

    for folder in (COMMITS, FAILURES):
        home.make_folder(folder)
    model_file = _keep_model(home, job, model)
    copied = not is_sliceable(job.series)
    if copied:
        ingest(job.series, survey, home.zarr(SERIES))
    windows = Windows(survey.steps, plan.facts.length, job.windows.stride)
    write_template(home.zarr(RESULTS), survey, windows, plan.facts, plan.layout)
    home.write_json(TUNING, {"settings": []})
    if plan.choice.by == "timed":
        remember(home, purpose(fingerprints, plan.facts, job.sensitivity, plan.choice.kind), plan.choice)
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
        "versions": versions(),
        "survey": survey.to_json(),
        "model": plan.facts.to_json(),
        "layout": layout,
        "skipped": plan.skipped,
        "ingested": copied,
        "model_file": model_file,
        "choice": plan.choice.to_json(),
        "audit": audit.to_json(),
    }
    names = sorted(name for name in home.files() if name != TUNING and not name.startswith(f"{LEASE}/"))
    home.make_durable(names)
    sums = home.each(lambda name: checksum(home.read(name) or b""), names)
    return {**content, "files": dict(zip(names, sums, strict=True))}


def _keep_model(home: Place, job: Job, model: keras.Model) -> str:
    """The model as a file where it is one or can be one; else its weights, to go with the function that builds it."""
    from .loading import fingerprint, load_file

    if not job.model.is_function:
        source, name = place_of(job.model.path)
        home.write(MODEL, source.read(name) or b"")
        return MODEL
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / MODEL
        try:
            model.save(file)
            same = fingerprint(load_file(file)) == fingerprint(model)
        except Exception:  # Keras cannot write or read back this class: the reason differs with every class
            same = False
        if not same:
            file = Path(folder) / WEIGHTS
            model.save_weights(file)
        home.write(file.name, file.read_bytes())
    return file.name
