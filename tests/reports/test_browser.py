"""The report in a real browser: what it shows, in both schemes, on a screen and on a phone.

benchmarks/screenshots.py says what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.screenshots import SCHEMES, WIDTHS, NoBrowserError, chromium
from lightning_gpp.planning import Prediction
from lightning_gpp.reports.page import RunRecord, report_html
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import Link, StageCosts, simulate
from tests.reports.test_page import slower
from tests.strategies import plan_of, towers

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        with chromium() as opened:
            yield opened
    except NoBrowserError as error:
        pytest.skip(str(error))


def prediction_of(plan: Any) -> Prediction:
    costs = replace(StageCosts.uniform(plan, forward=1, backward=2), default_link=Link(latency=0.25))
    timeline = simulate(compile_program(plan), costs)
    return Prediction(plan=plan, timeline=timeline, memory_bytes=(8.0,) * plan.num_devices)


def pages() -> dict[str, str]:
    """A plan, a run that was measured, and a plan whose edges pass columns, with long names."""
    plain = prediction_of(towers(2, 2, 4))
    record = RunRecord(curves={"train/loss": [(1, 2.0), (7, 0.5)], "lr": [(1, 0.1)]}, samples_per_second=[(1, 10.0)])
    skipping = plan_of([(0, 1), (1, 2), (2, 4), (0, 3), (3, 4), (0, 4), (1, 4), (0, 2)], [1] * 5, 8)
    stages = tuple(replace(stage, name=f"{'a_long_name.' * 6}{stage.name}") for stage in skipping.stages)
    return {
        "plan": report_html(plain, title="a plan"),
        "run": report_html(plain, title="a run", measured=[slower(plain.timeline)], run=record),
        "skipping": report_html(prediction_of(replace(skipping, stages=stages)), title="a_title_in_one_word_" * 5),
    }


PAGES = pages()


@dataclass(slots=True)
class Opened:
    """A page in a browser, and what it did unasked."""

    page: Any
    url: str
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(params=[(name, width, scheme) for name in PAGES for width in WIDTHS for scheme in SCHEMES], ids=str)
def opened(browser: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    name, width, scheme = request.param
    (tmp_path / "report.html").write_text(PAGES[name])
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    result = Opened(page, (tmp_path / "report.html").as_uri())
    page.on("console", lambda message: result.messages.append(message.text))
    page.on("pageerror", lambda error: result.messages.append(str(error)))
    page.on("request", lambda asked: result.requests.append(asked.url))
    page.goto(result.url)
    page.wait_for_selector("html[data-drawn]", state="attached")
    yield result
    page.close()


OVERLAPS = """() => {
  const seen = [], found = [];
  for (const text of document.querySelectorAll("main svg text")) {
    const box = text.getBoundingClientRect(), inside = text.closest("svg").getBoundingClientRect();
    if (!text.textContent) continue;
    if (box.left < inside.left - 1 || box.right > inside.right + 1 || box.bottom > inside.bottom + 1)
      found.push(`${text.textContent} leaves its picture`);
    for (const [other, content] of seen)
      if (box.left < other.right - 1 && other.left < box.right - 1 && box.top < other.bottom - 3
          && other.top < box.bottom - 3) found.push(`${text.textContent} is on ${content}`);
    seen.push([box, text.textContent]);
  }
  for (const label of document.querySelectorAll("#labels span, .tiles li"))
    if (label.scrollWidth > label.clientWidth + 1) found.push(`${label.textContent} is cut`);
  return found;
}"""

CROSSINGS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("main .wide svg")) {
    const boxes = [...svg.querySelectorAll("rect")].map((rect) => rect.getBBox());
    for (const path of svg.querySelectorAll("path.arrow")) {
      const length = path.getTotalLength();
      for (let at = 2; at < length - 2; at += 1) {
        const { x, y } = path.getPointAtLength(at);
        const box = boxes.find((box) => x > box.x && x < box.x + box.width && y > box.y && y < box.y + box.height);
        if (box) { found.push(`${path.textContent} crosses the box at ${box.x}, ${box.y}`); break; }
      }
    }
  }
  return found;
}"""

HIDDEN = """() => {
  const found = [];
  for (const box of document.querySelectorAll(".wide")) {
    box.scrollLeft = 1e6;
    const last = box.lastElementChild.getBoundingClientRect().right, end = box.getBoundingClientRect().right;
    if (last > end + 1) found.push(`${last} is behind ${end}`);
    box.scrollLeft = 0;
  }
  return found;
}"""
"""Graph and tables that cannot be scrolled to their right edge."""

FAINT = """() => {
  const light = ([r, g, b]) => {
    const linear = [r, g, b].map((part) => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = channels(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
  };
  const found = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || node.closest("svg, noscript") || !node.getClientRects().length) continue;
    const pair = [light(channels(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    if ((pair[0] + 0.05) / (pair[1] + 0.05) < 4.5) found.push(node.textContent.trim());
  }
  return found;
}"""
"""Text whose contrast is below 4.5, the least that WCAG 2 wants."""


def test_it_is_quiet_fits_and_can_be_read(opened: Opened) -> None:
    """No request but for the page itself, nothing in the console, and no text cut, covered or faint."""
    size = opened.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert size[0] == size[1]
    assert opened.page.evaluate(OVERLAPS) == []
    assert opened.page.evaluate(HIDDEN) == []
    assert opened.page.evaluate(CROSSINGS) == []
    assert opened.page.evaluate(FAINT) == []
    assert (opened.requests, opened.messages) == ([opened.url], [])


def drawn_width(page: Any) -> float:
    width: float = page.locator(".room").bounding_box()["width"]
    return width


def test_the_pointer_tells_and_zooms(opened: Opened) -> None:
    """An action under the pointer shows its messages, inside the window; a click keeps them; buttons and wheel zoom."""
    page = opened.page
    actions = page.locator("rect.action")
    last = actions.nth(actions.count() - 1)
    last.scroll_into_view_if_needed()
    last.hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert " of " in tip.inner_text()
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]
    assert page.locator("path.before, path.after").count() >= 1
    last.click()
    page.mouse.move(1, 1)
    assert not tip.is_visible()
    assert "micro-batch" in page.locator("#details").inner_text()
    before = drawn_width(page)
    page.locator("#in").click()
    zoomed = drawn_width(page)
    assert zoomed > 1.3 * before
    page.locator("#scroll").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function(
        "before => document.querySelector('.room').getBoundingClientRect().width > before", arg=zoomed
    )
    page.locator("#fit").click()
    assert drawn_width(page) == pytest.approx(before)
    assert opened.messages == []
