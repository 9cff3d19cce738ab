"""What there is to run on."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from sensitivity import machine
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.placement import Node
from sensitivity.plan import Workers

MEMORY_SHARE = 0.8  # of what is there: Ray's own monitor kills workers beyond 0.95 of a node


def local() -> list[Node]:
    """This machine, its GPUs as TensorFlow sees them."""
    import tensorflow as tf

    gpus = len(tf.config.list_physical_devices("GPU"))
    return [Node(machine.cores(), gpus, int(machine.available_memory() * MEMORY_SHARE))]


def hold(job: Job, *, gpu: bool) -> None:
    """Hold this process to a worker's threads and, unless it computes itself, to no GPU. Before any operation."""
    from sensitivity.device import use_threads

    gpus = 1.0 if job.run.gpus_per_worker == "auto" else float(job.run.gpus_per_worker)
    share = Workers(1, job.run.cpus_per_worker, gpus, 0).gpu_share
    use_threads(job.run.cpus_per_worker, gpu=gpu and gpus > 0, share=share)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep from the terminal what TensorFlow's C++ says, unless something goes wrong that is not refused in words."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except (Refused, KeyboardInterrupt):
            raise
        except BaseException:
            said.seek(0)
            os.write(kept, said.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
