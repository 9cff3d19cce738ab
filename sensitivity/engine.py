"""A compiled kernel that takes any number of windows, within its memory, and outlives running out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from . import machine, meter
from .candidates import halved
from .device import on_host
from .errors import Refused
from .kernels import compile_kernel, pfor_fallbacks, signature
from .layers import holds_moments, nodes_of
from .model import Target
from .plan import call_memory, human_bytes
from .setting import Setting

_NO_XLA = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
    tf.errors.InternalError,
)
_OUT_OF_MEMORY = ("out of memory", "oom when", "resource_exhausted", "failed to allocate", "alloc_failed")


class Tuned:
    """A kernel in force.

    Windows go through in calls of one static shape, the last one filled up by repeating its last window, so nothing
    is traced twice; a call may cover only some of the outputs, and is then repeated for the others. Out of memory, or
    a process about to be, halves the call for good. A kernel that XLA cannot compile is compiled without it. `setting`
    is always the one in force, `call_bytes` what a call of it is projected to take, `limit` the process's most
    resident bytes, None where nothing limits it; `sums` of the last call's weights, where the target weighs.
    """

    def __init__(
        self, target: Target, setting: Setting, *, call_bytes: int | None = None, limit: int | None = None
    ) -> None:
        self.target = target
        self.limit_to(limit)
        self.sums, self._firsts = b"", dict[int, tf.Tensor]()
        self.call_bytes = call_memory(target.facts, setting) if call_bytes is None else call_bytes
        self._adopt(setting)

    def _adopt(self, setting: Setting) -> None:
        self.setting = setting
        self._proved, self._checked = False, False
        self._function = compile_kernel(self.target, setting)
        self._called = called_flat(self._function)  # its only trace, once there is one

    def limit_to(self, limit: int | None) -> None:
        """The process's most resident bytes from now on."""
        self.limit, self._tolerated = limit, 0

    @property
    def traces(self) -> int:
        """How often the kernel in force was traced: 1 once used."""
        return self._function.experimental_get_tracing_count()

    def stated_bytes(self) -> int | None:
        """Bytes that one call takes on the device, by XLA's own account before anything runs; None without XLA."""
        if not self.setting.xla:
            return None
        self._trace()
        return meter.stated(self._function, *signature(self.target, self.setting))

    def __call__(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(n, *input_shape)` → prediction `(n, *target_shape)`, derivatives `(n, *block_shape)`: of a Jacobian
        `(n, *target_shape, *kept_shape)`.
        """
        facts = self.target.facts
        prediction = np.empty((len(windows), *facts.target_shape), facts.dtype)
        derived = np.empty((len(windows), *facts.block_shape), facts.dtype)
        for done, part in self.calls(lambda part: (windows[part],), len(windows)):
            prediction[done], derived[done] = part
        return prediction, derived

    def calls(
        self, given: Callable[[slice], tuple[np.ndarray, ...]], count: int
    ) -> Iterator[tuple[slice, tuple[np.ndarray, np.ndarray]]]:
        """The same for `count` windows that are fetched call by call: which are done, their prediction and derivatives.

        given: windows, and what the product takes beside them; without it, what the product has for any window.
        """
        start = 0
        while start < count:
            part = slice(start, min(start + self.setting.windows_per_call, count))
            result = self._call(*given(part))
            if result is not None:
                yield part, result
                start = part.stop

    def _call(self, windows: np.ndarray, *beside: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """One call, its numbers read only, or None where the setting had to change first."""
        if self._is_beyond_limit():
            return None
        try:
            if not self._proved:
                self._trace()
            beside = beside or self.target.product.beside(self.target.facts, len(windows))
            shaped = windows.reshape(len(windows), *self.target.facts.input_shape)
            prediction, derived = self._all_rows([tf.constant(self._filled(part)) for part in (shaped, *beside)])
            self._proved = True
            return prediction[: len(windows)], derived[: len(windows)]
        except (tf.errors.OpError, MemoryError) as error:
            if is_out_of_memory(error):
                self._shrink("out of memory")
            elif isinstance(error, _NO_XLA) and self.setting.xla and not self._proved:
                self._drop_xla(error)
            else:
                raise  # not the compiler's objection, but the model's to these windows
        return None

    def _trace(self) -> None:
        with pfor_fallbacks() as operations:
            traced = self._function.get_concrete_function()
        self._called = called_flat(traced)
        if self.target.facts.rows_of == "derivatives":
            _require_exact(traced.graph.as_graph_def())
        lost = [f"pfor: {name} runs one output after another" for name in sorted(operations)]
        self.setting = replace(
            self.setting, lost=(*self.setting.lost, *(x for x in lost if x not in self.setting.lost))
        )

    def _all_rows(self, given: list[tf.Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """prediction and derivatives of one call's windows, block after block of rows where they are split."""
        facts, step = self.target.facts, self.setting.outputs_per_call
        whole = (len(given[0]), *facts.block_shape)
        if step is None:
            prediction, block = self._rows(0, given)
            return prediction, block.reshape(whole)
        derived = np.empty((len(given[0]), facts.rows, *facts.row_shape), facts.dtype)
        for first in facts.firsts(step):
            prediction, block = self._rows(first, given)
            derived[:, first : first + step] = block.reshape(len(derived), step, *facts.row_shape)
        return prediction, derived.reshape(whole)

    def _rows(self, first: int, given: list[tf.Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """prediction and derivatives of the rows from `first` on that one call takes, read only."""
        if first not in self._firsts:
            self._firsts[first] = tf.constant(first)
        prediction, block, *sums = self._called([self._firsts[first], *given])
        self.sums = sums[0].numpy().tobytes() if sums else b""
        return on_host(prediction), on_host(block)

    def _filled(self, part: np.ndarray) -> np.ndarray:
        short = self.setting.windows_per_call - len(part)
        return np.concatenate([part, np.repeat(part[-1:], short, axis=0)]) if short else np.ascontiguousarray(part)

    # ---- memory ------------------------------------------------------------------------------------

    def _is_beyond_limit(self) -> bool:
        """Shrink before a first call that is projected not to fit, and when the process has come too close.

        What TensorFlow has freed and kept counts as there. A process stays as large as it once was: it is asked again
        only when it has grown since.
        """
        if self.limit is None:
            return False
        resident, allowed = machine.resident_memory(), max(self.limit, self._tolerated)
        if not self._proved:
            there = max(0, allowed - resident + meter.reusable())
            if self._checked or self.call_bytes <= there:
                return False
            self._shrink(f"{human_bytes(self.call_bytes)} projected, {human_bytes(there)} there", there)
            return True
        if resident > allowed:
            self._tolerated = int(1.05 * resident)
            if self.setting.windows_per_call > 1:
                self._shrink(f"{human_bytes(resident)} resident, {human_bytes(self.limit)} allowed")
                self._checked = True  # smaller than one that just ran
                return True
        return False

    def _shrink(self, reason: str, there: int | None = None) -> None:
        """The same in smaller calls, or the end."""
        before = self.setting
        after = halved(before, self.target.facts)
        if after is None:
            have = machine.available_memory() if there is None else there
            raise MemoryError(
                f"one window does not fit: {before} is projected to need {human_bytes(self.call_bytes)}, "
                f"and {human_bytes(have)} are there; give the worker more memory, or run fewer workers"
            )
        facts = self.target.facts
        self.call_bytes = -(-self.call_bytes * call_memory(facts, after) // call_memory(facts, before))
        self._adopt(replace(after, lost=(*before.lost, f"{before.extent}: {reason}")))

    def _drop_xla(self, error: Exception) -> None:
        reason = str(error).strip().partition("\n")[0][:200]
        self._adopt(replace(self.setting, xla=False, lost=(*self.setting.lost, f"XLA: {reason}")))


def called_flat(function: Any) -> Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]:
    """A function of tensors, called with them in order. A concrete function binds names first, which takes 0.1 ms, as
    long as a small model's gradient; here only where TensorFlow has no `_call_flat`.
    """
    flat = getattr(function, "_call_flat", None)
    if flat is None:
        return lambda given: function(*given)
    return lambda given: flat(given, list(function.captured_inputs))


def _require_exact(graph: Any) -> None:
    """Refuse second derivatives past moments that a `tf.function` within has kept from an earlier trace."""
    if holds_moments(nodes_of(graph)):
        raise Refused(
            "sensitivity.product",
            given="second derivatives of a model with a tf.function within that was traced before, which holds "
            "TensorFlow's moments: their second derivative is not that of a variance",
            allowed="models whose tf.nn.moments is called anew",
            remedy="load the model anew and ask for this first, or drop the tf.function within it",
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory is what was missing: TensorFlow says so by its class, XLA and cuDNN only in words."""
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return True
    return isinstance(error, tf.errors.InternalError) and any(words in str(error).lower() for words in _OUT_OF_MEMORY)
