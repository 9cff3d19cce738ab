"""Why a worker is lost, as far as Ray and the kernel tell."""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sensitivity import machine

ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Origin:
    """The node that a worker is on, and how many processes had been killed there for want of memory before."""

    node: str
    killed: int | None

    @classmethod
    def here(cls) -> Origin:
        return cls(ray.get_runtime_context().get_node_id(), machine.out_of_memory_kills())


def died_by_itself(error: RayError) -> bool:
    """Whether the worker's process ended and its node did not."""
    if isinstance(error, OutOfMemoryError):  # says Ray, which watches the node's
        return True
    return isinstance(error, ActorDiedError) and not error.preempted and "node has died" not in str(error)


def was_for_memory(error: RayError, before: Origin | None) -> bool | None:
    """Whether the kernel, or Ray, killed it for want of memory; None where neither can be asked."""
    if isinstance(error, OutOfMemoryError):
        return True
    if before is None:
        return None
    try:
        after = _killed_on(before.node)
    except (RayError, GetTimeoutError):
        return None
    return None if before.killed is None or after is None else after > before.killed


def _killed_on(node: str) -> int | None:
    if node == ray.get_runtime_context().get_node_id():
        return machine.out_of_memory_kills()
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    counted = ray.remote(num_cpus=0, max_retries=0)(machine.out_of_memory_kills).options(scheduling_strategy=there)
    return ray.get(counted.remote(), timeout=ANSWER_SECONDS)
