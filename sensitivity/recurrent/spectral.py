"""Largest singular values of the products of Jacobians of a walk, lag after lag.

Of small matrices M from all eigenvalues of M·Mᵀ; of large ones by subspace iteration, begun where the lag before ended:
from lag to lag the leading left singular vectors hardly turn, since M is multiplied from the right. One vector is drawn
anew each time, for what those of the lag before do not reach.

G. H. Golub and C. F. Van Loan, "Matrix Computations", 4th ed. 2013, section 8.2.4.
"""

from __future__ import annotations

import math

import numpy as np

SMALL = 64  # rows, up to which all eigenvalues cost little
_VECTORS, _TURNS, _CLOSE = 4, 50, 1e-10


class Largest:
    """Of the matrices `(window, row, column)` of one lag after another, `(window)`; NaN of one that is not finite."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._vectors: np.ndarray | None = None  # (window, row, vector)

    def __call__(self, matrices: np.ndarray) -> np.ndarray:
        finite = np.isfinite(matrices).all((1, 2))
        found = np.full(len(matrices), math.nan)
        if matrices.shape[1] <= SMALL:
            found[finite] = _exactly(matrices[finite])
            return found
        drawn = self._random.standard_normal((*matrices.shape[:2], _VECTORS))
        if self._vectors is not None:
            drawn[..., :-1] = self._vectors[..., :-1]
        self._vectors = np.linalg.qr(drawn)[0]
        found[finite], self._vectors[finite] = _by_turns(matrices[finite], self._vectors[finite])
        return found


def _exactly(matrices: np.ndarray) -> np.ndarray:
    """The root of the largest eigenvalue of M·Mᵀ: exact to rounding, as it is the largest."""
    squares = matrices @ matrices.swapaxes(1, 2)
    return np.sqrt(np.maximum(np.linalg.eigvalsh(squares)[:, -1], 0))


def _by_turns(matrices: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest, and the vectors in the end; of matrices that do not settle exactly."""
    turned_over = matrices.swapaxes(1, 2)
    values = np.full(len(matrices), math.nan)
    settled = np.zeros(len(matrices), bool)
    for _ in range(_TURNS):
        turned = turned_over @ vectors
        before, values = values, _exactly(turned.swapaxes(1, 2))
        settled = abs(values - before) <= _CLOSE * values
        if settled.all():
            break
        vectors = np.linalg.qr(matrices @ turned)[0]
    values[~settled] = _exactly(matrices[~settled])
    return values, vectors
