"""One task a block: all that no other block needs is read and reduced inside it, so what leaves a task are sums.

Dask fuses most of this by itself, but not where windows were selected, or a run is not complete; then blocks would be
tasks of their own, held longer than needed, and sent from one worker to another. Of several questions that are computed
together each would then read the store for itself: those put within `shared_blocks` have the blocks in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
from dask.array.optimization import optimize
from dask.base import tokenize
from dask.core import get_dependencies
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from dask.utils import ensure_dict

Graph = dict[Any, Any]
Key = Any  # a text, or a tuple of these and numbers
Reduce = Callable[[list[Any]], Any]
Places = Sequence[tuple[int, ...]]
SHARED = -1
_blocks_are_shared = ContextVar("blocks are shared", default=False)
TOGETHER = 2  # results added at a time: fewer are held than with more


@contextmanager
def shared_blocks() -> Iterator[None]:
    """Questions put in here, and computed together, read each block once: it is held until the last has had it."""
    before = _blocks_are_shared.set(True)
    try:
        yield
    finally:
        _blocks_are_shared.reset(before)


def blocks_are_shared() -> bool:
    return _blocks_are_shared.get()


@dataclass(frozen=True)
class Fused:
    """A function of blocks, and the part of a graph that makes these of `outer` tasks' results."""

    function: Callable[..., Any]
    tasks: Graph
    blocks: tuple[Key, ...]
    outer: tuple[Key, ...]

    def __call__(self, *results: Any) -> Any:
        known = {key: (_Known(result),) for key, result in zip(self.outer, results, strict=True)}
        return self.function(*dask.get({**self.tasks, **known}, list(self.blocks)))


@dataclass(frozen=True)
class _Known:
    result: Any

    def __call__(self) -> Any:
        return self.result


def tree(function: Callable[..., Any], arrays: Sequence[da.Array], places: Sequence[Places], added: Reduce) -> Delayed:
    """A function of one block of each of `arrays`, for each entry of `places`, added up in a tree."""
    shared: list[Any] = [*arrays[:1]] if blocks_are_shared() else []
    graph = {key: task for array in arrays[len(shared) :] for key, task in dict(array.__dask_graph__()).items()}
    wanted = [[(array.name, *place) for array, place in zip(arrays, row, strict=True)] for row in places]
    name = f"sums-{tokenize(function, added, wanted)}"
    # As tasks and not as layers, which Dask would copy into all that come after them.
    graph = ensure_dict(optimize(graph, [key for keys in wanted for key in keys[len(shared) :]]))
    made, keys = fused(function, graph, wanted, name), [(name, 0, i) for i in range(len(wanted))]
    level = 0
    while level == 0 or len(keys) > 1:
        level, below = level + 1, [keys[i : i + TOGETHER] for i in range(0, len(keys), TOGETHER)]
        keys = [(name, level, i) for i in range(len(below))]
        made |= {key: (added, parts) for key, parts in zip(keys, below, strict=True)}
    return Delayed(keys[0], HighLevelGraph.from_collections(name, made, shared), layer=name)


def fused(function: Callable[..., Any], graph: Graph, wanted: Sequence[Sequence[Key]], name: str) -> Graph:
    """`graph` with one task `(name, 0, i)` in place of all that only the blocks `wanted[i]` need. Blocks that are not
    in it are handed to the task.
    """
    needs = {key: get_dependencies(graph, key) for key in graph}
    owner = _owners(needs, wanted)
    inside: list[Graph] = [{} for _ in wanted]
    made: Graph = {}
    for key, block in owner.items():
        (made if block == SHARED else inside[block])[key] = graph[key]
    for i, (tasks, blocks) in enumerate(zip(inside, wanted, strict=True)):
        asked = {*blocks}.union(*(needs[key] for key in tasks))
        outer = tuple(sorted(asked - {*tasks}, key=str))
        made[name, 0, i] = (Fused(function, tasks, tuple(blocks), outer), *outer)
    return made


def _owners(needs: dict[Any, set[Any]], wanted: Sequence[Sequence[Key]]) -> dict[Any, int]:
    """Which block alone needs a task, `SHARED` where several do; each task is looked at twice, at most."""
    owner: dict[Any, int] = {}
    for block, keys in enumerate(wanted):
        waiting = list(keys)
        while waiting:
            key = waiting.pop()
            if key not in needs or owner.get(key) in (block, SHARED):
                continue
            owner[key] = SHARED if key in owner else block
            waiting.extend(needs[key])
    return owner
