"""The device that a process computes on: its threads, its memory, its kind."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from . import machine
from .plan import MiB

GPU_SHARE = 0.9  # of a GPU's memory: the rest is its context, cuBLAS and cuDNN


def use_threads(cpus: int, *, gpu: bool, share: float = 1.0) -> None:
    """Hold this process to `cpus` threads, full precision, and to no GPU or one it takes memory of as it goes.

    share: of one GPU, below 1 where several workers have it together: its memory is then limited to as much.
    Numbers depend on how work is split over threads, so this also makes runs repeatable. Only the first call in a
    process can set threads; one that comes after TensorFlow has started leaves them as they are.
    """
    # One pool for all sizes: its statistics are exact, and recurrent loops run up to 1.4 times faster than on malloc.
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "true")
    os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(1 << 24))  # not its: budgets are kept by the tuner
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its GEMMs keep three digits
    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(cpus)
        tf.config.threading.set_inter_op_parallelism_threads(cpus)
    with contextlib.suppress(RuntimeError):
        devices = tf.config.list_physical_devices("GPU") if gpu else []
        tf.config.set_visible_devices(devices, "GPU")
        for device in devices:
            _hold_gpu(device, share)


def _hold_gpu(device: tf.config.PhysicalDevice, share: float) -> None:
    """TensorFlow takes either memory as it needs it, or a part of fixed size."""
    memory = gpu_memory() if share < 1 else None
    if memory is None:
        tf.config.experimental.set_memory_growth(device, True)
        return
    part = tf.config.LogicalDeviceConfiguration(memory_limit=int(memory * share * GPU_SHARE) // MiB)
    tf.config.set_logical_device_configuration(device, [part])


def on_host(tensor: tf.Tensor) -> np.ndarray:
    """A read-only array of a tensor's numbers. A tensor in the host's memory is not copied."""
    try:
        return np.asarray(memoryview(tensor))
    except (BufferError, TypeError, ValueError):  # of a device that gives no view, or a dtype that NumPy has not
        return tensor.numpy()


def has_gpu() -> bool:
    return bool(tf.config.get_visible_devices("GPU"))


def _ask_driver() -> str:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def gpu_memory(ask: Callable[[], str] = _ask_driver) -> int | None:
    """Bytes of this process's first GPU, as the driver tells; None where it does not. `ask`: MiB, a line a GPU."""
    sizes = [int(line) for line in ask().split() if line.isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    index = int(visible) if visible.isdigit() else 0
    return sizes[index] * MiB if index < len(sizes) else None


def call_budget(memory: int, *, share: float = 1.0, ask: Callable[[], str] = _ask_driver) -> int:
    """Bytes for one call: `memory` on a CPU; on a GPU its share of that GPU, as far as its size is known."""
    if not has_gpu():
        return memory
    total = gpu_memory(ask)
    return memory if total is None else int(total * share * GPU_SHARE)


def kind(cpus: int) -> str:
    """What settings are tuned for: two processes of one kind run alike."""
    if has_gpu():
        details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
        return f"gpu: {details.get('device_name', 'unnamed')}"
    return f"cpu: {machine.processor()}, {cpus} thread{'s' if cpus > 1 else ''}"
