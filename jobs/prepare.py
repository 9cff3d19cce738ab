"""From a job file to a run directory: everything that must be true before a shard is computed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.plan import (
    Plan,
    Setting,
    Workers,
    bytes_per_window,
    count_windows,
    cut,
    fixed_memory,
    human_bytes,
    place,
    plan_run,
)
from sensitivity.series import Survey, first_windows, survey
from sensitivity.store import JOB, Run, create, identity, require_free, require_same

from .resources import Resources, hold, local, quiet

if TYPE_CHECKING:
    import keras

    from sensitivity.audit import Audit
    from sensitivity.model import ModelFacts


@dataclass(frozen=True)
class Prepared:
    """A job that may run: its parts loaded, proved and planned. Nothing is written yet."""

    job: Job
    survey: Survey
    model: keras.Model
    fingerprints: dict[str, str]
    plan: Plan
    audit: Audit | None

    def open_or_create(self) -> Run:
        """The run directory: the one that is there, if it is of this job, else a new one."""
        path = Path(self.job.run.path)
        if not (path / JOB).exists():
            if self.audit is None:
                raise ValueError(f"{path} is new: a job is audited before its run is created")
            return create(self.job, self.survey, self.model, self.fingerprints, self.plan, self.audit)
        run = Run.open(path)
        require_same(run, self.job, identity(self.job, self.survey, self.plan.facts, self.fingerprints))
        return run


def prepare(job: Job, resources: Resources | None = None, *, gpu: bool = False) -> Prepared:
    """Survey the series, load the model, plan, audit. Raises `Refused`; writes nothing.

    resources: of the cluster to run on; None: this machine's. gpu: this process computes, so it may take a GPU.
    """
    path = Path(job.run.path)
    resume = (path / JOB).exists()
    if not resume:
        require_free(path)
    found = survey(job.series)
    found.require_fits(job.run.dtype, job.series.scaling)
    if job.windows.length:
        count_windows(found.steps, job.windows.length, job.windows.stride)
    with quiet():
        from sensitivity.audit import require_stateless
        from sensitivity.loading import fingerprint, load_model
        from sensitivity.model import describe

        resources = resources or local()
        hold(job, gpu=gpu)
    model = load_model(job.model, job.directory, job.run.dtype)
    require_stateless(model)
    facts = describe(model, job.windows, len(found.features), of=job.sensitivity.of, dtype=job.run.dtype)
    known = fingerprint(model)
    plan = make_plan(job, found, facts, resources, None if resume else _free_bytes(path))
    if resume:
        return Prepared(job, found, model, known, plan, None)
    audited, setting = _audit(job, model, plan)
    return Prepared(job, found, model, known, replace(plan, setting=setting), audited)


def make_plan(job: Job, found: Survey, facts: ModelFacts, resources: Resources, free_bytes: int | None) -> Plan:
    from sensitivity.tuning import choose

    windows = count_windows(found.steps, facts.length, job.windows.stride).count
    layout = cut(windows, bytes_per_window(facts), facts.output_steps, job.run.shard_windows)
    workers = crew(job, facts, resources, layout.shard_count)
    setting = choose(job.sensitivity, facts, _memory_for_a_call(facts, workers), layout.chunk_windows)
    return plan_run(job, found, facts, setting, workers, free_bytes)


def crew(job: Job, facts: ModelFacts, resources: Resources, shards: int) -> Workers:
    """The job's workers: left to us, no more than there are shards and than have room to work."""
    workers = place(job, resources.cpus, resources.gpus, resources.memory)
    needed = fixed_memory(facts)
    count = min(workers.count, shards)
    if job.run.workers == "auto" and job.run.memory_bytes is None:
        count = max(1, min(count, resources.memory // (2 * needed)))
    workers = replace(workers, count=count, memory=job.run.memory_bytes or resources.memory // count)
    if workers.memory <= needed:
        raise Refused(
            "run.memory_per_worker",
            given=f"{human_bytes(workers.memory)} for each of {workers.count} workers",
            allowed=f"more than {human_bytes(needed)}, what TensorFlow and the model take before any window",
            remedy="give workers more memory, or run fewer of them",
        )
    return workers


def _memory_for_a_call(facts: ModelFacts, workers: Workers) -> int:
    """Half of what a worker has beyond its fixed needs: the other half is for results and for surprises."""
    return max(0, workers.memory - fixed_memory(facts)) // 2


def _audit(job: Job, model: keras.Model, plan: Plan) -> tuple[Audit, Setting]:
    """The audit, and the plan's setting with what its kernel turned out not to have."""
    from sensitivity.audit import SAMPLES, audit
    from sensitivity.model import Target
    from sensitivity.series import Windows
    from sensitivity.tuning import Tuned

    target = Target(model, plan.facts, job.sensitivity.of)
    kernel = Tuned(target, replace(plan.setting, windows_per_call=min(SAMPLES, plan.setting.windows_per_call)))
    windows = Windows(0, plan.facts.length, job.windows.stride)
    found = audit(target, kernel, first_windows(job.series, windows, job.run.dtype, SAMPLES))
    return found, replace(plan.setting, xla=kernel.setting.xla, lost=kernel.setting.lost)


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
