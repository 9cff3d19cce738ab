"""The run directory made: whole or not at all, by one driver."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .addresses import copy_files, place_at, place_of
from .checksums import SEAL, checksum
from .choices import TUNING, purpose, remember
from .errors import Refused
from .folders import Folder, is_unfinished
from .job import Job
from .lease import LEASE, Lease, LeaseLost, is_lease, owned
from .patience import StoreFailed, reason
from .places import Place
from .plan import Plan
from .series import ingest, is_sliceable
from .store import (
    COMMITS,
    FAILURES,
    JOB,
    MODEL,
    PARTS,
    PRODUCT,
    RESULTS,
    SAVED,
    SERIES,
    WEIGHTS,
    Run,
    identity,
    job_seal,
    load_run_model,
    product_file,
)
from .survey import Survey
from .suspicions import Suspicion
from .versions import versions

if TYPE_CHECKING:
    import keras

    from .audit import Audit
    from .products import Product


_KEPT_BY_NFS = re.compile(r"\.nfs[0-9a-f]{24}")
_CHECKED = (RESULTS, MODEL, SAVED, WEIGHTS, SERIES, PRODUCT)  # what is never written again but by shards


@dataclass(frozen=True)
class Beginning:
    """What a run begins with. audit: None where a run of it is there already. suspicions: what makes its answers
    doubtful. copy_series: also one that workers could read where it is, because it will not stay there.
    """

    job: Job
    survey: Survey
    model: keras.Model
    fingerprints: dict[str, str]
    product: Product
    plan: Plan
    audit: Audit | None
    suspicions: tuple[Suspicion, ...] = ()
    copy_series: bool = False

    @cached_property
    def copies_series(self) -> bool:
        """Whether the run is to hold its series, for workers to read."""
        return self.copy_series or not is_sliceable(self.job.series, self.survey)


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
    if any(name.startswith("0") for name in home.names(COMMITS)):
        raise Refused(
            "run.path",
            given=f"{home}, a run with committed shards whose {JOB} is gone",
            allowed="an empty path, or a run of the same job, model and series",
            remedy=f"restore its {JOB} from a copy, or choose another path",
        )
    names = [name for name in home.names() if not _is_passing(name)]
    others = [name for name in names if name not in PARTS or LEASE not in names]
    others += [f"{LEASE}/{name}" for name in home.names(LEASE) if not (is_lease(name) or _is_passing(name))]
    if others:
        raise Refused(
            "run.path",
            given=f"{home}, a directory with other files in it ({', '.join(sorted(others)[:3])})",
            allowed="an empty path, or a run of the same job, model and series",
            remedy="choose another path, or empty that one",
        )


def _is_passing(name: str) -> bool:
    """A file that is being written, or that NFS keeps for a reader that still has it open."""
    return is_unfinished(name) or _KEPT_BY_NFS.fullmatch(name) is not None


def _clear(home: Place) -> None:
    """Remove what an earlier creation may have made."""
    home.discard(name for name in PARTS if name != LEASE)


@contextlib.contextmanager
def owning(home: Place) -> Iterator[Lease]:
    """Own the run at a place, or the place for a new one, of which nothing is left if it does not come to be.

    Raises `Refused` where another driver owns it, or where no run can be.
    """
    is_new = not home.size(JOB)
    if is_new:
        require_free(home)
    with owned(home) as lease:
        try:
            yield lease
        finally:
            if is_new and not lease.made:
                _discard_unless_made(lease)


def _discard_unless_made(lease: Lease) -> None:
    lease.stop()  # a heart would make the folder again
    home = lease.guarded.once()
    with contextlib.suppress(OSError, LeaseLost):  # of a store that has failed it was said; another's run is left
        if not home.size(JOB):
            _clear(home)
            home.discard([*filter(is_unfinished, home.names()), LEASE])
            home.leave()


def create(lease: Lease | None, beginning: Beginning, *, trust_model: bool = False) -> Run:
    """Make the run directory under the lease; None: nobody else is near. `job.json` comes last: without it there is no
    run, and nothing is left behind.
    """
    home = lease.guarded if lease else place_at(beginning.job.run.path)
    require_free(home)
    _clear(home)
    try:
        content = _fill(home, beginning)
        if not home.create(JOB, _as_json({**content, SEAL: job_seal(content)})):
            raise LeaseLost(f"{home} has been made by another driver")
        run = Run.open(home)
        load_run_model(replace(run, trust_model=trust_model))  # what a worker will do first: better refused now
    except BaseException as error:
        with contextlib.suppress(OSError):  # what went wrong first is said, but for a run that is another's by now
            _clear(home.once())
        if isinstance(error, OSError) and not isinstance(error, StoreFailed):
            raise StoreFailed(f"{home} could not be made: {reason(error)}") from error
        raise
    if lease:
        lease.made = True
    return run


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode()


def _fill(home: Place, beginning: Beginning) -> dict[str, Any]:
    """Everything but job.json, of which the content is returned."""
    from .template import write_template

    job, survey, plan, audit = beginning.job, beginning.survey, beginning.plan, beginning.audit
    if audit is None:
        raise ValueError(f"{home} is new: a job is audited before its run is created")
    for folder in (COMMITS, FAILURES):
        home.make_folder(folder)
    model_file = _keep_model(home, job, beginning.model)
    copied = beginning.copies_series
    if copied:
        ingest(job.series, survey, home.zarr(SERIES))
    windows = survey.windows(plan.facts.length, job.windows.stride)
    write_template(home.zarr(RESULTS), survey, windows, plan.facts, plan.layout, beginning.product)
    keeps = bool(beginning.product.kept())
    if keeps:
        home.write(PRODUCT, product_file(beginning.product))
    home.write_json(TUNING, {"settings": []})
    if plan.choice.by == "timed":
        remember(home, purpose(beginning.fingerprints, plan.facts, job.sensitivity, plan.choice.kind), plan.choice)
    wanted = identity(job, survey, plan.facts, beginning.fingerprints, beginning.product)
    layout = asdict(plan.layout)
    content = {
        "job": job.model_dump(),
        "identity": wanted,
        "fingerprints": {
            "job": hashlib.blake2b(json.dumps([wanted, layout], sort_keys=True).encode(), digest_size=16).hexdigest(),
            "model": beginning.fingerprints,
            "series": survey.fingerprint,
        },
        "versions": versions(),
        "survey": survey.to_json(),
        "model": plan.facts.to_json(),
        "layout": layout,
        "skipped": plan.skipped,
        "ingested": copied,
        "model_file": model_file,
        "product": plan.facts.product,
        "product_file": keeps,
        "choice": plan.choice.to_json(),
        "audit": audit.to_json(),
        "suspicions": [one.to_json() for one in beginning.suspicions],
    }
    names = sorted(name for name in home.files() if name.partition("/")[0] in _CHECKED)
    home.make_durable(names)
    sums = home.each(lambda name: checksum(home.read(name) or b""), names)
    return {**content, "files": dict(zip(names, sums, strict=True))}


def _keep_model(home: Place, job: Job, model: keras.Model) -> str:
    """The model as the file or directory that it is, or as a file where it can be one; else its weights, to go with the
    function that builds it.
    """
    from .fingerprint import fingerprint
    from .loading import load_file

    if job.model.is_directory:
        copy_files(place_at(job.model.path), home, f"{SAVED}/")
        return SAVED
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
