"""Where workers fit: how many, of what size, on which nodes. Pure, as a plan is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import Refused
from .job import Job
from .plan import Workers, human_bytes
from .sections import RunSection


@dataclass(frozen=True)
class Node:
    """A machine's cores, GPUs and bytes of memory, as far as workers may have them."""

    cpus: int
    gpus: int
    memory: int

    def __str__(self) -> str:
        return f"{self.cpus} cores, {self.gpus} GPUs, {human_bytes(self.memory)}"


def place(job: Job, nodes: Sequence[Node], needed: int, shards: int, *, autoscale: bool = False) -> Workers:
    """The job's workers on these nodes, each with as much memory as so many can have. Raises `Refused`.

    Left to us, one worker per `cpus_per_worker` cores, or one per GPU share where there are GPUs; no more than have
    room to work, and than there are shards. needed: bytes that a worker takes before any window. autoscale: nodes are
    added for workers that find no room on these.
    """
    run = job.run
    gpus = (1.0 if any(node.gpus for node in nodes) else 0.0) if run.gpus_per_worker == "auto" else run.gpus_per_worker
    size = Workers(1, run.cpus_per_worker, float(gpus), run.memory_bytes or 0)
    if autoscale:
        return _asked_for(run, nodes, size, needed)
    if not nodes:
        raise Refused(
            "--address",
            given="a cluster of which no node takes workers",
            allowed="a cluster with nodes that have cores for them",
            remedy="add nodes, or give --autoscale if the cluster adds them by itself",
        )
    _require_largest(run, nodes, size)
    most = sum(fit(node, size) for node in nodes)
    if run.workers != "auto" and run.workers > most:
        raise Refused(
            "run.workers",
            given=run.workers,
            allowed=f"at most {most}, of {described(size)} each, on {_in_words(nodes)}",
            remedy='lower it, or leave it at "auto"',
        )
    if run.workers == "auto" and run.memory_bytes is None:
        most = max(1, sum(min(fit(node, size), node.memory // (2 * needed)) for node in nodes))
    count = min(most if run.workers == "auto" else run.workers, shards)
    return _require_room(_with_memory(size, nodes, count), needed)


def fit(node: Node, worker: Workers) -> int:
    """How many workers of that size a node holds."""
    most = node.cpus // worker.cpus
    if worker.gpus:
        # A worker's share is of one GPU: two of 0.6 need two.
        a_gpu = math.floor(1 / worker.gpus + 1e-9)
        most = min(most, node.gpus * a_gpu if worker.gpus < 1 else int(node.gpus // worker.gpus))
    return min(most, node.memory // worker.memory) if worker.memory else most


def memory_on(node: Node, worker: Workers) -> int:
    """What a worker may take on a node that may be filled with its like: no less than it was planned with."""
    return max(worker.memory, node.memory // max(1, fit(node, worker)))


def _with_memory(size: Workers, nodes: Sequence[Node], count: int) -> Workers:
    """So many workers, each with the most memory with which all of them find room."""
    if size.memory:
        return Workers(count, size.cpus, size.gpus, size.memory)
    shares = sorted({node.memory // k for node in nodes for k in range(1, min(fit(node, size), count) + 1)})
    low, high = 0, len(shares) - 1
    while low < high:
        middle = (low + high + 1) // 2
        sized = Workers(count, size.cpus, size.gpus, shares[middle])
        low, high = (middle, high) if sum(fit(node, sized) for node in nodes) >= count else (low, middle - 1)
    return Workers(count, size.cpus, size.gpus, shares[low])


def _asked_for(run: RunSection, nodes: Sequence[Node], size: Workers, needed: int) -> Workers:
    """Workers as the job file has them, whether there is room for them yet or not."""
    if run.workers == "auto":
        raise Refused(
            "run.workers",
            given='"auto" with --autoscale',
            allowed="a number: the cluster adds nodes for as many workers as wait for one",
            remedy="set run.workers",
        )
    if run.gpus_per_worker == "auto" and not size.gpus:
        raise Refused(
            "run.gpus_per_worker",
            given='"auto" with --autoscale, and no GPU is there yet',
            allowed="0, a whole number, or a fraction below 1",
            remedy="set it to what a worker is to have",
        )
    if size.memory:
        return _require_room(Workers(run.workers, size.cpus, size.gpus, size.memory), needed)
    room = sum(fit(node, size) for node in nodes)
    if not room:
        raise Refused(
            "run.memory_per_worker",
            given='"auto" with --autoscale, and no node is there that holds a worker',
            allowed="a size, which decides where workers fit",
            remedy='set it, such as memory_per_worker = "8GB"',
        )
    here = _with_memory(size, nodes, min(run.workers, room))
    return _require_room(Workers(run.workers, size.cpus, size.gpus, here.memory), needed)


def _require_largest(run: RunSection, nodes: Sequence[Node], size: Workers) -> None:
    """Refuse workers that no node can hold, by what they ask too much of."""
    gpus = sum(node.gpus for node in nodes)
    if size.gpus > max(node.gpus for node in nodes):
        raise Refused(
            "run.gpus_per_worker",
            given=f"{size.gpus:g}",
            allowed=f"at most {max(node.gpus for node in nodes)}, the GPUs of one node; {gpus} are here in all",
            remedy="lower it, set it to 0, or run on a cluster with GPUs (--address; --autoscale if it has none yet)",
        )
    if size.cpus > max(node.cpus for node in nodes):
        raise Refused(
            "run.cpus_per_worker",
            given=size.cpus,
            allowed=f"at most {max(node.cpus for node in nodes)}, the cores of one node",
            remedy="lower it",
        )
    without = Workers(1, size.cpus, size.gpus, 0)
    if not any(fit(node, without) for node in nodes):
        raise Refused(
            "run.cpus_per_worker, run.gpus_per_worker",
            given=described(without),
            allowed=f"what one node has: {_in_words(nodes)}",
            remedy="lower them, or add a node that is large enough",
        )
    if not any(fit(node, size) for node in nodes):
        raise Refused(
            "run.memory_per_worker",
            given=run.memory_per_worker,
            allowed=f"at most {human_bytes(max(node.memory for node in nodes))}, the memory of one node",
            remedy="lower it",
        )


def _require_room(workers: Workers, needed: int) -> Workers:
    if workers.memory <= needed:
        raise Refused(
            "run.memory_per_worker",
            given=f"{human_bytes(workers.memory)} for each of {workers.count} workers",
            allowed=f"more than {human_bytes(needed)}, what TensorFlow and the model take before any window",
            remedy="give workers more memory, or run fewer of them",
        )
    return workers


def described(worker: Workers) -> str:
    memory = f", {human_bytes(worker.memory)}" if worker.memory else ""
    return f"{worker.cpus} cores, {worker.gpus:g} GPUs{memory}"


def _in_words(nodes: Sequence[Node]) -> str:
    kinds = list(dict.fromkeys(map(str, nodes)))
    more = f"; and {len(kinds) - 5} kinds more" if len(kinds) > 5 else ""
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}: {'; '.join(kinds[:5])}{more}"
