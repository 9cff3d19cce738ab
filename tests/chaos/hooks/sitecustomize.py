"""Kills the process it is loaded into at a named point of the product's code, each named point once, or holds it there.

Python imports this by its name where its folder is on PYTHONPATH: drivers and Ray's workers alike. CHAOS_DIR holds
one file a planned kill, `<number> <point>`; the process that removes it dies at that point. Where it holds a file
`held <point>`, whoever comes to that point waits for as long as the file is there.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def claimed(point: str) -> bool:
    """Whether a kill at this point is planned, and is ours."""
    for plan in sorted(Path(os.environ["CHAOS_DIR"]).glob(f"* {point}")):
        try:
            plan.unlink()
        except FileNotFoundError:
            continue
        return True
    return False


def die_if_claimed(point: str) -> None:
    if claimed(point):
        die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_if_held(point: str) -> None:
    """Come back once nothing holds this point. `reached <point>` tells that somebody waits, or waited, there."""
    held, end = Path(os.environ["CHAOS_DIR"], f"held {point}"), time.monotonic() + 900  # the test may be gone
    while held.exists() and time.monotonic() < end:
        held.with_name(f"reached {point}").touch()
        time.sleep(0.01)


def before(point: str, owner: Any, name: str) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        die_if_claimed(point)
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(point: str, owner: Any, name: str) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        die_if_claimed(point)
        return found

    setattr(owner, name, wrapped)


def in_commits(module: Any) -> None:
    before("before data", module.Results, "write_chunks")
    before("after data", module.Results, "make_durable")
    after("after sync", module.Results, "make_durable")
    after("amid data", module.Results, "write_chunks")


def in_worker(module: Any) -> None:
    before("before record", module, "commit")
    after("after record", module, "commit")
    begin = module.Worker.begin

    def held_begin(worker: Any, shard: Any, *rest: Any) -> Any:
        wait_if_held(f"shard {shard.index}")
        return begin(worker, shard, *rest)

    module.Worker.begin = held_begin


def in_folders(module: Any) -> None:
    """Between a record's scratch file and its link."""
    link = os.link

    def linked(source: Any, target: Any, **options: Any) -> None:
        if "commits" in str(target):
            die_if_claimed("mid record")
        link(source, target, **options)

    module.os.link = linked


def in_zarr(module: Any) -> None:
    put = module._put

    def half_put(path: Path, value: Any, exclusive: bool = False) -> int:
        if "/results.zarr/" in str(path) and path.name.startswith("c.") and claimed("mid chunk"):
            content = value.to_bytes()
            path.with_suffix(f".{'0' * 32}.partial").write_bytes(content[: len(content) // 2])
            die()
        return put(path, value, exclusive)

    module._put = half_put


def in_tuning(module: Any) -> None:
    module.LEAST_SECONDS = 0.0  # the first setting that runs is taken: the same in every run
    before("during tuning", module, "_time")


def in_template(module: Any) -> None:
    before("during template", module, "_write_labels")


def in_store(module: Any) -> None:
    before("before job.json", module, "seal")


def in_driver(module: Any) -> None:
    before("driver hears", module._Tally, "add")


PATCHES: dict[str, Callable[[Any], None]] = {
    "sensitivity.commits": in_commits,
    "sensitivity.worker": in_worker,
    "sensitivity.folders": in_folders,
    "sensitivity.tuning": in_tuning,
    "sensitivity.template": in_template,
    "sensitivity.store": in_store,
    "zarr.storage._local": in_zarr,
    "jobs.driver": in_driver,
}


class Finder:
    """Patches a module once it is loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)  # or we would find ourselves
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                PATCHES[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "CHAOS_DIR" in os.environ:
    sys.meta_path.insert(0, Finder())
