"""One worker: a model and its compiled kernel, fed shards. Every runner computes shards through this."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np

from .candidates import halved
from .commits import Commit, Results, commit, read_commit
from .engine import Tuned
from .facts import CallFacts
from .machine import available_memory, peak_memory
from .model import target_of
from .patience import patiently
from .places import Place
from .plan import Shard, Workers, call_memory, worker_memory
from .room import room_in
from .series import first_windows, open_series
from .setting import Choice
from .store import Run, load_run_model
from .tuning import FEW, by_rule, tune
from .variables import Variable
from .writing import AtOnce, Gate, InBackground

Numbers = dict[str, np.ndarray]  # by variable, time first


class Worker:
    """Computes shards of one run.

    choice: the user's is kept. Else this worker takes what an earlier one of its kind has kept with the run, else a
    choice timed for its kind, else finds the fastest and keeps it for others. workers: of which this is one, with the
    memory that it may take; None: whatever is there. halvings: how often to halve its calls, for earlier workers died.
    overlap: results are written in a thread while the next are computed. held: bytes of this process for others.
    """

    def __init__(
        self,
        run: Run | Place | Path | str,
        choice: Choice | None = None,
        workers: Workers | None = None,
        halvings: int = 0,
        *,
        overlap: bool = False,
        held: int = 0,
    ) -> None:
        self.run = Run.open(run)
        self.run.require_versions()
        self._results, self._writer = Results(self.run), InBackground() if overlap else AtOnce()
        self._series = open_series(self.run.series, self.run.facts.dtype, self.run.facts.labels)
        self._target = target_of(
            load_run_model(self.run), self.run.facts, self.run.job.sensitivity.of, self.run.product
        )
        alone = Workers(1, self.run.job.run.cpus_per_worker, 0.0, available_memory())
        limited = workers is not None
        self._room = room_in(workers or alone, self.run.facts, self.run.layout, limited=limited, held=held)
        wanted = self.run.job.sensitivity
        self._wanted = wanted.model_copy(update=choice.asked) if choice else wanted
        if choice is None or choice.by != "given":  # what a worker has learned since is better than the plan's
            planned = choice if choice and choice.by == "timed" and choice.kind == self._room.kind else None
            choice = self.run.remembered(self._wanted, self._room.kind) or planned
        if halvings:
            choice = _smaller(choice or self._by_rule(), halvings, self.run.facts)
        if choice is not None and choice.call_bytes <= self._room.call:
            self.choice = choice
            self.kernel = Tuned(self._target, choice.setting, call_bytes=choice.call_bytes, limit=self._room.resident)
        else:
            self.choice, self.kernel = self._tuned(workers)

    def _by_rule(self) -> Choice:
        windows = self.run.layout.chunk_windows
        return by_rule(self._wanted, self._target, self._room, windows, "run.memory_per_worker")

    def _tuned(self, workers: Workers | None) -> tuple[Choice, Tuned]:
        run = self.run
        windows = first_windows(run.series, run.windows, run.job.run.dtype, FEW, run.facts.labels)
        share = -(-run.layout.windows // (workers.count if workers else 1))
        most = run.layout.chunk_windows
        choice, kernel = tune(self._wanted, self._target, windows, self._room, most, share)
        if choice.by == "timed":
            run.remember(self._wanted, choice)
        return choice, kernel

    def warm_up(self) -> None:
        """Trace and compile the kernel, so that the first shard is as fast as the others."""
        facts = self.run.facts
        with contextlib.suppress(MemoryError):  # a window that does not fit fails its shard, and says so there
            self.kernel(np.zeros((1, *facts.input_shape), facts.dtype))

    def compute(self, shard: Shard, attempt: int = 1) -> Commit:
        """Compute, write and commit one shard; a shard that is already committed is left as it is."""
        return self.begin(shard, attempt).result()

    def begin(self, shard: Shard, attempt: int = 1, gate: Gate | None = None) -> Future[Commit]:
        """The same, but for the last of its results, which may still be written: the next shard may begin meanwhile.

        Those of the shard before are written by then. gate: what lets them through.
        """
        done: Future[Commit] = Future()
        record = read_commit(self.run, shard)
        if record is not None:
            done.set_result(record)
            return done
        gate, started = gate or Gate(), time.time()
        beside, written, computed, not_finite = self._chunks(shard, gate)
        self._learn()
        record = self._record(shard, attempt, started, computed, not_finite)
        return self._writer.hand_after(self._finish, gate, shard, beside, written, record)

    def _chunks(self, shard: Shard, gate: Gate) -> tuple[Numbers, list[Future[None]], int, int]:
        """Compute a shard's chunks and hand them over: its other variables, chunks on their way, windows computed, and
        derivatives that are not finite.
        """
        product, *others = self.run.variables
        beside = self._nothing(others, shard.stop - shard.start)
        computed = not_finite = 0
        written: list[Future[None]] = []
        for start, stop in self.run.layout.chunks(shard):
            chunk = self._nothing([product], stop - start)
            own = {name: array[start - shard.start : stop - shard.start] for name, array in beside.items()}
            whole = self._differentiate(start, stop, {**chunk, **own})
            derived = chunk[product.name]
            computed += len(whole)
            not_finite += len(whole) * product.size - int(np.isfinite(derived).sum())  # others stand NaN
            written.append(self._writer.hand_over(self._write, gate, start, stop, derived))
            if len(written) > 1:
                written[-2].result()  # or there is no sense in going on
        return beside, written, computed, not_finite

    def _nothing(self, variables: Sequence[Variable], windows: int) -> Numbers:
        return {one.name: np.full((windows, *one.shape), np.nan, self.run.facts.dtype) for one in variables}

    def _record(self, shard: Shard, attempt: int, started: float, computed: int, not_finite: int) -> Commit:
        """What is known before the last chunk is written."""
        return Commit(
            shard=shard.index,
            start=shard.start,
            stop=shard.stop,
            job=self.run.fingerprint,
            chunks={},
            computed=computed,
            skipped=shard.stop - shard.start - computed,
            not_finite=not_finite,
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=started,
            finished=started,
            peak_memory=peak_memory(),
            setting=self.kernel.setting.to_json(),
            projected_memory=worker_memory(self.run.facts, self.choice, self.run.layout, timing=True),
            why=self.choice.why,
            token=self.run.token,
        )

    def _write(self, gate: Gate, start: int, stop: int, derived: np.ndarray) -> None:
        with gate.passed():
            self._results.write_chunks(start, stop, derived)

    def _finish(self, gate: Gate, shard: Shard, beside: Numbers, written: list[Future[None]], record: Commit) -> Commit:
        for chunk in written:
            chunk.result()
        with gate.passed(last=True):
            self._results.write_beside(shard, beside)
            chunks = self._results.make_durable(shard)
            attempt = gate.attempt or record.attempt
            return commit(self.run, replace(record, chunks=chunks, attempt=attempt, finished=time.time()))

    def _learn(self) -> None:
        """A call that had to be made smaller is what later workers of this kind begin with."""
        setting = self.kernel.setting
        if setting.bare != self.choice.setting.bare:
            self.choice = replace(self.choice, setting=setting, call_bytes=self.kernel.call_bytes)
            self.run.remember(self._wanted, self.choice)

    def _differentiate(self, start: int, stop: int, values: Numbers) -> np.ndarray:
        """Fill the variables for windows `[start, stop)`, which stand NaN; the indices of whole ones.

        Windows far apart are read call by call, so that the steps between them never stand in memory all at once.
        """
        windows = self.run.windows
        apart = windows.stride > windows.length
        size = self.run.facts.windows_summed(self.kernel.setting.windows_per_call) if apart else stop - start
        whole = []
        for first in range(0, stop - start, size):
            part = slice(first, min(first + size, stop - start))
            own = {name: array[part] for name, array in values.items()}
            found = self._differentiate_block(start + part.start, start + part.stop, own)
            whole.append(found + first)
        return np.concatenate(whole)

    def _read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows `[start, stop)`, and which are whole: those that were when the series was surveyed."""
        windows, whole = self._series.windows(self.run.windows, start, stop)
        skipped = self.run.windows.skipped(self.run.facts.missing(self.run.survey), start, stop)
        if (whole == skipped).any():
            raise OSError(f"windows {start} to {stop - 1} have other gaps than when the run began")
        return windows, whole

    def _differentiate_block(self, start: int, stop: int, values: Numbers) -> np.ndarray:
        """The same for windows whose steps are read at once.

        The derivative is by the series' own units: by the chain rule, the model's derivative over the scaling's std.
        """
        windows, is_whole = patiently(self.run.series.path, self._read, start, stop)
        whole = np.flatnonzero(is_whole)
        product, facts = self._target.product, self.run.facts
        scaled = self.run.job.series.scaling is not None and facts.source.kind == "input"
        std = self._series.std[facts.source_columns] if scaled else self._series.std
        for done, found in product.computed(self.kernel, lambda part: (windows[whole[part]],), len(whole)):
            shaped = {name: array.reshape(-1, *values[name].shape[1:]) for name, array in found.items()}
            for name, array in (product.in_units(shaped, std) if scaled else shaped).items():
                values[name][whole[done]] = array
        return whole


def _smaller(choice: Choice, halvings: int, facts: CallFacts) -> Choice:
    """The choice with its calls halved so many times, or as often as can be."""
    setting = choice.setting
    for _ in range(halvings):
        setting = halved(setting, facts) or setting
    if setting == choice.setting:
        return choice
    lost = f"{choice.setting.extent}: workers died"
    size = -(-choice.call_bytes * call_memory(facts, setting) // call_memory(facts, choice.setting))
    return replace(choice, setting=replace(setting, lost=(*setting.lost, lost)), call_bytes=size)
