from __future__ import annotations

from collections import Counter

import dask
import dask.array as da
import numpy as np
import pytest

from sensitivity.query.tasks import Fused, tree

BLOCKS = 7


def counted(values: np.ndarray, reads: Counter, block_id: tuple[int, ...] | None = None) -> np.ndarray:
    reads[block_id] += 1
    return values


def lines(reads: Counter) -> da.Array:
    """Blocks of 3 of 0, 1, 2, …, whose reading is counted."""
    source = da.arange(3 * BLOCKS, chunks=3)
    return source.map_blocks(counted, reads=reads, dtype=source.dtype, meta=np.empty(0, source.dtype))


def summed(*arrays: da.Array) -> dask.delayed.Delayed:
    return tree(
        lambda *blocks: sum(block.sum() for block in blocks), arrays, [[(i,)] * len(arrays) for i in range(BLOCKS)], sum
    )


def test_a_block_is_read_inside_the_task_that_reduces_it():
    reads: Counter = Counter()
    array = lines(reads)
    missing = da.concatenate([array[:12], da.zeros(9, chunks=3, dtype=array.dtype)])  # as a run that is not complete
    total = summed(missing, missing.rechunk((3,) * BLOCKS) * 2)
    reduced = [task for task in dict(total.dask).values() if isinstance(task, tuple) and isinstance(task[0], Fused)]
    assert len(reduced) == BLOCKS
    assert all(len(task) == 1 for task in reduced)
    assert reads == {}
    assert total.compute(scheduler="sync") == 3 * np.arange(12).sum()
    assert reads == {(i,): 1 for i in range(4)}


def test_what_blocks_share_is_done_once():
    reads: Counter = Counter()
    array = lines(reads)
    assert summed(array - array.max()).compute(scheduler="sync") == (np.arange(21) - 20).sum()
    assert reads == {(i,): 1 for i in range(BLOCKS)}


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 9])
def test_a_tree_adds_up_all_blocks(blocks):
    array = da.ones(blocks, chunks=1)
    total = tree(np.sum, [array], [[(i,)] for i in range(blocks)], sum)
    assert total.compute(scheduler="sync") == blocks
    assert max(len(task[1]) for task in dict(total.dask).values() if task[0] is sum) <= 2
