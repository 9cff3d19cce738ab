"""How a scan walks back through a sequence, and what that takes: pure, from numbers.

Three ways, of which the one with the fewest rows a step is taken (`kernels/blocks.py` has the derivations):

    whole    one walk over all steps
    blocks   blocks of steps side by side, with rows for the states between them, joined by matrix products
    spans    for lags up to a limit: some output steps with the lags before them, side by side, overlapping
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MOST_JOINED, LEAST_LENGTH = 16, 16  # blocks that are joined each with each; steps of one that joins its neighbours
WORTH = 1.4  # times the rows a step of a walk over blocks are worth joining for
FEW_ROWS = 8  # from here on, a step's own matrices are worth forming
MATRICES = 10  # rows that forming them costs as much as
PRODUCT = 0.25  # time of a multiplication in the large products that join blocks, by that of one in a walk


@dataclass(frozen=True)
class ScanFacts:
    """What a walk back takes, in numbers a window.

    outputs: that an output step has; 0 where all are of the last step. states: in all cells. saved: kept of each step
    by the forward pass. seeds: of each output step. head: of one output after the last step. row: of one row's
    adjoints. matrices: of one step's.
    """

    outputs: int
    states: int
    saved: int
    seeds: int
    head: int
    row: int
    matrices: int


@dataclass(frozen=True)
class Walk:
    """kind: see above. length: steps of a block, output steps of a span. count: of blocks or spans. before: steps that
    the first block of those for lags up to a limit has before the first output step.
    """

    kind: Literal["whole", "blocks", "spans"]
    length: int
    count: int = 1
    before: int = 0


def of_all_lags(scan: ScanFacts, steps: int, features: int, output_at: Sequence[int]) -> Walk:
    """For the outputs of the steps `output_at`, of a window of `steps` with `features` numbers each."""
    length = -(-steps // MOST_JOINED)
    count = -(-steps // length)
    rows = scan.outputs * sum(step + 1 for step in output_at) / steps
    joined = scan.outputs * len(output_at) * _products(scan, length, features) * count / 2 / steps
    if rows <= WORTH * (scan.states + length * scan.outputs / 2 + joined):
        return Walk("whole", steps)
    return Walk("blocks", length, count)


def of_last_lags(scan: ScanFacts, lags: int, features: int, steps: int, before: int, *, apart: bool) -> Walk:
    """For the outputs of `steps` steps, each by its last `lags`.

    before: steps of the window before the first of them, up to lags - 1. apart: they do not follow one another.
    """
    if apart:
        return Walk("spans", 1, steps)
    length = min(steps, max(1, math.isqrt(2 * MATRICES * lags // scan.outputs)))
    spans = steps * (scan.outputs * (lags + length / 2) + MATRICES * (lags + length) / length)
    seen = before + steps
    joined = min(seen, max(LEAST_LENGTH, scan.states // scan.outputs, -(-lags // MOST_JOINED)))
    products = scan.outputs * _products(scan, joined, features) * min(seen, lags) / joined
    blocks = seen * (scan.states + joined * scan.outputs / 2 + MATRICES + products)
    if spans <= blocks:
        return Walk("spans", length, -(-steps // length))
    return Walk("blocks", joined, -(-seen // joined), before)


def _products(scan: ScanFacts, length: int, features: int) -> float:
    """Joining one output with one earlier block, in pulls of a row through a step."""
    return PRODUCT * scan.states * (scan.states + length * features) / max(scan.matrices, scan.row)


def numbers(
    scan: ScanFacts, walk: Walk, steps: int, features: int, rows: int, lags: int, *, summed: bool = False
) -> int:
    """Of one window of `steps` steps: what the forward pass keeps, the rows' adjoints and what becomes of them, the
    result with what it is put together from.

    features: numbers of a step of the window. rows: outputs a call; summed: sums of outputs of all steps. lags: that
    the result has of each.
    """
    result = rows * lags * features
    kept = 4 * steps * scan.saved // 3 + _seeds(scan, walk, rows * steps if summed else rows)
    alone = rows if walk.kind == "whole" else walk.length * scan.outputs
    beside = alone + (scan.states if walk.kind == "blocks" else 0)  # rows of one sample
    matrices = scan.matrices if beside >= FEW_ROWS else 0
    walked = walk.count * (4 * beside * scan.row + 2 * matrices + scan.saved)
    if walk.kind == "whole":
        return kept + walked + 4 * result
    if walk.kind == "spans":
        emitted = walk.count * alone * (lags + walk.length) * features
        return kept + walked + 2 * emitted + 3 * result
    emitted = walk.count * beside * (walk.length * features + scan.states)
    return kept + walked + 2 * emitted + 4 * result


def _seeds(scan: ScanFacts, walk: Walk, rows: int) -> int:
    if not scan.outputs:
        return 2 * rows * scan.head
    seeded = rows // scan.outputs if walk.kind == "whole" else walk.count * walk.length
    return 2 * seeded * scan.seeds
