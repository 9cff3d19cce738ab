"""The run directory as it stands: opened, compared, and held under a lease."""

from __future__ import annotations

import io
import shlex
import time
import zipfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .addresses import local_folder, place_at
from .checksums import SEAL, checksum, seal
from .choices import TUNING, purpose, remember, remembered
from .errors import Refused
from .folders import Folder
from .job import Job, SensitivitySection
from .job_files import SAVED_GRAPH
from .lease import LEASE, Lease, Owner, require_owner
from .places import Place
from .plan import Layout
from .sections import SeriesSection
from .series import ingested
from .setting import Choice
from .survey import Survey
from .suspicions import Suspicion
from .variables import Variable, variables_of
from .versions import differences, versions
from .windows import Windows

if TYPE_CHECKING:
    import keras
    from zarr.abc.store import Store

    from .facts import ModelFacts
    from .products import Product

RESULTS, COMMITS, PAGES, FAILURES, JOB = "results.zarr", "commits", "pages", "failures", "job.json"
MODEL, SAVED, WEIGHTS = "model.keras", "model", "model.weights.h5"
SERIES, PRODUCT = "series.zarr", "product.npz"
# job.json first: without it there is no run, and what else is left of one is removed by the next.
PARTS = (JOB, RESULTS, COMMITS, PAGES, FAILURES, MODEL, SAVED, WEIGHTS, SERIES, PRODUCT, TUNING, LEASE)
_KEYS = {
    *("job", "identity", "fingerprints", "versions", "survey", "model", "layout", "skipped", "ingested", "choice"),
    *("model_file", "audit", "files"),
}


@dataclass(frozen=True)
class Run:
    """A run directory that is whole: everything that was decided before the first shard.

    owner: the driver that works at it, under a lease that guards `place`; None: it is only read, or nobody else is
    near. trust_model: the user lets code run that is stored in the model. code: where the module of the model's
    function is by now; None: where it was when the run began.
    """

    place: Place
    content: dict[str, Any]
    owner: Owner | None = None
    trust_model: bool = False
    code: str | None = None

    @classmethod
    def open(cls, path: Run | Place | Path | str, *, to_mend: bool = False) -> Run:
        """The run at a folder or a URL; a run that is open already as it is. to_mend: its store may be gone.

        Raises `Refused` where there is none, and where its parts lie elsewhere.
        """
        if isinstance(path, Run):
            return path
        home = path if isinstance(path, Place) else place_at(path)
        content = home.read_json(JOB)
        if content is None or not _KEYS <= set(content):
            what = "nothing is there" if not home.names() else f"no readable {JOB} of this version in it"
            raise Refused(
                "run directory",
                given=f"{home} ({what})",
                allowed="a directory made by `sensitivity run`",
                remedy="check the path, or start the run with `sensitivity run JOB`",
            )
        if content.get(SEAL) != job_seal(content):
            raise Refused(
                "run directory",
                given=f"{home}, whose {JOB} has been changed since it was written",
                allowed="a run directory as it was written",
                remedy=f"restore its {JOB} from a copy, or run the job into a new run directory",
            )
        if not to_mend and home.size(f"{RESULTS}/zarr.json") is None:
            raise Refused(
                "run directory",
                given=f"{home}, without its {RESULTS}/zarr.json",
                allowed="a run directory that is whole",
                remedy=f"sensitivity verify --repair {shlex.quote(str(home))} restores it, and names what else is lost",
            )
        outside = home.outside((*PARTS, *(f"{RESULTS}/{name}" for name in home.names(RESULTS))))
        if outside:
            raise Refused(
                "run directory",
                given=f"{home}, of which {outside} is a link to somewhere else",
                allowed="a run directory that holds all its files",
                remedy="move the files there in place of the link",
            )
        return cls(home, content)

    def require_lease(self) -> None:
        """Raise `LeaseLost` where the run is worked at under a lease that is lost."""
        if self.owner is not None:
            require_owner(self.place, self.owner)

    def held(self, lease: Lease, *, trust_model: bool = False) -> Run:
        """The run, as worked at under that lease."""
        return replace(self, place=lease.guarded, owner=lease.owner, trust_model=trust_model)

    @property
    def token(self) -> int:
        """The lease's; 0: it is worked at under none."""
        return self.owner.token if self.owner else 0

    @property
    def versions(self) -> dict[str, str]:
        """What computes its numbers, as begun or as last agreed to."""
        changes = self.content.get("version_changes", [])
        return changes[-1]["to"] if changes else self.content["versions"]

    def require_versions(self) -> None:
        """Refuse to compute with other versions of what numbers come from."""
        found = differences(self.versions, versions())
        if found:
            raise Refused(
                "versions",
                given=f"{self.place}, begun with others\n" + "\n".join(found),
                allowed="the versions that the run was begun with",
                remedy="install those, or go on with --allow-version-change: shards to come may be rounded otherwise",
            )

    def with_versions_changed(self) -> Run:
        """The run, where shards from now on may be computed with the versions here: it is recorded in job.json."""
        change = {"at": time.time(), "token": self.token, "from": self.versions, "to": versions()}
        content = {**self.content, "version_changes": [*self.content.get("version_changes", []), change]}
        self.place.write_json(JOB, content)
        return replace(self, content=content)

    @cached_property
    def job(self) -> Job:
        job = Job.model_validate(self.content["job"])
        if "sites" in self.content["survey"]:
            return job
        # Begun before there were sites: what is called `site` is nothing of the kind.
        return job.model_copy(update={"series": job.series.model_copy(update={"site": False})})

    @property
    def suspicions(self) -> tuple[Suspicion, ...]:
        """What made its answers doubtful when it began."""
        return tuple(Suspicion(**one) for one in self.content.get("suspicions", ()))

    @cached_property
    def survey(self) -> Survey:
        return Survey.from_json(self.content["survey"])

    @cached_property
    def layout(self) -> Layout:
        return Layout(**self.content["layout"])

    @cached_property
    def facts(self) -> ModelFacts:
        from .facts import ModelFacts

        return ModelFacts.from_json(self.content["model"])

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        """Of the results, along time; the product first."""
        return variables_of(self.content["model"])

    @cached_property
    def product(self) -> Product:
        """What is computed of each window. Raises `Refused` where what the run keeps of it is gone."""
        from .products import product_kept

        if not self.content.get("product_file"):
            return product_kept(self.job.sensitivity, {})
        content = self.place.read(PRODUCT)
        if content is None or checksum(content) != self.content["files"][PRODUCT]:
            raise Refused(
                "run directory",
                given=f"{self.place}, without its {PRODUCT} as it was written",
                allowed="a run directory that is whole",
                remedy="restore it from a copy, or run the job into a new run directory",
            )
        with np.load(io.BytesIO(content), allow_pickle=False) as kept:
            return product_kept(self.job.sensitivity, dict(kept))

    @property
    def directory(self) -> str:
        """Where the module of the model's function is looked for first."""
        return self.code or self.job.directory

    @cached_property
    def windows(self) -> Windows:
        return self.survey.windows(self.content["model"]["length"], self.job.windows.stride)

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
        return remembered(self.place, self._purpose(wanted, kind))

    def remember(self, wanted: SensitivitySection, choice: Choice) -> None:
        remember(self.place, self._purpose(wanted, choice.kind), choice)

    def _purpose(self, wanted: SensitivitySection, kind: str) -> dict[str, Any]:
        return purpose(self.content["fingerprints"]["model"], self.facts, wanted, kind)

    @property
    def results(self) -> Store:
        """The Zarr store of the results."""
        return self.place.zarr(RESULTS)

    @property
    def series(self) -> SeriesSection:
        """Where workers read the series: the job's source, or its ingested copy."""
        section = self.job.series
        return ingested(section, self.survey, f"{self.place}/{SERIES}") if self.content["ingested"] else section


def job_seal(content: dict[str, Any]) -> str:
    """The checksum of job.json but for versions, which are compared with those here and do nothing else."""
    return seal({key: content[key] for key in content if key not in ("versions", "version_changes")})


def identity(job: Job, survey: Survey, facts: ModelFacts, model: dict[str, str], product: Product) -> dict[str, Any]:
    """What two runs must share to be the same run; how the work is spread over workers is not part of it."""
    scaling, chosen, kept = job.series.scaling, facts.selection, product.kept()
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
        # Left out where there is one, for runs from before there were several.
        **({"model.inputs": job.model.inputs} if job.model.inputs else {}),
        **_of_loss(job, facts),
        # Left out where it is the Jacobian, for runs from before there were other products.
        **({} if facts.product == "jacobian" else {"sensitivity.product": facts.product}),
        **({"second derivatives": "of variances too"} if facts.rows_of == "derivatives" else {}),
        **({"sensitivity.product, its arrays": checksum(product_file(product))} if kept else {}),
    }


def _of_loss(job: Job, facts: ModelFacts) -> dict[str, Any]:
    if facts.labels is None or facts.packing is None:
        return {}
    series, scaling, chosen = job.series, job.series.label_scaling, facts.packing.selection
    return {
        "sensitivity.output_steps": None if chosen.steps is None else list(chosen.steps),
        "sensitivity.outputs": None if chosen.channels is None else list(chosen.channels),
        "sensitivity.loss": job.sensitivity.loss,
        "sensitivity.lead": list(facts.labels.offsets),
        "series.labels": list(series.labels or ()),
        "series.label_scaling": scaling.model_dump() if scaling else None,
        "series.weights": series.weights,
    }


def product_file(product: Product) -> bytes:
    """What a run keeps of its product: the same bytes for the same product."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in sorted(product.kept().items()):
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    return buffer.getvalue()


def require_same(run: Run, job: Job, wanted: dict[str, Any]) -> None:
    """Refuse a run directory that holds another job, naming every difference."""
    have = run.content["identity"]
    differences = [
        f"{key}: the run has {have.get(key)!r}, the job {value!r}"
        for key, value in wanted.items()
        if have.get(key) != value
    ]
    differences += [f"{key}: the run has {have[key]!r}, the job none" for key in have if key not in wanted]
    shards = run.layout.shard_windows
    if job.run.shard_windows not in ("auto", shards) and min(job.run.shard_windows, run.layout.windows) != shards:
        differences.append(f"run.shard_windows: the run has {shards}, the job {job.run.shard_windows}")
    if differences:
        raise Refused(
            "run.path",
            given=f"{run.place}, a run of something else\n" + "\n".join(differences),
            allowed="an empty path, or a run of the same job, model and series",
            remedy="choose another run.path, or undo the difference",
        )


def load_run_model(run: Run) -> keras.Model:
    """The run's own copy of the model, checked against its fingerprint and cast to the run's dtype."""
    from .fingerprint import fingerprint
    from .loading import cast, load_model

    name = run.content["model_file"]
    file_of = f"{SAVED}/{SAVED_GRAPH}" if name == SAVED else name
    if name not in (MODEL, SAVED, WEIGHTS) or run.place.size(file_of) is None:
        raise Refused(
            "run directory",
            given=f"{run.place}, without its {name}",
            allowed="a run directory that is whole",
            remedy=f"sensitivity verify --repair {shlex.quote(str(run.place))} restores what came from files;\n"
            "a function's model is begun anew: run the job into a new run directory",
        )
    with local_folder(f"{run.place}/{SAVED}") if name == SAVED else run.place.local_copy(name) as file:
        if run.job.model.is_function:
            _require_code_elsewhere(run)
        if name in (MODEL, SAVED):
            model = cast(_load_kept(run, file), run.job.run.dtype)
        else:
            model = load_model(run.job.model, run.directory, run.job.run.dtype)
            packing = run.facts.packing
            waiting = packing.wrapped(model) if packing else model  # for its input, to be built
            waiting(np.zeros((1, *run.facts.input_shape), run.facts.dtype))
            model.load_weights(file)
    if fingerprint(model) != run.content["fingerprints"]["model"]:
        raise Refused(
            "model",
            given=f"the copy in {run.place}, or the function that builds it, has changed since the run began",
            allowed="the model as it was",
            remedy="restore it, or run the job into a new run directory",
        )
    return model


def _require_code_elsewhere(run: Run) -> None:
    """A run directory from elsewhere may bring code along, and name it as the function that builds its model."""
    directory = Path(run.directory)
    inside = isinstance(run.place, Folder) and directory.resolve().is_relative_to(run.place.path.resolve())
    if inside or not directory.is_absolute():
        raise Refused(
            "model.path",
            given=f"{run.job.model.path} in {directory}, which came with the run directory {run.place}",
            allowed="code that is not a part of the run directory",
            remedy="look at the code; if it is to be trusted, run a job of your own with it",
        )


def _load_kept(run: Run, file: Path) -> keras.Model:
    """A model that a function built may be of classes that its module registers."""
    from .loading import import_module, load_file

    try:
        return load_file(file, trust=run.trust_model)
    except Refused:
        if not run.job.model.is_function:
            raise
        import_module(run.job.model.path, run.directory)
        return load_file(file, trust=run.trust_model)
