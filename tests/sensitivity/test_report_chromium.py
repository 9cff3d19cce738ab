"""The report in a real browser: nothing fails, nothing is loaded, tables sort, colours change, paper is served."""

from __future__ import annotations

import base64
import io
import re

import matplotlib.image
import numpy as np
import pytest

from sensitivity import report
from tests.conftest import frame
from tests.sensitivity.chromium import NAMES, Browser, found
from tests.sensitivity.test_report import HOSTILE, done

pytestmark = pytest.mark.skipif(
    found() is None, reason=f"no browser here: none of {', '.join(NAMES)} is on the path (apt-get install chromium)"
)
ROWS = "[...document.querySelectorAll('#importance tbody tr')].map(row => row.cells[{}].innerText)"
HEAD = "document.querySelectorAll('#importance thead th')[{}]"
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(found(), tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The report of a run with names that would do harm."""
    from keras import layers

    from tests.conftest import sequential

    folder = tmp_path_factory.mktemp("shown")
    names = (*HOSTILE, "heat", "rain")
    model = sequential((5, len(names)), layers.Flatten(), layers.Dense(1))
    return report.write(done(folder, model, frame(600, names)), folder / "report.html")


def shot(browser: Browser) -> np.ndarray:
    """What is seen `(y, x, colour)`, from 0 to 1."""
    content = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    return matplotlib.image.imread(io.BytesIO(content))[..., :3]


def test_nothing_fails_and_nothing_is_loaded(browser, file):
    browser.open(file)
    browser.value("window.scrollTo(0, document.body.scrollHeight)")
    shot(browser)
    assert browser.complaints() == []
    assert browser.value("document.scripts.length") == 1
    assert browser.value("document.fonts.size") == 0


def test_the_policy_lets_no_other_script_run(browser, file, tmp_path):
    """What would get past the escaping would not run, nor call home."""
    planted = '<img src="http://127.0.0.1:9/x" onerror="window.harm = 1"><script>window.harm = 2</script>'
    harmed = tmp_path / "harmed.html"
    harmed.write_text(file.read_text().replace("<main>", f"<main>{planted}"))
    browser.open(harmed)
    assert browser.value("window.harm === undefined")
    assert len(browser.complaints()) >= 2


def test_tables_sort_by_mouse_and_keyboard(browser, file):
    browser.open(file)
    names = browser.value(ROWS.format(0))
    sizes = browser.value("[...document.querySelectorAll('#importance tbody tr')].map(r => +r.cells[1].dataset.value)")
    assert sizes == sorted(sizes, reverse=True)
    assert browser.value(f"{HEAD.format(1)}.ariaSort") is None
    browser.click(f"{HEAD.format(1)}.querySelector('button')")
    assert browser.value(f"{HEAD.format(1)}.ariaSort") == "descending"
    browser.click(f"{HEAD.format(1)}.querySelector('button')")
    assert browser.value(f"{HEAD.format(1)}.ariaSort") == "ascending"
    assert browser.value(ROWS.format(0)) == names[::-1]
    browser.value(f"{HEAD.format(0)}.querySelector('button').focus()")
    browser.press("Enter", "\r")
    assert browser.value(f"{HEAD.format(0)}.ariaSort") == "ascending"
    assert browser.value(f"{HEAD.format(1)}.ariaSort") is None
    ordered = "(() => {{ const t = {}; return t.every((x, i) => !i || t[i - 1].localeCompare(x) <= 0); }})()"
    assert browser.value(ordered.format(ROWS.format(0).replace("innerText", "textContent")))
    browser.press("Tab")
    assert browser.value(f"document.activeElement === {HEAD.format(1)}.querySelector('button')")
    assert browser.complaints() == []


def test_light_and_dark(browser, file):
    browser.open(file, scheme="light")
    assert browser.value(PAPER) == "rgb(255, 255, 255)"
    light = shot(browser)
    browser.prefer("dark")
    assert browser.value(PAPER) == "rgb(20, 23, 27)"
    assert shot(browser).mean() < 0.4 < 0.7 < light.mean()
    browser.click("document.getElementById('theme')")
    assert browser.value(PAPER) == "rgb(255, 255, 255)"
    browser.click("document.getElementById('theme')")
    assert browser.value(PAPER) == "rgb(20, 23, 27)"
    ink = "getComputedStyle(document.querySelector('.picture text')).fill"
    assert browser.value(ink) == "rgb(232, 235, 239)"


def test_it_fits_a_phone(browser, file):
    browser.open(file, width=400)
    assert browser.value("document.documentElement.scrollWidth") <= 400
    assert browser.value(
        "document.querySelector('.picture').scrollWidth > document.querySelector('.picture').clientWidth"
    )
    assert shot(browser).shape[1] == 400


def test_it_prints(browser, file):
    browser.open(file, scheme="dark")
    browser.click("document.getElementById('theme')")
    browser.click("document.getElementById('theme')")  # dark by choice
    browser.prefer("light", media="print")
    assert browser.value(PAPER) == "rgb(255, 255, 255)"
    for gone in ("nav", "#theme"):
        assert browser.value(f"getComputedStyle(document.querySelector('{gone}')).display") == "none"
    assert browser.value("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    pdf = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 30


def test_a_screen_reader_hears_of_every_picture(browser, file):
    browser.open(file)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    said = {"image": [], "table": [], "columnheader": [], "button": []}
    for node in nodes:
        role = node.get("role", {}).get("value")
        role = "image" if role == "img" else role
        if role in said and not node.get("ignored"):
            said[role].append(node.get("name", {}).get("value", ""))
    assert len(said["image"]) >= browser.value("document.querySelectorAll('figure').length") + 1
    assert all(len(name) > 20 for name in said["image"])
    assert all(said["table"])
    assert "Feature" in said["button"]
