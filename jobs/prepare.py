"""From a job file to a run directory: everything that must be true before a shard is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sensitivity.addresses import place_at
from sensitivity.creation import Beginning, create, require_free
from sensitivity.errors import Refused
from sensitivity.job import Job, SensitivitySection, of_inputs
from sensitivity.lease import Lease
from sensitivity.placement import Node, place
from sensitivity.plan import (
    Layout,
    Plan,
    Workers,
    count_windows,
    cut,
    fixed_memory,
    plan_run,
    worker_memory,
)
from sensitivity.series import first_windows
from sensitivity.setting import Choice
from sensitivity.store import JOB, Run, identity, require_same
from sensitivity.survey import Survey, survey
from sensitivity.suspicions import Suspicion, near_zero_share, of_derivatives, of_series
from sensitivity.windows import Windows

from .resources import hold, local, quiet

if TYPE_CHECKING:
    import keras
    import numpy as np

    from sensitivity.audit import Audit
    from sensitivity.engine import Tuned
    from sensitivity.model import ModelFacts, Target
    from sensitivity.tuning import Room

JACOBIAN = "jacobian"


@dataclass(frozen=True)
class Prepared(Beginning):
    """A job that may run: its parts loaded, proved and planned. Nothing is written yet."""

    trust_model: bool = False

    def open_or_create(self, lease: Lease | None = None) -> Run:
        """The run directory: the one that is there, if it is of this job, else a new one, made under the lease."""
        home = lease.place if lease else place_at(self.job.run.path)
        if not home.size(JOB):
            return create(lease, self, trust_model=self.trust_model)
        run = Run.open(home)
        require_same(run, self.job, identity(self.job, self.survey, self.plan.facts, self.fingerprints, self.product))
        return run


def prepare(
    job: Job,
    nodes: Sequence[Node] | None = None,
    *,
    gpu: bool = False,
    trust_model: bool = False,
    autoscale: bool = False,
) -> Prepared:
    """Survey the series, load the model, time kernels, plan, audit. Raises `Refused`; writes nothing.

    nodes: of the cluster to run on; None: this machine. gpu: this process computes, so it may take a GPU. trust_model:
    code that is stored in the model's file may run. autoscale: nodes are added for workers that find no room.
    """
    home = place_at(job.run.path)
    resume = bool(home.size(JOB))
    if not resume:
        require_free(home)
    found = _surveyed(job)
    found.require_fits(job.run.dtype, job.series)
    if job.windows.length:
        count_windows(found, job.windows.length, job.windows.stride)
    with quiet():
        from sensitivity.audit import require_stateless
        from sensitivity.fingerprint import fingerprint
        from sensitivity.layers import normalises
        from sensitivity.loading import load_model
        from sensitivity.model import described_job, shaped, target_of
        from sensitivity.products import product_asked
        from sensitivity.record import record_of
        from sensitivity.room import room_in
        from sensitivity.tuning import FEW, by_rule

        here = nodes is None
        nodes = local() if nodes is None else nodes
        hold(job, gpu=gpu)
    model = load_model(job.model, job.directory, job.run.dtype, trust=trust_model)
    require_stateless(model)
    asked = job.sensitivity
    plain = described_job(model, job, found)
    product = product_asked(asked, plain, record_of(job, found, plain))
    facts = shaped(plain, product)
    known = fingerprint(model)
    free = None if resume else home.free_bytes()
    layout = lay_out(job, found, facts)
    workers = place(job, nodes, fixed_memory(facts), layout.shard_count, autoscale=autoscale)
    target = target_of(model, facts, asked.of, product)
    knows = here and (gpu or not workers.gpus)  # workers are of this process's kind
    room = room_in(workers, facts, layout, limited=False)  # this process's own size is none of the workers'
    rule = by_rule(job.sensitivity, target, room, layout.chunk_windows, "run.memory_per_worker")
    plan = plan_run(job, found, facts, rule, workers, free)  # refuses before anything is timed
    if resume:
        kept = kept_choice(Run.open(home), job.sensitivity, workers, knows and rule.by == "rule")
        if kept is not None:
            plan = plan_run(job, found, facts, kept, workers, free)
        told = Run.open(home).suspicions
        return Prepared(job, found, model, known, product, plan, None, told, trust_model=trust_model)
    windows = first_windows(job.series, Windows(0, facts.length, job.windows.stride), job.run.dtype, FEW, facts.labels)
    with quiet():
        choice, audited, near_zero = _proved(job, target, windows, room, plan, knows)
    plan = plan_run(job, found, facts, choice, workers, free)
    told = (*of_series(found, job.series, normalises(model), class_columns(model, facts, found)), *near_zero)
    return Prepared(job, found, model, known, product, plan, audited, told, trust_model=trust_model)


def _surveyed(job: Job) -> Survey:
    try:
        return survey(job.series)
    except Refused as refusal:
        raise (of_inputs(refusal) if job.model.inputs else refusal) from None


def class_columns(model: keras.Model, facts: ModelFacts, found: Survey) -> list[str]:
    """The columns that are inputs of whole numbers."""
    from sensitivity.layers import whole_inputs

    counted, parts = whole_inputs(model), facts.packing.inputs if facts.packing else ()
    if not parts:  # the model's one input is of all columns
        return list(found.features) if counted else []
    return [name for part in parts if part.name in counted for name in found.features[part.start : part.stop]]


def _proved(
    job: Job, target: Target, windows: np.ndarray, room: Room, plan: Plan, knows: bool
) -> tuple[Choice, Audit, tuple[Suspicion, ...]]:
    """The setting to run with, the figures of its audit on a few real windows, and what is suspicious about these."""
    from sensitivity.audit import audit, failures_refused, few, require_independent

    samples = few(windows).reshape(-1, *plan.facts.input_shape)
    require_independent(target, samples)
    with failures_refused("differentiated"):
        choice, kernel = _chosen(job, target, windows, room, plan, knows)
    audited = audit(target, kernel, samples)
    choice = replace(choice, setting=replace(choice.setting, xla=kernel.setting.xla, lost=kernel.setting.lost))
    return choice, audited, _near_zero(target, kernel, samples)


def _near_zero(target: Target, kernel: Tuned, samples: np.ndarray) -> tuple[Suspicion, ...]:
    """What derivatives by the input say of the samples, `(sample, …)` as calls take them."""
    facts, count = target.facts, len(samples)
    if facts.source.kind != "input" or target.product.name != JACOBIAN:
        return ()
    prediction, derivatives = kernel(samples)
    kept = derivatives.reshape(count, facts.target_size, *facts.kept_shape)
    return of_derivatives(near_zero_share(prediction.reshape(count, -1), kept, facts.source.of(samples)), count)


def _chosen(job: Job, target: Target, windows: np.ndarray, room: Room, plan: Plan, knows: bool) -> tuple[Choice, Tuned]:
    """What workers run fastest, where they are of this process's kind; others find out for themselves."""
    from sensitivity.audit import SAMPLES
    from sensitivity.engine import Tuned
    from sensitivity.tuning import tune

    if not knows:
        rule = plan.choice
        few = min(SAMPLES, rule.setting.windows_per_call)
        return rule, Tuned(target, replace(rule.setting, windows_per_call=few))
    share = -(-plan.layout.windows // plan.workers.count)
    return tune(job.sensitivity, target, windows, room, plan.layout.chunk_windows, share)


def lay_out(job: Job, found: Survey, facts: ModelFacts) -> Layout:
    windows = count_windows(found, facts.length, job.windows.stride).count
    return cut(windows, facts.window_bytes, facts.variables[0].cut_size, job.run.shard_windows)


def kept_choice(run: Run, wanted: SensitivitySection, workers: Workers, knows: bool) -> Choice | None:
    """What the run's earlier workers found fastest, where these are of their kind and have room for it.

    knows: whether this process is of the workers' kind.
    """
    from sensitivity.device import kind

    kept = run.remembered(wanted, kind(workers.cpus)) if knows else None
    fits = kept is not None and worker_memory(run.facts, kept, run.layout) <= workers.memory
    return kept if fits else None
