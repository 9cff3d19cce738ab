"""A plan and its audit in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sensitivity.labels import loss_name
from sensitivity.plan import Plan, human_bytes
from sensitivity.progress import duration

if TYPE_CHECKING:
    from sensitivity.audit import Audit
    from sensitivity.creation import Beginning
    from sensitivity.products import Product


def described(job: Beginning) -> str:
    audited = _audit(job.audit, job.product) if job.audit else ()
    suspicious = (("suspicious", str(one)) for one in job.suspicions)
    lines = [*_series(job), *_loss(job), *_plan(job.plan), *audited, *suspicious]
    return "\n".join(f"{name:16} {value}" for name, value in lines)


def _series(job: Beginning) -> Iterator[tuple[str, str]]:
    yield "features", ", ".join(job.plan.features) + "  (in the order the model takes them)"
    if job.plan.sites:
        short = job.plan.short_sites
        which = f", of which {short:,} {'is' if short == 1 else 'are'} shorter than a window" if short else ""
        yield "sites", f"{job.plan.sites:,}{which}"
    where = "copied into the run directory once" if job.copies_series else "read where it is"
    yield "series", f"{job.survey.steps:,} steps, {where}"


def _loss(job: Beginning) -> Iterator[tuple[str, str]]:
    series, labels = job.job.series, job.plan.facts.labels
    if labels is None:
        return
    weighted = f", weighted by {series.weights}" if series.weights else ""
    first, last = labels.offsets[0], labels.offsets[-1]
    when = f"{first:+d}" if first == last else f"{first:+d} to {last:+d}"
    step = "step" if first == last else "steps"
    yield "loss", f"{loss_name(job.job.sensitivity.loss)} of {', '.join(series.labels or ())}{weighted}"
    yield "labels", f"at {step} {when} from the window's last one"


def _plan(plan: Plan) -> Iterator[tuple[str, str]]:
    layout, workers = plan.layout, plan.workers
    each = f"{workers.cpus} core{'s' if workers.cpus > 1 else ''}" + (f", {workers.gpus:g} GPU" if workers.gpus else "")
    yield "windows", f"{layout.windows:,}, of which {plan.skipped:,} touch a missing value and are skipped"
    yield "shards", f"{layout.shard_count:,} of {layout.shard_windows:,} windows"
    shape = " × ".join(f"{size:,}" for size in plan.chunk_shape)
    product = plan.facts.variables[0]
    yield "product", f"{product.name}: {product.long_name}"
    yield "chunk shape", f"{shape}  ({', '.join(('time', *product.dim_names))})"
    if plan.facts.step_lags and {"output_step", "lag"} <= {*product.dim_names}:
        sees = "later inputs, too" if plan.facts.at_steps == "acausal" else "inputs up to its own step only"
        yield "output steps", f"one at each step of the window, which lags count back from; an output depends on {sees}"
    yield "to be stored", f"{human_bytes(plan.stored_bytes)} before compression, {plan.stored_bytes:,} bytes"
    if "parameter" in product.dim_names:
        size = product.size * plan.facts.itemsize
        every = human_bytes(size * layout.windows)
        yield "by weights", f"{human_bytes(size)} a window, {every} in all, for {plan.facts.source_size:,} parameters"
        yield "", 'wrt = "weights:LAYER/kernel" stores fewer, product = "gradient_norm" one number for each weight'
    yield "workers", f"{workers.count} of {each}, {human_bytes(workers.memory)} each"
    timing = f", {human_bytes(plan.timing_bytes)} while kernels are timed" if plan.choice.trials else ""
    yield "projected memory", f"{human_bytes(plan.worker_bytes)} a worker{timing}"
    yield "of which a call", human_bytes(plan.choice.call_bytes)
    if plan.seconds is not None:
        yield "projected time", f"{duration(plan.seconds)} of computing"
    yield "kernel", str(plan.setting)
    yield "chosen", plan.choice.why
    for trial in sorted(plan.choice.trials, key=lambda trial: -(trial.windows_per_second or 0)):
        yield "", str(trial)
    for lost in plan.setting.lost:
        yield "lost", lost


def _audit(audit: Audit, product: Product) -> Iterator[tuple[str, str]]:
    is_jacobian = product.name == "jacobian"
    what = "vector-Jacobian product" if is_jacobian else f"{product.name} by plain reverse mode"
    yield "audit", f"{what} agrees to {audit.vjp_error:.1e}"
    if audit.predict_error is not None:
        yield "", f"predictions agree with model.predict to {audit.predict_error:.1e}"
    if audit.predict_failed:
        yield "", f"predictions could not be compared with model.predict: {audit.predict_failed}"
    if is_jacobian or audit.jvp_error is not None:
        forward = "not possible for this model" if audit.jvp_error is None else f"agrees to {audit.jvp_error:.1e}"
        yield "", f"Jacobian-vector product {forward}"
    if product.is_linear:
        difference = audit.difference_error
        found = "not possible: no float64 twin, or not finite" if difference is None else f"agrees to {difference:.1e}"
        yield "", f"central difference in float64 {found}"
    if not audit.largest:
        yield "", f"the {product.name} is zero on the windows tried: does the output depend on the source?"
    if audit.not_finite:
        yield "", f"{audit.not_finite:,} derivatives are not finite on the windows tried"
