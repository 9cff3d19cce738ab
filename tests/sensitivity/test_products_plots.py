"""Pictures of every product: what they show is the product's, and what they say is true of it."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from matplotlib.figure import Figure

from sensitivity import plots, query
from sensitivity.errors import Refused
from sensitivity.plots import look
from tests.sensitivity.producing import DIMS, produced, scale

ALL = sorted(DIMS)
LAGGED = {"lag", "source_step"}


def texts(figure: Figure) -> str:
    from matplotlib.text import Text

    return " | ".join(text.get_text() for text in figure.findobj(Text))


def kinds_of(product: str, by: str) -> set[str]:
    """What can be drawn, by hand."""
    dims = set(DIMS[product, by])
    lagged = {"lag-profile", "lag-band", "heatmap"} | ({"step-lag"} if "output_step" in dims else set())
    return {"time-lag", "month-lag", "importance", "window", "distribution"} | (lagged if dims & LAGGED else set())


@pytest.mark.parametrize(("product", "by"), ALL)
def test_each_picture_that_applies_is_drawn_and_no_other(product, by):
    dataset = produced(product, by)
    fitting = plots.possible(dataset)
    assert set(fitting) == kinds_of(product, by)
    (found,) = dask.compute(plots.wanted(dataset, fitting))
    for kind in fitting:
        said = texts(plots.draw(found[kind], kind))
        assert ("∂output/∂input" in said) == (by == "input" and product in ("jacobian", "smooth_gradients")), kind
        assert ("std" in said) == (not isinstance(scale(dataset, product), float)), (kind, said)
        assert "{" not in said
    if kinds_of(product, by) & {"lag-profile"}:
        expected = abs(dataset[product].astype(float)).compute().mean("time") * scale(dataset, product)
        lag = next(dim for dim in expected.dims if dim in LAGGED)
        last = [dim for dim in expected.dims if dim not in ("output_step", "output", "vector", lag)]
        items = [dim for dim in last if dim != "direction"]
        expected = expected.mean([dim for dim in expected.dims if dim not in (lag, *items)]).transpose(lag, *items)
        shown = look.influence(found["heatmap"]).transpose("lag", "feature")
        np.testing.assert_allclose(shown, expected.values.reshape(shown.shape), rtol=1e-9)


@pytest.mark.parametrize(
    ("product", "by", "words"),
    [
        (
            "integrated_gradients",
            "input",
            ["Attributions of the outputs by lag", "mean |attribution|\n(units of the output)"],
        ),
        ("smooth_gradients", "input", ["Smoothed derivatives of", "mean |smoothed ∂output/∂input| × input's std"]),
        ("jacobian", "layer", ["by source step", "mean |∂output/∂unit|\n(units of the output per unit of the unit)"]),
        (
            "hessian",
            "input",
            ["Second derivatives", "× both inputs' std\n(units of the output)", "rain × heat, second lag"],
        ),
        ("vjp", "input", ["Vector-Jacobian products of the vectors", "mean over 2 vectors", "× the vector's"]),
        (
            "hvp",
            "input",
            ["mean over 2 output_steps".replace("_", " "), "6 output-direction pairs", "per unit of the direction"],
        ),
    ],
)
def test_profiles_say_what_they_show(product, by, words):
    said = texts(plots.show(produced(product, by), "lag-profile"))
    for part in words:
        assert part in said


def test_steps_of_a_layer_rise_to_the_right():
    axes = plots.show(produced("jacobian", "layer"), "lag-profile").axes[0]
    left, right = axes.get_xlim()
    sizes = abs(produced("jacobian", "layer")["jacobian"].astype(float)).compute()
    expected = sizes.sel(unit="lstm_0").mean(["time", "output_step", "output"])
    line = next(one for one in axes.lines if one.get_label() == "lstm_0")
    order = np.argsort(line.get_xdata() * (1 if right > left else -1))
    np.testing.assert_allclose(np.array(line.get_ydata())[order], expected.sel(source_step=[0, 1, 2]), rtol=1e-9)
    shown = [axes.xaxis.get_major_formatter()(place, None) for place in np.array(line.get_xdata())[order]]
    assert shown == ["0", "1", "2"]
    assert axes.get_xlabel() == "source step"


@pytest.mark.parametrize(("product", "by"), ALL)
def test_answers_are_drawn_as_they_are(product, by):
    answer = query.importance(produced(product, by))
    picture = plots.show(answer)
    mean = answer["importance"].compute()
    over = [dim for dim in ("output_step", "output", "vector") if dim in mean.dims]
    over += ["direction"] if product == "hvp" else []
    if product == "hessian":
        drawn, expected = picture.axes[0].images[0].get_array(), np.ravel(mean.mean(over))
        np.testing.assert_allclose(np.sort(drawn.compressed()), np.sort(expected[np.isfinite(expected)]), rtol=1e-9)
        assert "both orders of a pair together" in texts(picture)
        return
    expected = np.sort(np.ravel(mean.mean(over)))[::-1][:25]
    widths = [bar.get_width() for bar in picture.axes[0].patches][: len(expected)]
    np.testing.assert_allclose(widths, expected, rtol=1e-9)


def test_comparisons_are_of_one_product():
    both = [produced("hessian", seed=seed) for seed in (0, 1)]
    (found,) = dask.compute(plots.wanted(both[0], ["comparison"], against=both[1], names=["a", "b"]))
    whole = found["comparison"]
    importance = [query.importance(one).compute()["importance"].mean(["output_step", "output"]) for one in both]
    each = np.stack([one.values[np.isfinite(one.values)] for one in importance])  # a pair has one place
    np.testing.assert_allclose(whole["importance"], each, rtol=1e-9)
    said = texts(plots.draw(whole, "comparison"))
    assert "a and b: second derivatives of the output" in said
    assert "both inputs' std" in said
    with pytest.raises(Refused, match="against is refused"):
        plots.wanted(both[0], ["comparison"], against=produced("vjp"))


def test_a_window_is_told_with_its_prediction_where_targets_are_outputs():
    attributions = produced("integrated_gradients").isel(output=[0], output_step=[0])
    (found,) = dask.compute(plots.wanted(attributions, ["window"]))
    sizes = abs(attributions["integrated_gradients"]).max(["output", "output_step", "lag", "feature"]).values
    best = int(np.nanargmax(sizes))
    assert found["window"]["time"].values == attributions["time"].values[best]
    said = texts(plots.draw(found["window"], "window"))
    assert f"flow: {float(attributions['prediction'][best].values.item()):.4g}" in said
    assert "largest |A| of 40 windows" in said
    vector = texts(plots.show(produced("vjp"), "window"))
    assert "largest |v·J| × std" in vector


def test_kinds_that_need_lags_are_refused_without():
    for dataset in (produced("jvp"), produced("gradient_norm"), produced("jacobian", "weights")):
        with pytest.raises(Refused, match="time-lag, month-lag, importance, window, distribution"):
            plots.show(dataset, "heatmap")
    assert isinstance(plots.show(produced("gradient_norm"), "time-lag"), Figure)
