from __future__ import annotations

import math

import numpy as np
import pytest

from sensitivity.errors import Refused
from sensitivity.recurrent import Decay, gradient_decay


def decay(logs, windows: int = 0, first: int = 0) -> Decay:
    logs = np.atleast_2d(np.asarray(logs, "float64"))
    return Decay("lstm", "forward", "|J|", "norm", logs, windows or len(logs), first)


def test_an_exponential_is_fitted_exactly():
    found = decay(math.log(3) + np.arange(12) * math.log(0.84))
    assert found.fit.rate == pytest.approx(0.84, rel=1e-12)
    assert found.fit.log_start == pytest.approx(math.log(3), rel=1e-12)
    assert 0.84**found.fit.half_life == pytest.approx(0.5)
    assert found.fit.doubling_time == math.inf
    assert found.verdict == "vanishing: halves every 3.98 steps"


def test_growth_doubles():
    found = decay(np.arange(9) * math.log(1.26))
    assert found.verdict == "exploding: doubles every 3 steps"
    assert found.fit.half_life == math.inf


@pytest.mark.parametrize(("rate", "word"), [(0.98, "stable"), (1.02, "stable"), (0.9, "vanishing"), (1.1, "exploding")])
def test_stable_is_what_neither_halves_nor_doubles_within_the_lags(rate, word):
    assert decay(np.arange(20) * math.log(rate)).verdict.startswith(word)


def test_far_beyond_the_range_of_floats():
    found = decay(np.arange(400) * -10.0)
    assert found.fit.rate == pytest.approx(math.exp(-10))
    assert "every 0.0693 steps" in found.verdict


def test_the_fit_leaves_out_lags_before_its_first():
    logs = np.append(5.0, np.arange(1, 9) * -0.5)
    assert decay(logs, first=1).fit.log_rate == pytest.approx(-0.5)
    assert decay(logs).fit.log_rate < -0.55


def test_zeros_are_said_and_leave_the_rate():
    logs = np.arange(8) * math.log(0.5)
    logs[5:] = -np.inf
    found = decay(logs)
    assert (found.zero_from, found.fit.rate) == (5, pytest.approx(0.5))
    assert found.verdict == "vanishing: halves every 1 step, exactly zero from lag 5 on"


def test_all_zero_has_no_rate():
    found = decay([[0.0, -np.inf, -np.inf]], first=1)
    assert (found.fit, found.verdict) == (None, "vanishing: exactly zero from lag 1 on")


def test_windows_that_are_not_finite_are_said_and_left_out():
    logs = np.arange(6) * np.full((4, 1), -0.7)
    logs[1, 3], logs[2, 2] = np.nan, np.inf
    found = decay(logs)
    assert (found.lost, found.fit.log_rate) == (2, pytest.approx(-0.7))
    assert str(found).startswith("NOT FINITE: NaN or infinite in 2 of 4 windows")
    assert decay(np.full((2, 3), np.nan)).verdict == "not finite: NaN or infinite in every window"


def test_windows_spread():
    found = decay(np.arange(10) * -np.linspace(0.1, 0.5, 9)[:, None], windows=90)
    np.testing.assert_allclose(np.log(found.rates), -np.linspace(0.1, 0.5, 9))
    np.testing.assert_allclose(found.median, np.arange(10) * -0.3)
    np.testing.assert_allclose(found.band[:, 9], [-9 * 0.4, -9 * 0.2])
    assert "9 of 90 windows" in str(found)


def test_a_zigzag_is_no_exponential():
    assert "hardly exponential" in str(decay([0, -3, 0, -3, 0, -3, -2, -4]))


def gradients(forward: float, backward: float) -> np.ndarray:
    """`(batch, step, unit)`: three units forward, three backward, falling by these factors along their passes."""
    lags = np.arange(10)
    values = np.random.default_rng(0).choice([-1.0, 1.0], (4, 10, 6))
    return values * np.repeat(np.stack([forward ** lags[::-1], backward**lags], 1), 3, 1)


def test_gradients_over_steps_fall_along_each_pass():
    forward, backward = gradient_decay(gradients(0.8, 0.6), bidirectional=True, layer="bi")
    assert (forward.fit.rate, backward.fit.rate) == (pytest.approx(0.8), pytest.approx(0.6))
    assert (forward.direction, backward.direction) == ("forward", "backward")
    np.testing.assert_allclose(forward.median[0], math.log(math.sqrt(3)))


def test_gradients_that_would_underflow_when_squared():
    (found,) = gradient_decay(1e-200 * gradients(0.8, 0.8)[..., :3])
    assert found.fit.rate == pytest.approx(0.8)
    assert found.median[0] == pytest.approx(math.log(math.sqrt(3)) - 200 * math.log(10))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_gradients_that_are_not_finite(broken):
    values = gradients(0.8, 0.6)
    values[1, 4, 2] = broken
    forward, backward = gradient_decay(values, bidirectional=True)
    assert (forward.lost, backward.lost) == (1, 0)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4, 5), (0, 3, 4)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(Refused, match=r"\(batch, step, unit\)"):
        gradient_decay(np.zeros(shape))


def test_an_odd_number_of_units_has_no_halves():
    with pytest.raises(Refused, match="merge_mode"):
        gradient_decay(np.ones((2, 3, 5)), bidirectional=True)
