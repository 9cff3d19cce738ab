"""Pictures: what is drawn, what they say of what is not, and that nothing is left open."""

from __future__ import annotations

import io
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.text import Text

from sensitivity import plots
from sensitivity.errors import Refused
from sensitivity.recurrent import (
    Decay,
    Part,
    draw_decay,
    draw_heatmap,
    draw_histograms,
    draw_lines,
    draw_matrices,
    draw_points,
    gradient_decay,
)


def texts(figure) -> str:
    return " | ".join(text.get_text() for text in figure.findobj(Text))


def rendered(figure):
    """Without a warning from the layout; returned for more checks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("png", "svg"):
            file = io.BytesIO()
            with plots.look.style():
                figure.savefig(file, format=kind)
            assert len(file.getvalue()) > 1000
    assert plt.get_fignums() == []
    return figure


def gradients(batch: int = 5, steps: int = 8, units: int = 6) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, steps, units))


def parts(of: str = "weight") -> list[Part]:
    random = np.random.default_rng(0)
    shapes = {"kernel": (2, 3), "recurrent kernel": (3, 3), "bias": (3,)}
    return [
        Part("lstm_$x_", direction, kind, gate, random.standard_normal(shape), of)
        for direction in ("forward", "backward")
        for kind, shape in shapes.items()
        for gate in "ifco"
    ]


def test_a_decay_says_its_verdict_and_marks_its_half_life():
    logs = np.arange(12) * np.log(0.5) * np.ones((3, 1))
    figure = rendered(draw_decay(Decay("lstm", "forward", "|J|", "norm", logs, 30, 0)))
    said = texts(figure)
    assert "vanishing: halves every 1 step" in said
    assert "3 of 30 windows" in said
    ring = next(line for line in figure.axes[0].lines if len(line.get_xdata()) == 1)
    assert (ring.get_xdata()[0], 10 ** ring.get_ydata()[0]) == (pytest.approx(1), pytest.approx(0.5))


def test_a_decay_beyond_the_range_of_floats_and_others_that_are_hard_to_draw():
    far = Decay("far", "forward", "|J|", "norm", np.arange(300) * -9.0 * np.ones((2, 1)), 2, 1)
    figure = rendered(draw_decay(far))
    assert "1e-1" in texts(figure)
    broken = gradients()
    broken[0, 0, 0] = np.nan
    assert "NOT FINITE" in texts(rendered(draw_decay(gradient_decay(broken, bidirectional=True))))
    assert "every window" in texts(rendered(draw_decay(gradient_decay(np.full((2, 3, 4), np.nan)))))
    assert "stable" in texts(rendered(draw_decay(gradient_decay(np.ones((2, 3, 4))))))
    assert "exactly zero" in texts(rendered(draw_decay(gradient_decay(np.zeros((2, 3, 4))))))


def test_lines_have_a_panel_a_unit_or_one_for_all():
    figure = rendered(draw_lines(gradients(), layer="gru_1"))
    shown = [axes for axes in figure.axes if axes.axison]
    assert len(shown) == 6
    np.testing.assert_array_equal(shown[2].lines[3].get_ydata(), gradients()[3, :, 2])
    np.testing.assert_array_equal(shown[2].lines[3].get_xdata(), np.arange(8)[::-1])
    whole = rendered(draw_lines(gradients(), panels="all", most_lines=100))
    assert len(whole.axes) == 1
    assert "30 lines" in texts(whole)


def test_large_inputs_are_thinned_and_it_is_said():
    values = gradients(60, 5, 40)
    values[..., 17] *= 50
    figure = rendered(draw_lines(values, most_panels=3, most_lines=7))
    assert "3 of 40 units" in texts(figure)
    assert "7 of 60 windows" in texts(figure)
    assert "unit 17" in texts(figure)
    assert "30 of 60 windows" in texts(rendered(draw_points(values[:, 0], most_points=1200)))


def test_a_heatmap_mirrors_the_backward_half():
    values = gradients()
    figure = rendered(draw_heatmap(values, bidirectional=True, window=2))
    forward, backward = (axes.images[0].get_array() for axes in figure.axes[:2])
    np.testing.assert_array_equal(forward, values[2, :, :3].T)
    np.testing.assert_array_equal(backward, values[2, ::-1, 3:].T)
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() == (7.5, -0.5)
    assert "backward, mirrored" in texts(figure)
    whole = rendered(draw_heatmap(values)).axes[0].images[0].get_array()
    np.testing.assert_allclose(whole, np.abs(values).mean(0).T)


def test_points_are_of_each_window_and_unit():
    figure = rendered(draw_points(gradients()[:, 0], bidirectional=True))
    assert len(figure.axes) == 2
    np.testing.assert_array_equal(figure.axes[1].lines[4].get_ydata(), gradients()[4, 0, 3:])


@pytest.mark.parametrize(
    "draw", [draw_lines, draw_heatmap, lambda values: draw_points(values[:, 0]), lambda v: draw_lines(v, panels="all")]
)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_not_finite_is_marked(draw, broken):
    values = gradients()
    assert "NOT FINITE" not in texts(draw(values))
    values[1, 0, 2] = broken
    assert "NOT FINITE: 1 " in texts(rendered(draw(values)))
    assert "NOT FINITE" in texts(rendered(draw(np.full((2, 3, 4), broken))))


def test_histograms_have_kinds_by_gates():
    figure = rendered(draw_histograms(parts()))
    assert len(figure.axes) == 12
    shares = [patch.get_data().values.sum() for patch in figure.axes[5].patches]
    assert shares == [pytest.approx(100)] * 3
    assert "Weights of lstm" in texts(figure)


@pytest.mark.parametrize("shared", [True, False])
def test_matrices_have_directions_and_kinds_by_gates(shared):
    figure = rendered(draw_matrices(parts("gradient"), shared=shared))
    images = [axes.images[0] for axes in figure.axes if axes.images]
    np.testing.assert_array_equal(images[5].get_array(), parts()[5].values)
    scales = {image.get_clim() for image in images[4:8]}
    assert len(scales) == (1 if shared else 4)
    assert "Gradients of lstm" in texts(figure)


@pytest.mark.parametrize("draw", [draw_histograms, draw_matrices])
def test_parts_that_are_not_finite_are_framed(draw):
    found = parts()
    found[3].values[0, 1] = np.nan
    figure = rendered(draw(found))
    assert "NaN 1" in texts(figure)
    assert "NOT FINITE: in 1 of 24 parts" in texts(figure)
    for part in found:
        part.values[...] = np.nan
    rendered(draw([Part(p.layer, p.direction, p.kind, p.gate, p.values) for p in found]))


@pytest.mark.parametrize("draw", [draw_histograms, draw_matrices])
def test_parts_of_several_layers_are_refused(draw):
    for given in ([], [*parts(), *parts("gradient")]):
        with pytest.raises(Refused, match="one layer"):
            draw(given)
    rendered(draw(parts()[:6]))


def test_other_arguments_are_refused():
    for call, key in (
        (lambda: draw_decay([]), "decays"),
        (lambda: draw_lines(gradients(), panels="units"), "panels"),
        (lambda: draw_lines(gradients(), most_lines=0), "most_lines"),
        (lambda: draw_lines(gradients()[0]), "gradients"),
        (lambda: draw_heatmap(gradients(), window=5), "window"),
        (lambda: draw_points(gradients()), "gradients"),
    ):
        with pytest.raises(Refused) as refused:
            call()
        assert refused.value.key == key
