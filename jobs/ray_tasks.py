"""A Dask graph on Ray: each of its tasks is one of Ray's, and results go from worker to worker, not through here.

`dask.config.set(scheduler=get)` is all it takes, once `ray.init` has been called. Ray's own `ray.util.dask` submits
all tasks at once, changes `dask.persist` on import, and raises errors that no `except` of ours knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import ray
from dask.core import flatten, get_dependencies
from dask.order import order

from sensitivity.query.tasks import Fused

TRIES_AGAIN = 3  # after a lost worker, or an OSError; what a ValueError says stays true
HOW: Any = {"num_cpus": 1, "num_returns": 2, "max_retries": TRIES_AGAIN, "retry_exceptions": [OSError]}
PER_CPU = 4  # tasks in flight, some of which wait for others


@ray.remote(**HOW)
def _run(task: Fused, *results: Any) -> tuple[None, Any]:
    """The first result says that there is a second, which stays where it is."""
    return None, task(*results)


def get(graph: Any, keys: Any, **_: Any) -> Any:
    """Results of `keys`, nested as these are."""
    tasks: dict[Any, Any] = dict(graph if isinstance(graph, Mapping) else graph.__dask_graph__())
    asked = [*flatten(keys)] if isinstance(keys, list) else [keys]
    found: dict[Hashable, Any] = {}
    pending: list[Any] = []
    try:
        _submit(tasks, asked, found, pending)
        _wait(pending, 0)
        results = dict(zip(asked, ray.get([found[key] for key in asked]), strict=True))
    except ray.exceptions.RayTaskError as error:
        # The few tasks in flight run out: one that is cancelled while it completes ends this process (ray#54785, 2.60).
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    return _nested(keys, results)


def _submit(tasks: dict[Any, Any], asked: list[Hashable], found: dict[Hashable, Any], pending: list[Any]) -> None:
    """Submit all tasks, a bounded number at a time; a result is let go once nobody asks for it any more."""
    needs = {key: sorted(get_dependencies(tasks, key), key=str) for key in tasks}
    users = Counter(asked) + Counter(need for key in tasks for need in needs[key])
    most = PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
    place = order(tasks)
    for key in sorted(tasks, key=place.__getitem__):
        _wait(pending, most)
        task = Fused(_only, {key: tasks[key]}, (key,), tuple(needs[key]))
        done, found[key] = _run.remote(task, *[found[need] for need in needs[key]])
        pending.append(done)
        users.subtract(needs[key])
        for need in needs[key]:
            if not users[need]:
                del found[need]


def _only(result: Any) -> Any:
    return result


def _wait(pending: list[Any], most: int) -> None:
    """Until fewer than `most` tasks are in flight, or none; the first that fails raises."""
    while pending and len(pending) >= most:
        done, pending[:] = ray.wait(pending)
        ray.get(done)


def _nested(keys: Any, results: dict[Hashable, Any]) -> Any:
    return [_nested(key, results) for key in keys] if isinstance(keys, list) else results[keys]
