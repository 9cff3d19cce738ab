"""The run's facts, as names and values: what was asked, what computed it, how it went."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import numpy as np

from ..plan import human_bytes
from ..progress import duration
from ..setting import Setting
from ..versions import differences
from .state import State
from .words import number, plural

Facts = list[tuple[str, str]]
SHOWN = 8
LONGEST_JOB = 8000  # characters
LARGE_DIFFERENCE = 0.01


def sections(state: State) -> dict[str, Facts]:
    """By heading."""
    return {
        "Run": list(_run(state)),
        "Model": list(_model(state)),
        "Series and windows": list(_series(state)),
        "Computation": list(_computation(state)),
        "Audit": list(_audit(state)),
        "Versions": list(_versions(state)),
    }


def _run(state: State) -> Iterator[tuple[str, str]]:
    run, parts, tally = state.run, state.coverage, state.tally
    yield "Directory", str(run.place)
    yield told(state.terms.nouns), f"of {run.job.sensitivity.of} by {run.job.sensitivity.wrt}, in {run.job.run.dtype}"
    yield "Windows", ", ".join(f"{count:,} {name}" for name, count in parts.parts().items()) + f", of {parts.windows:,}"
    yield "Shards", f"{tally.shards:,} of {run.layout.shard_count:,} committed; {state.failed:,} with a failure"
    if tally.sessions:
        first = min(pace.started for pace in tally.sessions.values())
        last = max(pace.finished for pace in tally.sessions.values())
        yield "Computed", f"{moment(first)} to {moment(last)}"
    if state.driver is not None:
        yield "At work now", str(state.driver)
    yield "Fingerprint of the job", run.fingerprint


def told(nouns: str) -> str:
    """As a heading."""
    return nouns[0].upper() + nouns[1:]


def _model(state: State) -> Iterator[tuple[str, str]]:
    facts: dict[str, Any] = state.run.content["model"]
    yield "Path", state.run.job.model.path
    yield "Input", f"{_times(facts['input_shape'])} (lag × feature), {facts['dtype']}"
    steps = f"{_times(facts['target_shape'])} (step × output), " if len(facts["target_shape"]) > 1 else ""
    yield "Output", steps + _few(facts["outputs"], "output")
    yield "Parameters", f"{facts['parameters']:,}"
    if facts["recurrent"]:
        yield (
            "Recurrent layers",
            ", ".join(f"{units:,} units over {steps:,} steps" for steps, units in facts["recurrent"]),
        )
    yield "Derivative", "without jumps" if facts["smooth"] else "has jumps, as that of a ReLU has"
    if facts.get("at_steps", "no") != "no":
        sees = "inputs up to its own step only" if facts["at_steps"] == "causal" else "later inputs, too"
        yield "Output steps", f"one at each step of the window; an output depends on {sees}"
    if facts["max_lag"] is not None:
        yield "Lags", f"up to {facts['max_lag']:,}"
    prints = state.run.content["fingerprints"]["model"]
    yield "Fingerprints", ", ".join(f"{name} {value}" for name, value in prints.items())


def _times(shape: list[int]) -> str:
    return " × ".join(f"{size:,}" for size in shape)


def _few(names: list[str], what: str) -> str:
    """How many, and the first of them."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"{plural(len(names), what)}: {', '.join(map(str, names[:SHOWN]))}{more}"


def _series(state: State) -> Iterator[tuple[str, str]]:
    run, survey, layout = state.run, state.run.survey, state.run.layout
    section = run.job.series
    yield "Path", section.path
    yield "Features", _few(list(survey.features), "feature")
    if survey.sites:
        yield "Sites", _few([site.name for site in survey.sites], "site")
    yield "Steps", f"{survey.steps:,}{_step(survey.axis)}"
    if not survey.sites and survey.axis.kind != "index":
        first, last = survey.times(np.array([0, survey.steps - 1]))
        yield "From, to", " to ".join(str(end).replace("T", " ").removesuffix(".000000") for end in (first, last))
    gaps = survey.gaps
    lost = int((gaps[:, 1] - gaps[:, 0]).sum()) if len(gaps) else 0
    yield "Missing", f"{plural(lost, 'step')} in {plural(len(gaps), 'gap')}; {plural(run.skipped, 'window')} touch one"
    yield "Windows", f"{layout.windows:,} of {run.windows.length:,} steps, stride {run.windows.stride:,}"
    if section.scaling:
        kept = f"undone by the chain rule: {state.terms.nouns} are per unit of the series"
        yield "Scaling", kept if state.scaled else "the model takes scaled inputs"
    steps = f", {layout.chunk_steps:,} output steps" if run.content["model"]["output_steps"] > 1 else ""
    yield "Layout", f"shards of {layout.shard_windows:,} windows, chunks of {layout.chunk_windows:,} windows{steps}"


def _step(axis: Any) -> str:
    if axis.calendar is not None:
        return f", every {axis.calendar} (pandas' word)"
    if axis.kind == "datetime":
        return f", {np.timedelta64(int(axis.step), 'us').astype(object)} apart"
    return f", {axis.step:g} apart" if axis.kind == "number" else ", numbered"


def _computation(state: State) -> Iterator[tuple[str, str]]:
    tally, choice = state.tally, state.run.choice
    yield "Planned", f"{choice.setting} ({choice.why})"
    if choice.kind:
        yield "Planned for", choice.kind
    for content, count in tally.settings.most_common(SHOWN):
        setting = Setting.from_json(json.loads(content))
        yield "Used", f"{setting}: {plural(count, 'shard')}"
        yield from (("Lost", what) for what in setting.lost)
    for trial in islice(sorted(choice.trials, key=lambda one: -(one.windows_per_second or 0)), SHOWN):
        yield "Timed", str(trial)
    if tally.sessions:
        last = tally.sessions[max(tally.sessions)]
        yield "Workers", f"{len(tally.workers):,} on {plural(len({host for host, _ in tally.workers}), 'host')}"
        yield (
            "Throughput",
            f"{last.rate:,.0f} windows/s over {duration(last.finished - last.started)}, the last driver's",
        )
        attempts = sorted(tally.attempts.items())
        yield "Attempts", ", ".join(f"{plural(count, 'shard')} at attempt {number}" for number, count in attempts)
        memory = (tally.peak_memory, tally.projected_memory)
        yield "Memory", "{} at most in one worker, {} projected".format(*map(human_bytes, memory))
    if tally.not_finite_shards:
        yield "Not finite", f"derivatives in {tally.not_finite_shards:,} shards are NaN or infinite"


def _audit(state: State) -> Iterator[tuple[str, str]]:
    audit: dict[str, Any] = state.run.content["audit"]
    yield "Vector-Jacobian product", f"agrees to {number(audit['vjp_error'])} of the largest entry compared"
    if audit.get("predict_error") is not None:
        yield "Predictions", f"agree with model.predict to {number(audit['predict_error'])} of the largest"
    if audit.get("predict_failed"):
        yield "Predictions", f"could not be compared with model.predict: {audit['predict_failed']}"
    forward = audit["jvp_error"]
    yield (
        "Jacobian-vector product",
        "not possible for this model" if forward is None else f"agrees to {number(forward)}",
    )
    yield "Central difference in float64", _difference(audit["difference_error"])
    if not audit["largest"]:
        yield "Zero", "the Jacobian is zero on the windows tried: does the output depend on the input?"
    if audit["not_finite"]:
        yield "Not finite", f"{audit['not_finite']:,} derivatives on the windows tried"


def _difference(error: float | None) -> str:
    if error is None:
        return "not possible: no float64 twin, or not finite"
    if error <= LARGE_DIFFERENCE:
        return f"agrees to {number(error)}"
    return f"differs by {number(error)}: the model bends within the step, or replaces its gradient on purpose"


def _versions(state: State) -> Iterator[tuple[str, str]]:
    yield from state.run.versions.items()
    for change in state.run.content.get("version_changes", []):
        yield from (("Changed", text) for text in differences(change["from"], change["to"]))


def job_text(state: State) -> str:
    """The job as it was resolved, in TOML's words; what was left out stays out."""
    content: dict[str, Any] = state.run.content["job"]
    lines = []
    for section, keys in content.items():
        if isinstance(keys, dict):
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {_toml(value)}" for key, value in keys.items() if value is not None]
    text = "\n".join(lines).strip()
    return text if len(text) <= LONGEST_JOB else f"{text[:LONGEST_JOB]}\n# … shortened: the whole job is in job.json"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items() if one is not None) + " }"
    return json.dumps(value, ensure_ascii=False)


def moment(seconds: float) -> str:
    """Seconds since 1970 as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
