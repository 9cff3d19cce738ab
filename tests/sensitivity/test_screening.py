"""DGSM and active subspaces against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from sensitivity import query
from sensitivity.errors import Refused
from tests.sensitivity.asking import dataset

WINDOWS = 200_000


def known(inputs: np.ndarray, gradient: np.ndarray, outputs: np.ndarray) -> xr.Dataset:
    """A model of three inputs at one lag: all `(window, …)`."""
    found = dataset(gradient[:, None, None, None, :], (WINDOWS // 2, WINDOWS // 2), freq="min")
    found["prediction"] = found["prediction"].copy(data=outputs[:, None, None])
    return found.assign_coords(input_std=("feature", inputs.std(axis=0)))


def test_ishigamis_bounds_are_those_in_closed_form():
    """f = sin x₁ + a sin² x₂ + b x₃⁴ sin x₁, x uniform in (−π, π)."""
    a, b = 7.0, 0.1
    x = np.random.default_rng(0).uniform(-np.pi, np.pi, (WINDOWS, 3))
    first, second, third = x.T
    gradient = np.stack(
        [
            np.cos(first) * (1 + b * third**4),
            2 * a * np.sin(second) * np.cos(second),
            4 * b * third**3 * np.sin(first),
        ],
        axis=1,
    )
    outputs = np.sin(first) + a * np.sin(second) ** 2 + b * third**4 * np.sin(first)
    uniform = f"uniform:{-np.pi}:{np.pi}"
    found = query.dgsm(known(x, gradient, outputs), distribution=uniform).compute().isel(output_step=0, output=0, lag=0)
    nu = np.array([0.5 + b * np.pi**4 / 5 + b**2 * np.pi**8 / 18, a**2 / 2, 8 * b**2 * np.pi**6 / 7])
    variance = a**2 / 8 + b * np.pi**4 / 5 + b**2 * np.pi**8 / 18 + 0.5
    np.testing.assert_allclose(found["nu"], nu, rtol=0.02)
    np.testing.assert_allclose(found["constant"], (2 * np.pi / np.pi) ** 2, rtol=1e-6)
    np.testing.assert_allclose(found["bound"], 4 * nu / variance, rtol=0.02)
    third_alone = 8 * b**2 * np.pi**8 / 225
    total = np.array([0.5 * (1 + b * np.pi**4 / 5) ** 2 + third_alone, a**2 / 8, third_alone])
    assert (found["bound"].values >= total / variance).all()
    by_std = query.dgsm(known(x, gradient, outputs), distribution="uniform").compute()["constant"]
    np.testing.assert_allclose(by_std, 4, rtol=0.02)
    assert "independent" in found.attrs["note"]


def test_bounds_of_a_linear_model_with_normal_inputs_are_its_indices():
    weights = np.array([1.0, -2.0, 0.5])
    stds = np.array([1.0, 0.5, 3.0])
    x = np.random.default_rng(1).standard_normal((WINDOWS, 3)) * stds
    source = known(x, np.broadcast_to(weights, x.shape).copy(), x @ weights)
    found = query.dgsm(source, distribution={"x_1": "normal:0.5"}).compute().isel(output_step=0, output=0, lag=0)
    exact = weights**2 * stds**2 / (weights**2 * stds**2).sum()
    np.testing.assert_allclose(found["bound"], exact, rtol=0.02)
    np.testing.assert_allclose(found["nu"], weights**2, rtol=1e-6)


def test_a_distribution_of_no_feature_is_refused():
    source = known(*(np.ones((WINDOWS, 3)), np.ones((WINDOWS, 3)), np.ones(WINDOWS)))
    with pytest.raises(Refused, match="x_0, x_1, x_2"):
        query.dgsm(source, distribution={"snow": "normal"})


def test_a_planted_direction_is_found():
    random = np.random.default_rng(2)
    direction = random.standard_normal(4 * 3)
    direction /= np.linalg.norm(direction)
    x = random.standard_normal((5000, 12))
    slopes = 2 * (x @ direction)  # of f(x) = (wᵀx)²
    values = (slopes[:, None] * direction + 1e-4 * random.standard_normal(x.shape)).reshape(-1, 1, 1, 4, 3)
    source = dataset(values, (1000, 4000)).assign_coords(input_std=("feature", np.ones(3)))
    found = query.active_subspace(source, components=2).compute().isel(output_step=0, output=0)
    vector = found["eigenvector"][0].values.ravel()
    np.testing.assert_allclose(abs(vector @ direction), 1, atol=1e-6)
    np.testing.assert_allclose(found["eigenvalue"][0], np.square(slopes).mean(), rtol=1e-4)
    assert found["share"][0] > 0.9999
    np.testing.assert_allclose(
        found["activity"].values.ravel(), found["eigenvalue"].values[0] * direction**2, atol=1e-5
    )
