"""Write, kill, damage, verify, repair, take over and resume in any order, against a model of what must be so."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sensitivity.commits import Commit, Results, chunk_keys, commit
from sensitivity.integrity import inspect, repair
from sensitivity.lease import _OWNER, Lease, LeaseLost, Owner, newest_token
from sensitivity.plan import Shard
from sensitivity.query import open_run
from sensitivity.store import Run
from tests.conftest import frame, job_writer, missing
from tests.sensitivity.test_store import started

POINTS = ("before data", "amid data", "after data", "before record", "torn record", "after record", None)
SHARDS = 7


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def empty_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("empty")
    started(job_writer(folder)(series=frame(60), run={"shard_windows": 8}))
    return folder / "run"


def values(shard: Shard) -> np.ndarray:
    """What a kernel would give for the shard: the same each time, different from any other shard's."""
    return np.random.default_rng(shard.index).standard_normal((shard.stop - shard.start, 1, 1, 6, 2)).astype("float32")


def compute(run: Run, shard: Shard, point: str | None) -> None:
    """What a worker does, which dies at that point."""
    results, jacobian = Results(run), values(shard)

    def passing(here: str) -> None:
        if here == point:
            raise Killed

    passing("before data")
    results.write_chunks(shard.start, shard.stop, jacobian)
    passing("amid data")
    results.write_beside(shard, {"prediction": jacobian[:, :, :, 0, 0]})
    passing("after data")
    chunks = results.make_durable(shard)
    passing("before record")
    if point == "torn record":
        run.place.write(f"commits/{shard.index:08d}.json", b'{"shard": 1, "st')
        raise Killed
    record = Commit(
        shard=shard.index,
        start=shard.start,
        stop=shard.stop,
        job=run.fingerprint,
        chunks=chunks,
        computed=8,
        skipped=0,
        not_finite=0,
        attempt=1,
        host="host",
        pid=1,
        started=0.0,
        finished=1.0,
        peak_memory=1,
        setting={},
    )
    commit(run, record)
    passing("after record")


class Machine(RuleBasedStateMachine):
    """committed: shards that are done and whole. damaged: done, but a chunk has changed. odd: a record stands there
    that does not count.
    """

    template: Path

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        shutil.copytree(self.template, self.folder / "run")
        self.place = Run.open(self.folder / "run").place
        self.committed: set[int] = set()
        self.damaged: set[int] = set()
        self.odd: set[int] = set()
        self.take_over()

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule()
    def take_over(self) -> None:
        """A new driver; the one before still believes that it owns the run."""
        before = getattr(self, "run", None)
        owner = Owner.me(newest_token(self.place) + 1)
        self.place.write(f"lease/{owner.token:08d}.json", _OWNER.dump_json(owner))
        self.run = Run.open(self.place).held(Lease(self.place, owner))
        if before is not None:
            with pytest.raises(LeaseLost):
                compute(before, before.layout.shard(0), None)

    @rule(index=st.integers(0, SHARDS - 1), point=st.sampled_from(POINTS))
    def work(self, index: int, point: str | None) -> None:
        """A driver computes only what is missing."""
        if index in self.committed | self.damaged:
            return
        try:
            compute(self.run, self.run.layout.shard(index), point)
        except Killed:
            pass
        if point in (None, "after record"):
            self.committed.add(index)
            self.odd.discard(index)
        elif point == "torn record":
            self.odd.add(index)

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), kind=st.sampled_from(["flip", "truncate", "delete", "swap", "flip record", "empty record"]))
    def damage(self, data: st.DataObject, kind: str) -> None:
        index = data.draw(st.sampled_from(sorted(self.committed)))
        keys = list(chunk_keys(self.run, self.run.layout.shard(index)))
        chunk = self.folder / "run" / "results.zarr" / data.draw(st.sampled_from(keys))
        record = self.folder / "run" / "commits" / f"{index:08d}.json"
        path = record if "record" in kind else chunk
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        if kind == "swap":
            others = sorted(self.committed - {index})
            if not others:
                return
            other = self.run.layout.shard(data.draw(st.sampled_from(others)))
            content = (self.folder / "run" / "results.zarr" / next(iter(chunk_keys(self.run, other)))).read_bytes()
            (self.folder / "run" / "results.zarr" / keys[0]).write_bytes(content)
        elif kind == "delete":
            path.unlink()
        elif kind == "truncate":
            path.write_bytes(content[:at])
        elif kind == "empty record":
            path.write_bytes(b"")
        else:
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        self.committed.discard(index)
        (self.odd if "record" in kind or kind == "delete" else self.damaged).add(index)

    @rule()
    def verify(self) -> None:
        found = {damage.shard for part in inspect(self.run) for damage in part.damages}
        assert found == self.damaged | self.odd

    @rule()
    def mend(self) -> None:
        assert repair(self.run, [damage for part in inspect(self.run) for damage in part.damages]) == []
        self.damaged.clear()
        self.odd.clear()
        self.verify()

    @rule()
    def resume(self) -> None:
        """One command goes on: what is missing is computed, and nothing else."""
        todo = missing(self.run)
        assert {shard.index for shard in todo} == set(range(SHARDS)) - self.committed - self.damaged
        for shard in todo:
            compute(self.run, shard, None)
            self.committed.add(shard.index)
            self.odd.discard(shard.index)

    @invariant()
    def what_is_served_is_right(self) -> None:
        if not hasattr(self, "run"):
            return
        dataset = open_run(self.place)
        for shard in self.run.layout.shards():
            part = dataset.isel(time=slice(shard.start, shard.stop))
            counts = shard.index in self.committed | self.damaged
            assert (part["committed"] == counts).all()
            if shard.index in self.committed:
                np.testing.assert_array_equal(part["jacobian"].values, values(shard))
            elif not counts:
                assert part["jacobian"].isnull().all()


def test_any_order_of_work_death_damage_and_repair(empty_run):
    class Here(Machine):
        template = empty_run

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    few = settings(
        max_examples=12, stateful_step_count=15, deadline=None, derandomize=True, suppress_health_check=checks
    )
    run_state_machine_as_test(Here, settings=few)
