"""The report in a real browser: nothing on the console, nothing from the network, nothing that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page

from resilient.report.page import render
from tests.report import ledgers

KINDS = ("rich", "empty", "calm", "running", "hostile", "large")
SCREENSHOTS = Path(__file__).parents[2] / "build" / "report"

CONTRASTS = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parse(color).slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (parse(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (!own(element) || ["SCRIPT", "STYLE"].includes(element.tagName) || !element.getClientRects().length) continue;
    const svg = element.closest("svg");
    let on = behind(element);
    if (element.closest(".incident-mark")) on = getComputedStyle(element.closest("a").querySelector("circle")).fill;
    if (element.closest(".gen-name")) on = getComputedStyle(element.closest("svg").querySelector("rect")).fill;
    const style = getComputedStyle(element);
    const [a, b] = [light(svg ? style.fill : style.color), light(on)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), element.textContent.slice(0, 40), element.getAttribute("class")]);
  }
  return found.sort((x, y) => x[0] - y[0]).slice(0, 3);
}"""


class Seen:
    """What a page has said and asked for while it was open."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        page.on("requestfailed", lambda request: self.said.append(f"failed: {request.url}"))
        page.on("request", lambda request: self.asked.append(request.url))


Open = Callable[..., Seen]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for kind in KINDS:
        found[kind] = folder / f"{kind}.html"
        found[kind].write_text(render(getattr(ledgers, kind)()), encoding="utf-8")
    return found


@pytest.fixture
def opened(browser: Browser, files: dict[str, Path]) -> Open:
    def open_one(kind: str, width: int = 1280, scheme: Literal["light", "dark"] = "light", **options: Any) -> Seen:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        seen = Seen(context.new_page())
        seen.page.goto(files[kind].as_uri())
        return seen

    return open_one


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("kind", KINDS)
def test_it_fits_says_nothing_and_can_be_read(
    opened: Open, kind: str, width: int, scheme: Literal["light", "dark"], files: dict[str, Path]
) -> None:
    seen = opened(kind, width, scheme)
    page = seen.page
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{kind}-{width}-{scheme}.png", full_page=True)
    assert seen.said == []
    assert [url for url in seen.asked if not url.startswith("data:")] == [files[kind].as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
    for ratio, text, where in page.evaluate(CONTRASTS):
        assert ratio >= 4.5, f"{text!r} ({where}) has a contrast of {ratio:.2f}"


def test_a_long_run_is_a_small_file(files: dict[str, Path]) -> None:
    """10,000 steps, 8 ranks, 3 hours of two machines at 10 Hz."""
    ledger = ledgers.rich()
    assert ledger.step == 10_000
    assert len({one.rank for one in ledger.pictures}) == 8
    assert sum(len(one.values["power_w"]) for one in ledger.machines) >= 2 * 9 * 3600 * 1.7
    assert files["rich"].stat().st_size < 2_000_000
    assert files["large"].stat().st_size < 2_000_000


def test_nothing_that_a_run_has_written_becomes_part_of_the_page(opened: Open) -> None:
    page = opened("hostile").page
    assert page.title() != "owned"
    assert page.locator("script").count() == 1
    assert page.locator("img, iframe, object, embed").count() == 0
    assert "<script>document.title" in page.locator("#incidents").inner_text()


def test_what_got_into_the_page_all_the_same_could_load_and_run_nothing(opened: Open) -> None:
    page = opened("calm").page
    blocked = page.evaluate("""() => new Promise((resolve) => {
      const blocked = [];
      document.addEventListener("securitypolicyviolation", (event) => {
        blocked.push(event.effectiveDirective);
        if (blocked.length === 2) resolve(blocked.sort());
      });
      const image = document.createElement("img");
      image.src = "https://example.com/pixel.png";
      const script = document.createElement("script");
      script.textContent = "document.title = 'owned'";
      document.body.append(image, script);
    })""")
    assert blocked == ["img-src", "script-src-elem"]
    assert page.title() != "owned"


def test_without_scripts_everything_is_there(opened: Open) -> None:
    page = opened("rich", java_script_enabled=False).page
    assert page.locator("h2").all_inner_texts()[:4] == ["In short", "What to change", "Timeline", "Where the time went"]
    assert page.locator("#theme").is_hidden()
    assert page.locator("#incidents .card").count() == 6
    page.locator("#incident-2 summary").click()
    assert page.locator("#incident-2 pre").is_visible()


def test_colors_can_be_turned_around(opened: Open) -> None:
    page = opened("calm", scheme="dark").page
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) == "rgb(250, 249, 246)" != before
    page.locator("#theme").click()
    assert page.evaluate(background) == before


def test_a_closer_look_makes_the_figure_wider_and_not_the_page(opened: Open) -> None:
    page = opened("rich", 360).page
    figure = page.locator("#timeline figure")
    figure.get_by_label("Look closer").click()
    figure.get_by_label("Look closer").click()
    box = figure.locator(".canvas").bounding_box()
    assert box is not None
    assert box["width"] == pytest.approx(4 * 328, abs=2)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_marks_say_what_they_are_to_pointers_and_keys_and_times_are_told_in_local_time_too(opened: Open) -> None:
    page = opened("rich", timezone_id="Asia/Tokyo", locale="en-GB").page
    page.locator(".incident-mark").nth(1).hover()
    assert "rank 2 on node-a" in page.locator(".tip").inner_text()
    page.locator(".incident-mark").nth(2).focus()
    assert "network" in page.locator(".tip").inner_text()
    first = page.locator("header time").first
    assert first.inner_text() == "2026-12-01 12:30:00 UTC"
    assert "21:30:00 local time" in (first.get_attribute("title") or "")


@pytest.mark.parametrize("kind", ["rich", "large"])
def test_a_number_on_the_timeline_leads_to_its_failure(opened: Open, kind: str) -> None:
    page = opened(kind).page
    page.locator(".incident-mark").nth(3).focus()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.card:target')?.checkVisibility()")
    assert page.locator(".card:target h3").inner_text().startswith("4")
