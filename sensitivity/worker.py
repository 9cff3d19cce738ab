"""One worker: a model and its compiled kernel, fed shards. Every runner computes shards through this."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np

from .commits import Commit, Results, commit, read_commit
from .machine import peak_memory
from .model import Target
from .plan import Setting, Shard
from .series import open_series
from .store import Run, load_run_model
from .tuning import Tuned


class Worker:
    """Computes shards of one run. `setting` None: the one the run began with."""

    def __init__(self, path: Path | str, setting: Setting | None = None) -> None:
        self.run = Run.open(path)
        self._results = Results(self.run)
        self._series = open_series(self.run.series, self.run.facts.dtype)
        target = Target(load_run_model(self.run), self.run.facts, self.run.job.sensitivity.of)
        self.kernel = Tuned(target, setting or self.run.setting)

    def warm_up(self) -> None:
        """Trace and compile the kernel, so that the first shard is as fast as the others."""
        facts = self.run.facts
        self.kernel(np.zeros((1, *facts.input_shape), facts.dtype))

    def compute(self, shard: Shard, attempt: int = 1) -> Commit:
        """Compute, write and commit one shard; a shard that is already committed is left as it is."""
        done = read_commit(self.run, shard)
        if done is not None:
            return done
        started = time.time()
        facts, layout = self.run.facts, self.run.layout
        prediction = np.full((shard.stop - shard.start, facts.output_steps, len(facts.outputs)), np.nan, facts.dtype)
        computed = not_finite = 0
        for start, stop in layout.chunks(shard):
            block = prediction[start - shard.start : stop - shard.start]
            jacobian = np.full((*block.shape, facts.length, facts.features), np.nan, facts.dtype)
            whole = self._differentiate(start, stop, block, jacobian)
            computed += len(whole)
            not_finite += len(whole) * jacobian[0].size - int(np.isfinite(jacobian).sum())  # others stand NaN
            self._results.write_jacobian(start, stop, jacobian)
        self._results.write_prediction(shard, prediction)
        record = Commit(
            shard=shard.index,
            start=shard.start,
            stop=shard.stop,
            job=self.run.fingerprint,
            chunks=self._results.make_durable(shard),
            computed=computed,
            skipped=shard.stop - shard.start - computed,
            not_finite=not_finite,
            attempt=attempt,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=started,
            finished=time.time(),
            peak_memory=peak_memory(),
            setting=self.kernel.setting.to_json(),
        )
        commit(self.run, record)
        return record

    def _differentiate(self, start: int, stop: int, prediction: np.ndarray, jacobian: np.ndarray) -> np.ndarray:
        """Fill `prediction` and `jacobian` for windows `[start, stop)`, which stand NaN; the indices of whole ones.

        Windows far apart are read call by call, so that the steps between them never stand in memory all at once.
        """
        windows = self.run.windows
        apart = windows.stride > windows.length
        size = self.kernel.setting.windows_per_call if apart else stop - start
        whole = []
        for first in range(0, stop - start, size):
            part = slice(first, min(first + size, stop - start))
            found = self._differentiate_block(start + part.start, start + part.stop, prediction[part], jacobian[part])
            whole.append(found + first)
        return np.concatenate(whole)

    def _differentiate_block(self, start: int, stop: int, prediction: np.ndarray, jacobian: np.ndarray) -> np.ndarray:
        """The same for windows whose steps are read at once.

        The derivative is by the series' own units: by the chain rule, the model's derivative over the scaling's std.
        """
        windows, is_whole = self._series.windows(self.run.windows, start, stop)
        whole = np.flatnonzero(is_whole)
        scaled = self.run.job.series.scaling is not None
        for done, (predicted, derived) in self.kernel.calls(lambda part: windows[whole[part]], len(whole)):
            prediction[whole[done]] = predicted.reshape(-1, *prediction.shape[1:])
            derived = derived.reshape(-1, *jacobian.shape[1:])
            jacobian[whole[done]] = derived / self._series.std if scaled else derived
        return whole
