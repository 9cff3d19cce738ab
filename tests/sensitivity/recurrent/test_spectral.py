"""Largest singular values, lag after lag, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from sensitivity.recurrent.spectral import SMALL, Largest

RANDOM = np.random.default_rng(0)


def products(rows: int, lags: int = 6, windows: int = 3, spread: float = 1.0) -> np.ndarray:
    """M, M·J, M·J·J, …: (lag, window, rows, rows). spread: of singular values, 0 for none."""
    product, found = np.broadcast_to(np.eye(rows), (windows, rows, rows)), []
    for _ in range(lags):
        found.append(product)
        turn = np.linalg.qr(RANDOM.standard_normal((windows, rows, rows)))[0]
        product = product @ turn @ np.diag(np.exp(spread * RANDOM.standard_normal(rows)))
    return np.array(found)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 0.0])
@pytest.mark.parametrize("rows", [SMALL, SMALL + 1, 2 * SMALL])
def test_of_products(rows, spread):
    largest = Largest()
    for matrices in products(rows, spread=spread):
        np.testing.assert_allclose(largest(matrices), np.linalg.norm(matrices, 2, (1, 2)), rtol=1e-6)


def test_what_changes_from_lag_to_lag_is_found_anew():
    """Nothing of the lag before is left to begin with."""
    largest, rows = Largest(), SMALL + 6
    for place in (0, 5, rows - 1):
        matrix = np.zeros((1, rows, rows))
        matrix[0, place, 0] = 2.0
        np.testing.assert_allclose(largest(matrix), 2.0, rtol=1e-6)


@pytest.mark.parametrize("rows", [3, SMALL + 1])
def test_zero_and_what_is_not_finite(rows):
    matrices = np.stack([np.zeros((rows, rows)), np.full((rows, rows), np.nan), np.eye(rows)])
    largest = Largest()
    for _ in range(2):
        np.testing.assert_allclose(largest(matrices), [0, np.nan, 1])
