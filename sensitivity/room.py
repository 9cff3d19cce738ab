"""Where a kernel is to run: what it has of memory, and on which device."""

from __future__ import annotations

from dataclasses import dataclass

from .device import call_budget, has_gpu, kind
from .facts import ModelFacts
from .plan import Layout, Workers, room_for_a_call

NEAR = 0.95  # of a worker's memory: resident bytes at which its calls are made smaller
UNSEEN_GPU = "gpu: a worker's"


@dataclass(frozen=True)
class Room:
    """Where a kernel is to run. call: bytes for one call. resident: the process's most resident bytes, None where
    nothing limits them. kind: of device, as settings are kept for.
    """

    call: int
    resident: int | None = None
    gpu: bool = False
    kind: str = ""


def room_in(workers: Workers, facts: ModelFacts, layout: Layout, *, limited: bool, held: int = 0) -> Room:
    """What one of `workers` has for a call, on the device that this process holds.

    limited: this process is such a worker, and not to outgrow its memory, beside bytes `held` for others.
    """
    on_gpu = has_gpu()
    call = call_budget(room_for_a_call(workers.memory, facts, layout), share=workers.gpu_share)
    # A driver sees no GPU of its workers': what they have for a call, they find out themselves.
    device = UNSEEN_GPU if workers.gpus and not on_gpu else kind(workers.cpus)
    return Room(call, held + int(NEAR * workers.memory) if limited and not on_gpu else None, on_gpu, device)
