"""What a piece of work takes of memory at its peak.

Measured, by the device's own statistics and the resident set; or stated beforehand, by XLA's compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import tensorflow as tf

from . import machine

_kept = 0  # the most that TensorFlow's CPU allocator has held in this process: it gives nothing back


@dataclass
class Reading:
    """peak: bytes above what was held before; None where the system does not let us measure."""

    peak: int | None = None


@contextlib.contextmanager
def measured(*, gpu: bool = False) -> Iterator[Reading]:
    """Within, measure. On a GPU its memory, else this process's."""
    with _on_gpu() if gpu else _on_cpu() as reading:
        yield reading


def stated(function: tf.types.experimental.PolymorphicFunction, *arguments: tf.TensorSpec) -> int | None:
    """Bytes of an XLA function's results, temporaries and constants, as its compiler lays them out; runs nothing.

    None where the compiler objects or does not tell. Scratch that libraries take by themselves is not in it, nor is
    what holds the arguments.
    """
    try:
        from tensorflow.compiler.xla.service import hlo_pb2

        answer = function.experimental_get_compiler_ir(*arguments)(stage="optimized_hlo_proto_serialized")
        buffers = hlo_pb2.HloProto.FromString(answer).buffer_assignment.buffer_allocations
    except (ImportError, ValueError, tf.errors.OpError):
        return None
    return sum(buffer.size for buffer in buffers if not buffer.is_entry_computation_parameter)


def reusable() -> int:
    """Resident bytes that TensorFlow's CPU allocator has freed and will use again."""
    return max(0, max(_kept, _statistics("CPU:0")["peak"]) - _statistics("CPU:0")["current"])


@contextlib.contextmanager
def _on_gpu() -> Iterator[Reading]:
    reading, before = Reading(), _restart("GPU:0")
    yield reading
    peak = _statistics("GPU:0")["peak"]
    reading.peak = peak - before["current"] if peak else None


@contextlib.contextmanager
def _on_cpu() -> Iterator[Reading]:
    """Large blocks come from an allocator with statistics, which keeps what it frees; small ones from the C library.

    What the first took is what its statistics say. What the resident set grew beyond that is of the second.
    """
    global _kept
    machine.trim()
    before = _restart("CPU:0")
    kept = _kept = max(_kept, before["peak"])
    reading, known, resident = Reading(), machine.restart_peak(), machine.resident_memory()
    yield reading
    peak = _statistics("CPU:0")["peak"]
    _kept = max(kept, peak)
    if known:
        grown = max(0, machine.recent_peak() - resident)
        reading.peak = max(0, peak - before["current"]) + max(0, grown - max(0, peak - kept))


def _restart(device: str) -> dict[str, int]:
    found = _statistics(device)
    with contextlib.suppress(ValueError):
        tf.config.experimental.reset_memory_stats(device)
    return found


def _statistics(device: str) -> dict[str, int]:
    try:
        return tf.config.experimental.get_memory_info(device)
    except ValueError:  # an allocator without statistics
        return {"current": 0, "peak": 0}
