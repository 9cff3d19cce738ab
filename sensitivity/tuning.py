"""Which kernel and setting fit this worker, and what happens when they do not after all.

`choose` is a rule from measured speeds: it takes what the job file gives and fills in the rest. A tuner that
times candidates on the worker takes its place here. `Tuned` runs the chosen kernel over any number of windows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import tensorflow as tf

from .errors import Refused
from .job import SensitivitySection
from .kernels import KERNELS, compile_kernel, why_not
from .model import CallFacts, Target
from .plan import Setting, call_memory, human_bytes

MOST_WINDOWS = 1024  # a one-threaded worker gains nothing beyond
MOST_OPERATIONS = 600  # in a graph for XLA: an LSTM unrolled over 100 steps has 1,800 and compiles for two minutes
MOST_ROWS = 8192  # windows × outputs a call: keeps a call near a second for recurrent sequences
_NO_XLA = (
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.NotFoundError,
    tf.errors.InternalError,
)


def choose(
    wanted: SensitivitySection, facts: CallFacts, memory: int, windows: int, *, key: str = "run.memory_per_worker"
) -> Setting:
    """The setting for a worker with `memory` bytes for one call, and at most `windows` windows to do at once.

    One output a window: `gradient`. Recurrent models: a loop over outputs, since pfor needs many times the memory
    there. Others: pfor. XLA where it is safe. What the job file gives is kept; `Refused` where it cannot be, in the
    name of `key` where the memory is too small.
    """
    setting = Setting(_kernel(wanted, facts), 1)
    if setting.kernel == "batch_jacobian":
        pfor = wanted.experimental_use_pfor
        at_once = wanted.parallel_iterations
        setting = replace(
            setting,
            experimental_use_pfor=not facts.recurrent if pfor == "auto" else pfor,
            parallel_iterations=None if at_once == "auto" else at_once,
        )
    setting = _with_xla(setting, facts)
    if wanted.windows_per_call != "auto":
        return replace(setting, windows_per_call=min(wanted.windows_per_call, windows))
    return replace(setting, windows_per_call=_windows_per_call(setting, facts, memory, windows, key))


def _with_xla(setting: Setting, facts: CallFacts) -> Setting:
    """XLA wherever it gives the tape's numbers, with the reason where it does not.

    XLA rounds differently. At a jump of the derivative, such as a ReLU's, that lands one window in ten thousand on
    the other side of the jump: by rights either is the derivative there, but it is not what the tape gives.
    """
    if facts.operations > MOST_OPERATIONS:
        return replace(setting, lost=(f"XLA: {facts.operations:,} operations would take minutes to compile",))
    if not facts.smooth:
        return replace(setting, lost=("XLA: the model's derivative has jumps, where another rounding shows",))
    if setting.kernel == "batch_jacobian" and setting.experimental_use_pfor and facts.recurrent:
        return replace(setting, lost=("XLA: it has no kernel for the lists that pfor makes of a recurrent loop",))
    return replace(setting, xla=True)


def _kernel(wanted: SensitivitySection, facts: CallFacts) -> str:
    if wanted.kernel == "auto":
        tape_asked = wanted.experimental_use_pfor != "auto" or wanted.parallel_iterations != "auto"
        return "gradient" if not tape_asked and why_not("gradient", facts) is None else "batch_jacobian"
    reason = why_not(wanted.kernel, facts)
    if reason is not None:
        able = [name for name in KERNELS if why_not(name, facts) is None]
        raise Refused(
            "sensitivity.kernel",
            given=f'"{wanted.kernel}": {reason}',
            allowed=", ".join(f'"{name}"' for name in ("auto", *able)),
            remedy='set it to "auto"',
        )
    return wanted.kernel


def _windows_per_call(setting: Setting, facts: CallFacts, memory: int, windows: int, key: str) -> int:
    size = max(1, min(MOST_WINDOWS, MOST_ROWS // facts.target_size))
    size = 1 << (size.bit_length() - 1)
    while size > 1 and call_memory(facts, replace(setting, windows_per_call=size)) > memory:
        size //= 2
    needed = call_memory(facts, replace(setting, windows_per_call=1))
    if needed > memory:
        raise Refused(
            key,
            given=f"{human_bytes(memory)} for one call",
            allowed=f"{human_bytes(needed)} or more, projected for a single window by {setting}",
            remedy="give more memory; in a job, run fewer workers, lower sensitivity.parallel_iterations, "
            "or set sensitivity.experimental_use_pfor = false",
        )
    return -(-windows // -(-windows // size))  # calls of one size, none of them filled up


class Tuned:
    """A compiled kernel that takes any number of windows and outlives running out of memory.

    Windows go through in calls of one static shape, the last one filled up by repeating its last window, so
    nothing is traced twice. Out of memory halves `windows_per_call` for good; a kernel that XLA cannot compile
    is compiled without it. `setting` is always the one in force.
    """

    def __init__(self, target: Target, setting: Setting) -> None:
        self.target = target
        self._adopt(setting)

    def _adopt(self, setting: Setting) -> None:
        self.setting = setting
        self._proved = False
        self._function = compile_kernel(self.target, setting)

    @property
    def traces(self) -> int:
        """How often the kernel in force was traced: 1 once used."""
        return self._function.experimental_get_tracing_count()

    def __call__(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(n, *input_shape)` → prediction `(n, *target_shape)`, Jacobian `(n, *target_shape, *input_shape)`."""
        facts = self.target.facts
        prediction = np.empty((len(windows), *facts.target_shape), facts.dtype)
        jacobian = np.empty((len(windows), *facts.target_shape, *facts.input_shape), facts.dtype)
        for done, part in self.calls(windows.__getitem__, len(windows)):
            prediction[done], jacobian[done] = part
        return prediction, jacobian

    def calls(
        self, windows: Callable[[slice], np.ndarray], count: int
    ) -> Iterator[tuple[slice, tuple[np.ndarray, np.ndarray]]]:
        """The same for `count` windows that are fetched call by call: which are done, their prediction and Jacobian."""
        start = 0
        while start < count:
            part = slice(start, min(start + self.setting.windows_per_call, count))
            result = self._call(windows(part))
            if result is not None:
                yield part, result
                start = part.stop

    def _call(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """One call, or None where the setting had to change first."""
        try:
            prediction, jacobian = self._function(tf.constant(self._filled(windows)))
            self._proved = True
            return prediction.numpy()[: len(windows)], jacobian.numpy()[: len(windows)]
        except (tf.errors.ResourceExhaustedError, MemoryError):
            self._halve()
        except _NO_XLA as error:
            if self._proved or not self.setting.xla:
                raise  # not the compiler's objection, but the model's to these windows
            self._drop_xla(error)
        return None

    def _filled(self, windows: np.ndarray) -> np.ndarray:
        short = self.setting.windows_per_call - len(windows)
        shaped = windows.reshape(len(windows), *self.target.facts.input_shape)
        return (
            np.concatenate([shaped, np.repeat(shaped[-1:], short, axis=0)]) if short else np.ascontiguousarray(shaped)
        )

    def _halve(self) -> None:
        size = self.setting.windows_per_call
        if size == 1:
            needed = human_bytes(call_memory(self.target.facts, self.setting))
            raise MemoryError(
                f"one window does not fit: {self.setting} is projected to need {needed}; "
                "give the worker more memory, or set sensitivity.experimental_use_pfor = false"
            )
        lost = f"{size} windows a call: out of memory"
        self._adopt(replace(self.setting, windows_per_call=size // 2, lost=(*self.setting.lost, lost)))

    def _drop_xla(self, error: Exception) -> None:
        reason = str(error).strip().partition("\n")[0][:200]
        self._adopt(replace(self.setting, xla=False, lost=(*self.setting.lost, f"XLA: {reason}")))


def use_threads(cpus: int, *, gpu: bool) -> None:
    """Hold this process to `cpus` threads, full precision, and to no GPU or one it takes memory of as it goes.

    Numbers depend on how work is split over threads, so this also makes runs repeatable. Only the first call in a
    process can set threads; one that comes after TensorFlow has started leaves them as they are.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its GEMMs keep three digits
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(cpus)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    with contextlib.suppress(RuntimeError):
        devices = tf.config.list_physical_devices("GPU") if gpu else []
        tf.config.set_visible_devices(devices, "GPU")
        for device in devices:
            tf.config.experimental.set_memory_growth(device, True)
