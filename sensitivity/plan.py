"""What will be done, before anything is: windows, shards, chunks, bytes, workers, projected memory.

Pure: numbers in, a `Plan` out. No TensorFlow, no Ray, no file is touched. `Refused` is what cannot fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from . import walks
from .errors import Refused
from .job import Job
from .setting import Choice, Setting
from .survey import Survey
from .windows import Windows

if TYPE_CHECKING:
    import numpy as np

    from .facts import CallFacts, ModelFacts

MiB = 1 << 20
MOST_CHUNK_BYTES = (1 << 31) - (1 << 20)  # Blosc compresses no more at once
CHUNK_BYTES = 32 * MiB  # Dask reads chunks of tens of MB well
SHARD_BYTES = 2 * MiB  # below this, committing a shard costs more than it saves
SHARDS_WANTED = 32  # enough that workers finish together and a lost shard costs little
RUNTIME_BYTES = 1050 * MiB  # a process that has imported TensorFlow (700) and compiled kernels by XLA (up to 350)


@dataclass(frozen=True)
class Shard:
    """Windows `[start, stop)`, the unit of work and of resume."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """How the windows are cut in the store. `chunk_steps`: what a chunk holds of the dim that the product is cut along,
    output steps usually: all where they fit.
    """

    windows: int
    shard_windows: int
    chunk_windows: int
    chunk_steps: int

    @property
    def shard_count(self) -> int:
        return -(-self.windows // self.shard_windows)

    def shard(self, index: int) -> Shard:
        start = index * self.shard_windows
        return Shard(index, start, min(start + self.shard_windows, self.windows))

    def shards(self) -> Shards:
        return Shards(self, range(self.shard_count))

    def chunks(self, shard: Shard) -> Iterator[tuple[int, int]]:
        """The shard's windows, chunk by chunk: `(start, stop)`."""
        for start in range(shard.start, shard.stop, self.chunk_windows):
            yield start, min(start + self.chunk_windows, shard.stop)


class Shards(Sequence[Shard]):
    """Some of a layout's shards, made when they are asked for: there may be a million of them."""

    def __init__(self, layout: Layout, indices: Sequence[int] | np.ndarray) -> None:
        self._layout, self._indices = layout, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Shard]:
        return (self._layout.shard(int(index)) for index in self._indices)

    @overload
    def __getitem__(self, which: int) -> Shard: ...
    @overload
    def __getitem__(self, which: slice) -> Shards: ...
    def __getitem__(self, which: int | slice) -> Shard | Shards:
        if isinstance(which, slice):
            return Shards(self._layout, self._indices[which])
        return self._layout.shard(int(self._indices[which]))


@dataclass(frozen=True)
class Workers:
    """count workers, each with `cpus` cores, `gpus` GPUs (a fraction shares one) and `memory` bytes."""

    count: int
    cpus: int
    gpus: float
    memory: int

    @property
    def gpu_share(self) -> float:
        """Of one GPU: 1 for a worker that has a whole one, several or none."""
        return min(self.gpus, 1.0) or 1.0


@dataclass(frozen=True)
class Plan:
    layout: Layout
    skipped: int
    workers: Workers
    choice: Choice
    window_bytes: int
    worker_bytes: int
    facts: ModelFacts
    features: tuple[str, ...]
    sites: int = 0
    short_sites: int = 0

    @property
    def setting(self) -> Setting:
        return self.choice.setting

    @property
    def seconds(self) -> float | None:
        """Projected time of the kernel's work on all workers, where it was timed."""
        rate = self.choice.windows_per_second
        computed = (self.layout.windows - self.skipped) * self.facts.points
        return None if rate is None else computed / (rate * self.workers.count)

    @property
    def timing_bytes(self) -> int:
        """Projected peak bytes of a process that times kernels before it works."""
        return worker_memory(self.facts, self.choice, self.layout, timing=True)

    @property
    def stored_bytes(self) -> int:
        """Uncompressed bytes of all variables."""
        return self.layout.windows * self.window_bytes

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Of one chunk of the product, `time` first."""
        return self.layout.chunk_windows, *self.facts.variables[0].chunk(self.layout.chunk_steps)


def plan_run(
    job: Job, survey: Survey, facts: ModelFacts, choice: Choice, workers: Workers, free_bytes: int | None = None
) -> Plan:
    """Compose the plan. `free_bytes`: space where the store will stand, None where unknown.

    Raises `Refused` where there is no window, or where what is projected cannot fit.
    """
    windows = count_windows(survey, facts.length, job.windows.stride)
    size = facts.window_bytes
    layout = cut(windows.count, size, facts.variables[0].cut_size, job.run.shard_windows)
    plan = Plan(
        layout=layout,
        skipped=windows.skipped_count(facts.missing(survey)),
        workers=workers,
        choice=choice,
        window_bytes=size,
        worker_bytes=worker_memory(facts, choice, layout),
        facts=facts,
        features=survey.features,
        sites=len(survey.sites),
        short_sites=int((windows.per_site == 0).sum()),
    )
    _require_room(plan, free_bytes)
    return plan


def count_windows(survey: Survey, length: int, stride: int) -> Windows:
    windows = survey.windows(length, stride)
    if not windows.count:
        longest = max([site.steps for site in survey.sites] or [survey.steps])
        raise Refused(
            "windows.length",
            given=f"{length} steps",
            allowed=f"at most {longest}, the steps of the {'longest site' if survey.sites else 'series'}",
            remedy="shorten the window (and the model's input), or give a longer series",
        )
    return windows


def result_bytes(facts: CallFacts) -> int:
    """Bytes of one window's derivatives and prediction, as a call gives them."""
    return (facts.rows * facts.row_size + facts.target_size) * facts.itemsize


def cut(windows: int, window_bytes: int, steps: int, shard_windows: int | str = "auto") -> Layout:
    """Shards of whole chunks: chunks of about 32 MiB, shards of one chunk unless the job file says more.

    Short series are cut finer, to give every worker several shards, down to shards of about 2 MiB, all of one size.
    The cut depends on the job alone, not on the machine, so that the same job gives the same store anywhere.
    A window too large for one chunk is split over so many `steps`; the last source's lags always stay together.
    """
    fits = max(1, CHUNK_BYTES // window_bytes)
    if shard_windows == "auto":
        several = max(-(-windows // SHARDS_WANTED), SHARD_BYTES // window_bytes, 1)
        shard = chunk = -(-windows // _even_count(-(-windows // min(fits, several))))
    else:
        wanted = min(int(shard_windows), windows)
        chunk = -(-wanted // -(-wanted // fits))
        shard = chunk * -(-wanted // chunk)
    if window_bytes > CHUNK_BYTES:
        steps = max(1, min(steps, CHUNK_BYTES * steps // window_bytes))
    return Layout(windows, min(shard, windows), min(chunk, windows), steps)


def _even_count(shards: int) -> int:
    """A few shards are made a number that most numbers of workers divide: none then waits for another's last shard."""
    return -(-shards // 12) * 12 if 2 <= shards <= 8 * 12 else shards


# ---- projected memory ------------------------------------------------------------------------------


def call_memory(facts: CallFacts, setting: Setting) -> int:
    """Projected bytes of one call of `windows_per_call` windows, results included: a first guess, from shapes."""
    return kernel_memory(facts, setting) + summing_memory(facts, setting)


def summing_memory(facts: CallFacts, setting: Setting) -> int:
    """Bytes that a product of many points of each window takes to add up what its calls give: the sums, derivatives as
    sums take them, and those of windows that are done.
    """
    size = setting.windows_per_call
    moved = 3 * size * (facts.input_size + facts.source_size) * facts.itemsize  # the points, and what they are made of
    return 0 if facts.points == 1 else (size + 2 * facts.windows_summed(size)) * result_bytes(facts) + moved


def kernel_memory(facts: CallFacts, setting: Setting) -> int:
    """Bytes of the kernel's part of it.

    The tape keeps every activation of the forward pass, and its gradient as much again for each output that is
    differentiated at once. A recurrent step keeps about eight numbers a unit, twice that where the outputs are looped
    over, and the loop keeps its results in a list before it stacks and turns them. Measured in bytes a window, where
    the rule gives in brackets: LSTM(64), 200 steps, 200 outputs, pfor 44 (94) MB, loop 4.6 (4.7) MB; LSTM(32), 100
    steps, 100 outputs, pfor 8.2 (11.7) MB, loop 0.59 (0.68) MB. A worker's tuner measures and corrects it.
    """
    if setting.kernel == "scan":
        return setting.windows_per_call * _scan_numbers(facts, setting) * facts.itemsize
    gradient = setting.kernel == "gradient"
    looped = not gradient and not setting.experimental_use_pfor
    recurrent = sum((16 if looped else 8) * length * units for length, units in facts.recurrent)
    activations = facts.activations + recurrent + facts.source_size
    backward = at_once(facts, setting) * (activations + facts.activations + facts.source_size)
    rows = setting.outputs_per_call or facts.rows
    result = (2 if gradient else 6 if looped else 3) * rows * (max(facts.source_size, facts.row_size) + 1)
    tapes = 1 if facts.rows_of in ("outputs", "vectors") else 2  # a gradient that is differentiated is on a tape, too
    kept = tapes * (activations + facts.activations + backward)
    if gradient:  # a sample for every row
        samples = setting.windows_per_call * rows
        taped = min(samples, facts.together or samples)
        return (taped * kept + setting.windows_per_call * (result + rows * facts.target_size)) * facts.itemsize
    return setting.windows_per_call * (kept + result) * facts.itemsize


def _scan_numbers(facts: CallFacts, setting: Setting) -> int:
    if facts.scan is None:
        raise ValueError(f"no scan serves this model: {facts.no_scan}")
    rows, steps = setting.outputs_per_call or facts.rows, facts.source.shape[0]
    features, summed = facts.source_size // steps, facts.rows_of == "vectors"
    return walks.numbers(facts.scan, facts.walk(rows), steps, features, rows, facts.lags, summed=summed)


def at_once(facts: CallFacts, setting: Setting) -> int:
    """Rows of the Jacobian, or columns in forward mode, that are computed side by side."""
    if not setting.over_rows:
        return 1
    if not setting.experimental_use_pfor:
        return setting.parallel_iterations or 1
    every = facts.source_size if setting.kernel == "forward" else setting.outputs_per_call or facts.rows
    return min(every, setting.parallel_iterations or every)


def fixed_memory(facts: CallFacts) -> int:
    """Projected bytes of a worker before any call: the runtime, and the weights with a frozen copy of them."""
    return RUNTIME_BYTES + 3 * facts.parameters * facts.itemsize


def worker_memory(facts: ModelFacts, choice: Choice, layout: Layout, *, timing: bool = False) -> int:
    """Projected peak bytes of a worker: fixed, one call, and the results of a shard. timing: it timed kernels too."""
    call = choice.tried_bytes if timing else choice.call_bytes
    return fixed_memory(facts) + (0 if choice.on_gpu else call) + result_memory(facts, layout)


def room_for_a_call(memory: int, facts: ModelFacts, layout: Layout) -> int:
    """Bytes for one kernel call in a worker of `memory` bytes, beside its fixed needs and its results. Raises `Refused`
    where there are none.
    """
    fixed, results = fixed_memory(facts), result_memory(facts, layout)
    if memory <= fixed + results:
        at_once = "one window" if layout.chunk_windows == 1 else f"{layout.chunk_windows:,} windows"
        raise Refused(
            "run.memory_per_worker",
            given=f"{human_bytes(memory)} a worker",
            allowed=f"more than {human_bytes(fixed + results)}: {human_bytes(results)} for the results of {at_once} "
            f"({human_bytes(facts.window_bytes)} a window) and {human_bytes(fixed)} for TensorFlow and the model",
            remedy="give more memory or run fewer workers; or store less of a window: fewer outputs, some of its lags "
            "(max_lag), one layer's weights, or another product, such as hvp, gram or gradient_norm",
        )
    return memory - fixed - results


def result_memory(facts: ModelFacts, layout: Layout) -> int:
    """Bytes of one chunk of results with its copy while another is written, and of two shards' predictions."""
    chunk = layout.chunk_windows * (3 * facts.window_bytes + 4 * facts.input_size * facts.itemsize)
    small = sum(variable.size for variable in facts.variables[1:])
    return chunk + 3 * layout.shard_windows * small * facts.itemsize


def require_memory(needed: int, setting: Setting, workers: Workers) -> None:
    """Refuse workers that are projected to need more than they have."""
    if needed > workers.memory:
        raise Refused(
            "run.memory_per_worker",
            given=f"{human_bytes(workers.memory)} for each of {workers.count} workers",
            allowed=f"{human_bytes(needed)} or more, projected for {setting}",
            remedy="give workers more memory, run fewer workers, or lower sensitivity.windows_per_call, "
            "sensitivity.parallel_iterations or run.shard_windows",
        )


def _require_room(plan: Plan, free_bytes: int | None) -> None:
    require_memory(plan.worker_bytes, plan.setting, plan.workers)
    chunk = math.prod(plan.chunk_shape) * plan.facts.itemsize
    if chunk > MOST_CHUNK_BYTES:
        raise Refused(
            "sensitivity.product",
            given=f"{plan.facts.variables[0].name}, of which a window's smallest part takes {human_bytes(chunk)}",
            allowed=f"at most {human_bytes(MOST_CHUNK_BYTES)}, what a chunk of a store can hold",
            remedy="choose outputs, a shorter window or another product: hvp, jvp and vjp never form so much",
        )
    if free_bytes is not None and plan.stored_bytes > free_bytes:
        raise Refused(
            "run.path",
            given=f"{human_bytes(plan.stored_bytes)} to be stored (before compression)",
            allowed=f"at most {human_bytes(free_bytes)}, the free space there",
            remedy="choose a path with more space, or raise windows.stride",
        )


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
