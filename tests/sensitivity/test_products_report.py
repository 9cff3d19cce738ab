"""Reports of every product: whole, and true of it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from sensitivity import query
from sensitivity.report.answers import answers_of
from sensitivity.report.glance import Overview
from sensitivity.report.page import page
from sensitivity.report.state import State, state_of
from sensitivity.report.words import findings, percent
from tests.conftest import frame
from tests.sensitivity.producing import DIMS, produced
from tests.sensitivity.reading import Page
from tests.sensitivity.test_report import done, rows, stands_on_its_own, texts

NOUNS = {
    "jacobian": "derivative",
    "smooth_gradients": "smoothed derivative",
    "integrated_gradients": "attribution",
    "expected_gradients": "attribution",
    "vjp": "vector-Jacobian product",
    "jvp": "Jacobian-vector product",
    "hessian": "second derivative",
    "hvp": "Hessian-vector product",
    "gradient_norm": "gradient norm",
    "gram": "inner product of gradients",
}


WHOLE = [*((product, "input") for product in NOUNS if product != "jacobian"), ("jacobian", "layer"), ("hvp", "weights")]


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> State:
    return state_of(done(tmp_path_factory.mktemp("run"), table=frame(60)))


def of(state: State, product: str, by: str) -> State:
    """As if the run were of that product."""
    asked = state.run.job.sensitivity.model_copy(update={"wrt": "input" if by == "input" else "dense"})
    run = replace(state.run, content={**state.run.content, "product": product})
    run.__dict__["job"] = state.run.job.model_copy(update={"sensitivity": asked})
    return replace(state, run=run)


@pytest.mark.parametrize(("product", "by"), WHOLE)
def test_a_report_stands_and_speaks_of_its_product(state, product, by):
    dataset = produced(product, by)
    answers = answers_of(dataset)
    assert not answers.for_lack_of_memory()
    found = Page(str(page(of(state, product, by), answers)))
    stands_on_its_own(found)
    said = texts(found, "p", "li", "caption", "figcaption", "th", "dt", "dd")
    assert NOUNS[product] in said.replace(NOUNS[product].capitalize(), NOUNS[product])
    assert not re.search(r"[{}]", texts(found, "li", "caption", "figcaption", "h3"))
    scaled = by == "input" and product in ("jacobian", "smooth_gradients", "vjp", "hessian", "hvp")
    assert ("--scaled" in texts(found, "code")) == scaled
    assert (" std" in texts(found, "caption", "figcaption")) == scaled
    lagged = "lag" in DIMS[product, by]
    assert ("50 % lags" in texts(found, "caption")) == lagged
    best = query.top(dataset, 1, scaled=scaled)
    first = rows(found, "Windows with the largest")[1]
    assert first[1].startswith(str(best["time"].values[0])[:10])
    labels = [str(best[f"at_{dim}"].values[0]) for dim in reversed(DIMS[product, by])]
    assert sorted(first[4:]) == sorted(labels)


@pytest.mark.parametrize(("product", "by"), sorted(DIMS))
def test_the_first_finding_is_the_largest_importance(product, by):
    dataset = produced(product, by)
    said = list(findings(answers_of(dataset)))
    found = query.importance(dataset).compute()["importance"]
    over = {"output_step", "output", "vector"} | ({"direction"} if product == "hvp" else set())
    mean = found.mean([dim for dim in found.dims if dim in over])
    if not mean.dims:
        assert "importance" not in said[0]
        return
    flat = mean.stack(all=mean.dims)
    best = flat.isel(all=int(np.nanargmax(flat.values)))
    for dim in mean.dims:
        assert str(best[dim].item()) in said[0], dim
    assert percent(float(best / flat.sum())) in said[0]
    assert ("The newest" in " ".join(said)) == ("lag" in DIMS[product, by])
    assert ("A rise of" in " ".join(said)) == (product in ("jacobian", "smooth_gradients", "vjp"))


def test_attributions_are_in_units_of_the_output_and_nothing_is_told_of_raising(state):
    answers = answers_of(produced("integrated_gradients"))
    said = texts(Page(str(page(of(state, "integrated_gradients", "input"), answers))), "p", "li", "caption")
    assert "Importance: mean |A|, in units of the output." in said
    assert "has the largest attributions of the outputs" in said
    assert "A > 0 there: the share of windows in which it is positive" in said
    assert "raises the output" not in said


def test_an_overview_names_the_product(state):
    told = repr(Overview(of(state, "hessian", "input")))
    assert "Second derivatives" in told
    assert "how large second derivatives are, as a table" in Overview(of(state, "hessian", "input"))._repr_html_()
