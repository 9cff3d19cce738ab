"""The report of a run: what is on the page, that it stands on its own, and that nothing of the run gets out of hand."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from keras import layers

import sensitivity
from jobs.driver import How, run_job
from sensitivity import query, report
from sensitivity.commits import Failure, record_failure
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.report import words
from sensitivity.report.answers import answers_of
from sensitivity.store import Run
from tests.conftest import frame, job_writer, sequential
from tests.jobs.conftest import KNOBS, call
from tests.sensitivity.asking import dataset as in_memory
from tests.sensitivity.reading import Page
from tests.sensitivity.test_query import half_done  # noqa: F401

MOST_BYTES = 5_000_000
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "</style><b>&amp;", "a" * 3000)


ROWS = {"kernel": "batch_jacobian", "windows_per_call": 4}  # what is not timed takes less time


def done(folder: Path, model=None, table: pd.DataFrame | None = None, **sections) -> Run:
    """A run that is complete, made by one worker in this process."""
    file = job_writer(folder)(model, table, **{"sensitivity": KNOBS, **sections})
    return Run.open(run_job(Job.load(file), How(serial=True)).run.place.path)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Run:
    """1,000 hours, six lags, two features."""
    return done(tmp_path_factory.mktemp("small"), table=frame(1005), run={"shard_windows": 100})


@pytest.fixture(scope="module")
def page(small, tmp_path_factory) -> Page:
    return read(small, tmp_path_factory.mktemp("page"))


def read(run: Run, folder: Path, **how) -> Page:
    file = report.write(run, folder / "report.html", **how)
    assert file.stat().st_size < MOST_BYTES
    found = Page(file.read_text())
    stands_on_its_own(found)
    return found


def stands_on_its_own(page: Page) -> None:
    """Well-formed, accessible, without anything from elsewhere: what holds for every report."""
    assert page.one("html")["lang"] == "en"
    levels = [int(one.name[1]) for one in page.all("h1", "h2", "h3", "h4", "h5", "h6")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert max(np.diff(levels)) <= 1
    ids = [one["id"] for one in page.elements if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    for one in page.elements:
        assert not [name for name in one.attributes if name.startswith("on") or name == "style"], one
        assert one.name not in ("link", "iframe", "object", "embed", "base", "form"), one
        for name in ("href", "src", "srcset", "xlink:href"):
            target = one.attributes.get(name, "#")
            assert (
                target == "#" or target[1:] in ids if target.startswith("#") else target.startswith("data:image/png")
            ), one
        for reference in re.findall(r"url\(([^)]*)\)", " ".join(one.attributes.values())):
            assert reference[1:] in ids
    assert not re.search(r"@import|url\(|https?:", page.one("style").text + page.one("script").text)
    for one in page.all("svg"):
        assert one.attributes.get("aria-hidden") or (one["role"] == "img" and len(one["aria-label"]) > 20)
    for one in page.all("img"):
        assert len(one["alt"]) > 20
    for one in page.all("th"):
        assert one["scope"] == ("col" if "thead" in one.above else "row")
    assert len(page.all("caption")) == len(page.all("table"))
    assert "default-src 'none'" in page.all("meta")[1]["content"]


def texts(page: Page, *names: str) -> str:
    return " ".join(" ".join(one.text for one in page.all(*names)).split())


def rows(page: Page, caption: str) -> list[list[str]]:
    """Of the table whose caption begins so: its rows, as they are shown."""
    found: list[list[str]] = []
    inside = False
    for one in page.elements:
        if one.name == "caption":
            inside = one.text.startswith(caption)
        elif inside and one.name == "tr":
            found.append([])
        elif inside and one.name in ("th", "td"):
            found[-1].append(one.text)
    return found


def test_a_report_has_all_its_parts(page, small):
    assert page.one("title").text == page.one("h1").text == "Sensitivity of run"
    headings = [one.text for one in page.all("h2")]
    assert headings == ["Findings", "Pictures", "Tables", "The run", "How to read this", "Going on"]
    anchors = {one["href"][1:] for one in page.all("a")}
    assert {"findings", "pictures", "tables", "run", "reading", "next", "importance", "picture-heatmap"} <= anchors
    assert len(page.all("figure")) == len(page.all("figcaption")) == 8  # all but step-lag
    assert "All 1,000 windows are done" in texts(page, "p")
    assert f"sensitivity verify {small.place}" in texts(page, "code")
    assert small.fingerprint in texts(page, "dd")
    assert 'path = "run"' not in texts(page, "pre")
    assert "[windows] stride = 1" in texts(page, "pre")


def test_tables_say_what_queries_say(page, small):
    found = query.importance(sensitivity.open_run(small.place.path)).compute()
    shown = rows(page, "Importance: mean")
    assert shown[0][:3] == ["Feature", "Importance", "Share"]
    by_name = {row[0]: row for row in shown[1:]}
    for name in ("rain", "heat"):
        one = found.sel(feature=name).squeeze()
        assert by_name[name][1].startswith(words.number(float(one["importance"])))
        assert by_name[name][2].startswith(words.percent(float(one["share"])))
        assert "…" in by_name[name][1]
    moments = rows(page, "Windows with")
    top = query.top(sensitivity.open_run(small.place.path), 10, scaled=True)
    assert [row[1] for row in moments[1:]] == [words.time_text(time) for time in top["time"].values]
    (features,) = (table for table in (rows(page, "The series"),) if table)
    assert [row[0] for row in features[1:]] == ["rain", "heat"]


def test_alternatives_say_what_pictures_show(page):
    labels = " ".join(one["aria-label"] for one in page.all("svg") if "aria-label" in one.attributes)
    for part in ("Bar chart of 2 features", "Line chart of influence over 6 lags", "Heat map of 2 features by 6 lags"):
        assert part in labels
    assert re.search(r"the largest value, [\d.]+, is at feature \w+ and lag \d", labels)
    assert "Coverage of 1,000 windows: 1,000 computed, 0 skipped, 0 failed, 0 missing." in labels


def test_everything_of_a_run_is_escaped(tmp_path):
    table = frame(200, HOSTILE)
    run = done(tmp_path, sequential((3, 4), layers.Flatten(), layers.Dense(1)), table, run={"path": "r <i>'&x"})
    assert list(run.survey.features) == list(HOSTILE)
    (run.place.path / "commits" / "00000000.json").unlink()
    record_failure(run, Failure(0, 0, run.layout.shard(0).stop, 3, f"{HOSTILE[1]}\nsecond", "", HOSTILE[0]))
    page = read(run, tmp_path)
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert not page.all("b", "i")
    assert all(one["src"].startswith("data:") for one in page.all("img"))
    assert HOSTILE[0] in texts(page, "li")
    assert page.one("h1").text == "Sensitivity of r <i>'&x"
    assert max(len(one.text) for one in page.all("th", "td", "li")) < 1000


def test_a_run_without_any_window_says_so(half_done, tmp_path):  # noqa: F811
    for file in (half_done.place.path / "commits").glob("*.json"):
        file.unlink()
    page = read(half_done, tmp_path)
    assert "None of 55 windows is computed yet" in texts(page, "p")
    assert not page.all("figure")
    assert "sensitivity resume" in texts(page, "code")
    assert [row[0] for row in rows(page, "The series")[1:]] == ["rain", "heat"]


def test_an_incomplete_run_says_what_is_missing(half_done, tmp_path):  # noqa: F811
    record_failure(half_done, Failure(6, 48, 55, 3, "Refused: no room", "", "node-7"))
    page = read(half_done, tmp_path)
    said = texts(page, "p")
    assert "The run is not complete: 32 of 55 windows are done, 16 are missing and 7 failed" in said
    assert "What follows is of 26 windows." in said
    assert "shard 6 (windows 48–54), 3 attempts, the last on node-7: Refused: no room" in texts(page, "li")
    assert "Failures" in texts(page, "h2")
    assert "26 of 55 windows" in texts(page, "text")
    assert "sensitivity resume" in texts(page, "code")


def test_windows_that_are_all_skipped_are_no_findings(tmp_path):
    table = frame(60)
    table.loc[:20, "rain"] = np.nan
    run = done(tmp_path, table=table, run={"shard_windows": 8})
    for index in range(2, run.layout.shard_count):
        (run.place.path / "commits" / f"{index:08d}.json").unlink()
    page = read(run, tmp_path)
    assert "None of 55 windows is computed yet" in texts(page, "p")
    assert not page.all("figure")


def test_an_output_that_depends_on_nothing(tmp_path):
    model = sequential((4, 2), layers.Flatten(), layers.Dense(1))
    model.set_weights([np.zeros((8, 1), "float32"), np.ones(1, "float32")])
    page = read(done(tmp_path, model, frame(100)), tmp_path)
    assert "Every derivative is zero" in texts(page, "li")


def test_many_outputs_and_features_stay_small(tmp_path):
    """20,000 derivatives a window at each of 10 lags: tables and pictures show the largest, and name the command."""
    names = tuple(f"feature number {i}" for i in range(200))
    model = sequential((10, 200), layers.Flatten(), layers.Dense(100))
    page = read(done(tmp_path, model, frame(150, names), sensitivity=ROWS), tmp_path)
    assert len(rows(page, "Importance: mean")) == 51
    assert "50 of 200 features. All of them: sensitivity query" in texts(page, "p")
    said = texts(page, "p")
    assert "50 of 100 outputs" in said
    assert "Left out for lack of memory: quantiles and their pictures" in said


def test_of_many_sites_those_with_most_windows(tmp_path):
    sites = [frame(30 + i, seed=i).assign(site=f"site {i:03}") for i in range(70)]
    page = read(done(tmp_path, table=pd.concat(sites, ignore_index=True)), tmp_path)
    shown = [row[0] for row in rows(page, "Influence: mean") if row[0].startswith("site ")]
    assert shown == [f"site {i:03}" for i in range(20, 70)]
    assert "picture-month-lag" not in {one.attributes.get("id") for one in page.elements}  # all of one month
    assert "50 of 70 sites, those with the most windows" in texts(page, "p")
    assert "70 sites: site 000" in texts(page, "dd")


def test_steps_without_dates_have_no_months(tmp_path):
    file = job_writer(tmp_path)(series=frame(300), sensitivity=KNOBS)
    file.write_text(file.read_text().replace('time = "time"', 'features = ["rain", "heat"]'))
    page = read(run_job(Job.load(file), How(serial=True)).run, tmp_path)
    assert "picture-month-lag" not in {one.attributes.get("id") for one in page.elements}
    assert "picture-time-lag" in {one.attributes.get("id") for one in page.elements}


def test_what_does_not_fit_into_memory_is_left_out_and_said(small, tmp_path):
    page = read(small, tmp_path, memory="200KB")
    assert "Left out for lack of memory: quantiles and their pictures" in texts(page, "p")
    assert page.all("figure")


def monthly(months: int) -> pd.DataFrame:
    return frame(months).assign(time=pd.date_range("1990-01-01", periods=months, freq="MS"))


@pytest.mark.parametrize(
    ("length", "table", "how"),
    [
        (1, frame(50, ("rain",)), {}),
        (6, frame(6), {}),
        (3, frame(40).assign(heat=1.0), {}),
        (3, frame(40).assign(rain=2.0, heat=1.0), {}),
        (4, monthly(240), {"run": {"dtype": "float64"}, "windows": {"stride": 3}}),
    ],
    ids=["one lag of one feature", "one window", "a constant feature", "all constant", "months"],
)
def test_odd_runs_have_reports(length, table, how, tmp_path):
    features = len(table.columns) - 1
    model = sequential((length, features), layers.Flatten(), layers.Dense(1))
    page = read(done(tmp_path, model, table, **how), tmp_path)
    assert texts(page, "li").count("importance") >= 1
    assert len(page.all("figure")) >= 6


def test_a_series_that_is_gone_costs_no_more_than_inputs(tmp_path):
    run = done(tmp_path, table=frame(100))
    (tmp_path / "series.csv").unlink()
    shutil.rmtree(run.place.path / "series.zarr", ignore_errors=True)
    page = read(run, tmp_path)
    assert "without inputs" in texts(page, "text")


def test_several_output_steps_are_told_apart(tmp_path):
    model = sequential((6, 2), layers.LSTM(3, return_sequences=True), layers.Dense(2))
    page = read(done(tmp_path, model, frame(200), sensitivity=ROWS), tmp_path)
    assert "picture-step-lag" in {one.attributes.get("id") for one in page.elements}
    assert [row[0] for row in rows(page, "Influence: mean") if row[0].isdigit()] == list("012345")
    assert "the outputs (mean over 6 output steps and 2 outputs)" in texts(page, "li")


def test_answers_are_those_of_single_questions(small):
    """One pass for all changes no number."""
    dataset = sensitivity.open_run(small.place.path)
    answers = answers_of(dataset)
    alone = query.mean_abs(dataset, ci=0.9).compute()
    np.testing.assert_allclose(answers["mean-abs"]["mean_abs"], alone["mean_abs"])
    pooled = answers["pooled"].sel(feature="rain")
    values = dataset["jacobian"].sel(feature="rain").values.astype(float)
    expected = [values.mean(), np.abs(values).mean(), values.std(), values.min(), values.max(), (values > 0).mean()]
    found = [float(pooled[name]) for name in ("mean", "mean_abs", "std", "min", "max", "share_positive")]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_picture_of_many_parts_is_drawn_as_pixels():
    from matplotlib.figure import Figure

    from sensitivity.report.pictures import VECTOR_BYTES, embedded

    figure = Figure()
    figure.subplots().scatter(*np.random.default_rng(0).random((2, 200)))
    few = Page(embedded(figure, "few", "what it shows", "name"))
    assert few.one("svg")["aria-label"] == "what it shows"
    assert all(one["id"].startswith("few-") for one in few.elements if "id" in one.attributes)
    figure.axes[0].scatter(*np.random.default_rng(0).random((2, 20_000)))
    many = embedded(figure, "many", "what it shows", "name")
    assert Page(many).one("img")["alt"] == "what it shows"
    assert len(many) < 2 * VECTOR_BYTES


def test_the_store_is_read_twice_and_then_what_stands_out():
    reads = []

    def counted(block, block_id):
        reads.append(block_id[0])
        return block

    values = np.random.default_rng(0).standard_normal((400, 1, 1, 4, 3)).astype("float32")
    source = in_memory(values, (50,) * 8)
    lazy = source["jacobian"].data.map_blocks(counted, dtype="float32", meta=np.empty((0,) * 5, "float32"))
    answers = answers_of(source.assign(jacobian=source["jacobian"].copy(data=lazy)))
    assert not answers.refused
    assert sorted(reads[:16]) == sorted([*range(8)] * 2)
    stands_out = [*answers["moments"]["time"].values, answers["window"]["time"].values]
    assert len(reads) - 16 <= len(stands_out), reads


# ---- files -------------------------------------------------------------------------------------------


def test_the_command_writes_where_it_says(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("report", small.place.path)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == "run.html"
    assert call("report", small.place.path).exit_code == 0  # over an earlier report
    (tmp_path / "thesis.html").write_text("<p>Three years of work</p>")
    refused = call("report", small.place.path, "-o", "thesis.html")
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert (tmp_path / "thesis.html").read_text() == "<p>Three years of work</p>"
    assert call("report", small.place.path, "-o", "thesis.html", "--force").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "thesis.html"]
    os.mkfifo("pipe")
    for file, said in (
        ("no/where.html", "existing directory"),
        (".", "this is a directory"),
        ("pipe", "a device or a pipe"),
        ("/dev/null", "a device or a pipe"),
    ):
        result = call("report", small.place.path, "-o", file)
        assert result.exit_code == 2
        assert said in result.stderr
    assert call("report", tmp_path).exit_code == 2
    Path("link.html").symlink_to("thesis.html")
    assert call("report", small.place.path, "-o", "link.html").exit_code == 0
    assert Path("link.html").is_symlink()


def test_what_fails_leaves_what_was_there(small, tmp_path, monkeypatch):
    file = report.write(small, tmp_path / "report.html")
    before = file.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        report.write(small, file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


# ---- notebooks ---------------------------------------------------------------------------------------


def test_a_notebook_shows_coverage_and_what_to_try_next(half_done):  # noqa: F811
    found = sensitivity.overview(half_done.place.path)
    block = Page(found._repr_html_())
    progress = block.one("progress")
    assert (progress["value"], progress["max"]) == ("32", "55")
    for text in (texts(block, "div"), repr(found)):
        assert "32 of 55 windows are done" in text
        assert f"sensitivity resume {half_done.place}" in text
    with pytest.raises(Refused):
        sensitivity.overview(half_done.place.path / "nowhere")


# ---- colours -----------------------------------------------------------------------------------------

CSS = (Path(report.__file__).parent / "page.css").read_text()
PALETTES = [
    dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r"\{([^{}]*--paper:[^{}]*)\}", CSS)
]
TEXT = [
    ("ink", "paper"),
    ("ink", "card"),
    ("quiet", "paper"),
    ("quiet", "card"),
    ("link", "paper"),
    ("warn-ink", "warn"),
]
MARKS = [("computed", "paper"), ("skipped", "paper"), ("failed", "paper"), ("blue", "card"), ("quiet", "card")]


def luminance(colour: str) -> float:
    """Of sRGB, as WCAG 2.1 defines it."""
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(palette: dict[str, str], one: str, other: str) -> float:
    low, high = sorted(luminance(palette[f"--{name}"]) for name in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", PALETTES, ids=["light", "chosen dark", "dark"])
def test_colours_are_told_apart(palette):
    """WCAG 2.1 AA: 4.5 for text, 3 for marks that mean something."""
    assert {pair: contrast(palette, *pair) for pair in TEXT if contrast(palette, *pair) < 4.5} == {}
    assert {pair: contrast(palette, *pair) for pair in MARKS if contrast(palette, *pair) < 3} == {}
    assert set(palette) == set(PALETTES[0])


def test_dark_is_the_same_dark_chosen_or_preferred():
    assert len(PALETTES) == 3
    assert PALETTES[1] == PALETTES[2]
