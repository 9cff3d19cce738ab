"""The same engine in one process, for notebooks: `jacobian(model, windows)`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, overload

import keras
import numpy as np
from pydantic import ValidationError

from . import machine, meter
from .audit import few, require_independent, require_stateless
from .device import call_budget, has_gpu, kind
from .engine import Tuned
from .errors import Refused
from .findings import refusals
from .job import SensitivitySection, parse_bytes
from .kept import Found, Kept, State, kept_with
from .layers import leaf_layers
from .loading import in_full_precision
from .machine import available_memory
from .model import CallFacts, Target, describe_call
from .plan import MiB, bytes_per_window, human_bytes
from .progress import progress
from .saved_models import as_model
from .setting import Choice, Setting
from .tuning import BUILD_BYTES, Room, tune

LONG_SECONDS = 5.0  # work that takes longer shows its progress
MOST_AT_ONCE = 4096  # windows a call, at most: larger numbers of windows share their kernel
TIMED_ON = 256


@dataclass(frozen=True)
class Report:
    """How a Jacobian was computed: which kernel and setting, why, with how much memory, and what was lost.

    projected, measured: bytes above what the process had, of the whole call with its trials and its result. The first
    is said before the windows are run, from what the trials took; the second is None where the system does not tell.
    reused: the kernel was that of an earlier call. seconds: of it all.
    """

    setting: Setting
    choice: Choice
    projected: int
    measured: int | None
    windows: int
    seconds: float
    reused: bool

    @property
    def lost(self) -> tuple[str, ...]:
        return self.setting.lost

    def __str__(self) -> str:
        measured = "not known" if self.measured is None else human_bytes(self.measured)
        lines = [
            f"kernel    {self.setting}",
            f"chosen    {self.choice.why}" + (", by an earlier call" if self.reused else ""),
            f"memory    {human_bytes(self.projected)} projected, {measured} measured",
            f"time      {self.windows:,} windows in {self.seconds:.3g} s",
            *(f"lost      {what}" for what in self.lost),
            *(f"trial     {trial}" for trial in self.choice.trials),
        ]
        return "\n".join(lines)


@overload
def jacobian(
    model: keras.Model,
    windows: Any,
    memory: str | int | None = None,
    *,
    of: str = "output",
    output_steps: Sequence[int] | str | None = None,
    outputs: Sequence[str | int] | None = None,
    max_lag: int | None = None,
    kernel: str = "auto",
    windows_per_call: int | Literal["auto"] = "auto",
    experimental_use_pfor: bool | Literal["auto"] = "auto",
    parallel_iterations: int | Literal["auto"] = "auto",
    report: Literal[False] = False,
) -> np.ndarray: ...


@overload
def jacobian(
    model: keras.Model,
    windows: Any,
    memory: str | int | None = None,
    *,
    of: str = "output",
    output_steps: Sequence[int] | str | None = None,
    outputs: Sequence[str | int] | None = None,
    max_lag: int | None = None,
    kernel: str = "auto",
    windows_per_call: int | Literal["auto"] = "auto",
    experimental_use_pfor: bool | Literal["auto"] = "auto",
    parallel_iterations: int | Literal["auto"] = "auto",
    report: Literal[True],
) -> tuple[np.ndarray, Report]: ...


def jacobian(
    model: keras.Model,
    windows: Any,
    memory: str | int | None = None,
    *,
    of: str = "output",
    output_steps: Sequence[int] | str | None = None,
    outputs: Sequence[str | int] | None = None,
    max_lag: int | None = None,
    kernel: str = "auto",
    windows_per_call: int | Literal["auto"] = "auto",
    experimental_use_pfor: bool | Literal["auto"] = "auto",
    parallel_iterations: int | Literal["auto"] = "auto",
    report: bool = False,
) -> np.ndarray | tuple[np.ndarray, Report]:
    """∂ model(windows) / ∂ windows, window by window: `tape.batch_jacobian` that fits in memory, at its fastest.

    model: a Keras model, or what tf.saved_model.load gives, or a tf.Module that is called with windows. Of half
        precision it is computed in float32, and `Report.lost` says so.
    windows: `(batch, *source)`, usually `(batch, lag, feature)`; anything NumPy takes, in the model's units.
    memory: bytes to use above what the process has, as a number or "2GB": for a copy of the windows in the model's
        dtype, the result, the compiler and the calls. Of the compiler's 170 MB, what is beyond 340 MB is counted, so
        that from 510 MB on all is. On a GPU it bounds the calls there too. None: half of what is available.
    of: "output", or the name of one of several outputs.
    output_steps: only of these output steps, rising, negative ones from the end; or a slice of them, such as "10:".
    outputs: only of these of the target's channels, by number or by the names that a job gives them, in their order.
    max_lag: keep only the newest max_lag + 1 lags (all, where there are no more), counted back from the window's last
        step; of a causal recurrent model with an output at every step, from each output's own step, where lags before
        the window are zero.
    kernel: "auto", "gradient", "batch_jacobian", "forward" or "scan"; what is left at "auto", as windows_per_call,
        experimental_use_pfor and parallel_iterations, is chosen by timing on these windows, for 3 seconds or a fifth
        of the work, and kept with the model.
    report: return a `Report` as well.

    Returns `(batch, *target, *source)`, with max_lag `(batch, *target, max_lag + 1, feature)`, in the model's dtype,
    in units of the output per unit of the input; several outputs stand one after another along the target's last axis.
    The compiled kernel is kept with the model and serves further calls with the same shapes, with whatever weights the
    model then has.

    Raises `Refused` (a ValueError) for a model whose samples influence each other or that takes no such windows, and
    for a memory that the result or a single window is projected not to fit; MemoryError where one does not after all.
    """
    wanted = _wanted(
        of=of,
        output_steps=output_steps,
        outputs=outputs,
        max_lag=max_lag,
        kernel=kernel,
        windows_per_call=windows_per_call,
        experimental_use_pfor=experimental_use_pfor,
        parallel_iterations=parallel_iterations,
    )
    started = time.perf_counter()
    given, baseline = _given_bytes(memory), machine.resident_memory()
    with machine.span() as peak:
        model = in_full_precision(as_model(model))
        source = _source(windows, _dtype(model))
        store = kept_with(model)
        target = _described(model, source, wanted, store)
        copied = 0 if isinstance(windows, np.ndarray) and np.may_share_memory(source, windows) else source.nbytes
        budget = _Budget(given, baseline, copied, _result_bytes(target.facts, len(source)))
        key = (source.shape[1:], str(source.dtype), wanted)
        reused = _reused(store.kernels.get(key, {}), source, wanted, budget) if len(source) else None
        state = State.of(model, source)
        if reused is not None and not store.is_right(key, target, reused[1], source, state):
            store.forget()
            reused, target = None, _described(model, source, wanted, store)
        choice, engine = reused or _timed(store.kernels.setdefault(key, {}), wanted, target, budget, source)
        store.proved[key] = state.after(store.proved.get(key))
        engine.limit_to(budget.limit)
        searched = (peak() or baseline) - baseline
        ready = machine.resident_memory() - meter.reusable() - baseline
        needed = ready + (0 if has_gpu() else engine.call_bytes) + _result_bytes(target.facts, len(source))
        projected = int(1.1 * max(searched, needed)) + 16 * MiB
        result = _run(engine, source)
        highest = peak()
    if not report:
        return result
    measured = None if highest is None else highest - baseline
    seconds = time.perf_counter() - started
    return result, Report(engine.setting, choice, projected, measured, len(source), seconds, reused is not None)


def _wanted(**given: Any) -> SensitivitySection:
    try:
        return SensitivitySection(**given)
    except ValidationError as error:
        raise refusals(error, given, SensitivitySection, "") from None


def _source(windows: Any, dtype: str) -> np.ndarray:
    source = np.asarray(windows, dtype)
    if source.ndim < 2:
        raise Refused(
            "windows",
            given=f"an array of shape {source.shape}",
            allowed="(batch, lag, feature), or any shape that begins with the batch",
            remedy="add a batch axis: windows[None]",
        )
    return source


def _described(model: keras.Model, source: np.ndarray, wanted: SensitivitySection, store: Kept) -> Target:
    """The target, proved on these windows to have a Jacobian of each, the first time."""
    of = wanted.of
    key = (source.shape[1:], of, *wanted.selection.values(), str(source.dtype))
    facts = store.facts.get(key)
    if facts is None:
        require_stateless(model)
        facts = describe_call(model, source.shape[1:], of=of, dtype=str(source.dtype), **wanted.selection)
        if len(source):
            require_independent(Target(model, facts, of), few(source))
            store.facts[key] = facts
    return Target(model, facts, of)


@dataclass(frozen=True)
class _Budget:
    """Bytes above the baseline for `jacobian`, and what of them a copy of the windows and the result take."""

    bytes: int
    baseline: int
    copied: int
    result: int

    @property
    def compiler(self) -> int:
        return min(BUILD_BYTES, max(0, self.bytes - 2 * BUILD_BYTES))

    @property
    def limit(self) -> int | None:
        """The process's most resident bytes, where what compiles is counted in and it is the host that computes."""
        return self.baseline + self.bytes if self.compiler and not has_gpu() else None

    def room(self, compiler: int) -> Room:
        """What is left for a call beside the result, the windows' copy and the compiler."""
        left = self.bytes - self.result - self.copied - compiler
        if left <= 0:
            parts = {"the Jacobian": self.result, "a copy of the windows": self.copied, "compiling": compiler}
            raise Refused(
                "memory",
                given=human_bytes(self.bytes),
                allowed=f"more than {human_bytes(self.bytes - left)}, taken beside any call: "
                + ", ".join(f"{human_bytes(size)} for {what}" for what, size in parts.items() if size),
                remedy="give more memory or fewer windows at a time, or run a job, which keeps results on disk",
            )
        limit = None if self.limit is None else self.limit - self.result  # which is not there yet
        return Room(min(left, call_budget(left)), limit, has_gpu(), kind(machine.cores()))


def _result_bytes(facts: CallFacts, windows: int) -> int:
    return windows * bytes_per_window(facts)


def _reused(
    kept: dict[int, Found], source: np.ndarray, wanted: SensitivitySection, budget: _Budget
) -> tuple[Choice, Tuned] | None:
    """A kernel of an earlier call, if one serves."""
    most, room = _most_at_once(len(source), wanted), budget.room(0)
    found = next((there for there in kept.values() if there.serves(len(source), most, room)), None)
    return None if found is None else (found.choice, found.engine)


def _timed(
    kept: dict[int, Found], wanted: SensitivitySection, target: Target, budget: _Budget, source: np.ndarray
) -> tuple[Choice, Tuned]:
    """The fastest kernel, by trials on these windows; kept for later calls."""
    if not len(source):
        setting = Setting("batch_jacobian", 1)
        return Choice(setting, "rule", 0), Tuned(target, setting)
    most, room = _most_at_once(len(source), wanted), budget.room(budget.compiler)
    some = np.ascontiguousarray(source[np.linspace(0, len(source) - 1, min(TIMED_ON, len(source))).astype(int)])
    choice, engine = tune(wanted, target, some, room, most, len(source), key="memory")
    kept[most] = Found(choice, engine, len(source), most, room.call)
    return choice, engine


def _most_at_once(windows: int, wanted: SensitivitySection) -> int:
    """Windows a call at most: rounded up by an eighth at most, so that other numbers of windows share the kernel."""
    if wanted.windows_per_call != "auto":
        return min(wanted.windows_per_call, windows)
    unit = max(1, 1 << max(0, windows.bit_length() - 4))
    return min(MOST_AT_ONCE, -(-windows // unit) * unit)


def _run(engine: Tuned, source: np.ndarray) -> np.ndarray:
    """All windows; what will take longer than `LONG_SECONDS`, as its first call tells, shows its progress."""
    facts, started = engine.target.facts, time.time()
    result = np.empty((len(source), *facts.target_shape, *facts.kept_shape), facts.dtype)
    advance = None
    with ExitStack() as shown:
        for done, (_, block) in engine.calls(source.__getitem__, len(source)):
            result[done] = block
            if advance is not None:
                advance(done.stop - done.start, started)
            elif (time.time() - started) * (len(source) / done.stop - 1) > LONG_SECONDS:
                advance = shown.enter_context(progress(len(source), 0))
                advance(done.stop, started)
    return result


def _given_bytes(memory: str | int | None) -> int:
    if memory is None:
        return available_memory() // 2
    if isinstance(memory, str):
        return parse_bytes(memory)
    if memory <= 0:
        raise Refused("memory", given=memory, allowed="a positive number of bytes", remedy='write it as "2GB", say')
    return int(memory)


def _dtype(model: keras.Model) -> str:
    dtypes = {str(layer.dtype_policy.variable_dtype) for layer in leaf_layers(model) or [model]}
    return "float64" if "float64" in dtypes else "float32"
