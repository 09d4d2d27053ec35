"""The server's page in a browser: what is seen, what the keyboard reaches, what assistive software is told."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from served import command, live, slow_down, wait_until

SUM = "add 48213 and 90377"
SIZE = {"width": 900, "height": 1000}
MINUTE = 60_000  # milliseconds
expect.set_options(timeout=MINUTE)

# The contrast of an element's text with the page, as in WCAG 2.
CONTRAST = """element => {
  const light = color => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
    const [red, green, blue] = parts.map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
    return .2126 * red + .7152 * green + .0722 * blue;
  };
  const canvas = document.body.appendChild(document.createElement("div"));
  canvas.style.backgroundColor = "Canvas";
  const pair = [getComputedStyle(element).color, getComputedStyle(canvas).backgroundColor].map(light);
  canvas.remove();
  return (Math.max(...pair) + .05) / (Math.min(...pair) + .05);
}"""

# Keeps what later requests answer, read apart from the page: a browser need not keep a stream that a page has read.
KEEP_ANSWERS = """() => {
  const send = window.fetch;
  window.fetch = async (...request) => {
    const response = await send(...request);
    window.answer = response.clone().text();
    return response;
  };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "these tests need chromium on the PATH: `.ci/run browser` installs it"
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, timeout=MINUTE) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """Serve with receipts in a process; the address of the page."""
    with command("--receipts", str(tmp_path_factory.mktemp("receipts"))) as server:
        yield server.url.removesuffix("v1")


@pytest.fixture
def open_page(browser) -> Iterator:
    """Return ``open_page(url, **context)``; a page must neither complain nor ask another host for anything."""
    contexts, found = [], []

    def opened(url: str, **options) -> Page:
        contexts.append(browser.new_context(viewport=SIZE, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(MINUTE)
        page.on("console", lambda message: found.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: found.append(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith(url) or found.append(f"request: {request.url}"))
        page.goto(url)
        expect(page.locator("#model")).not_to_be_empty()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not found


@pytest.fixture
def page(open_page, server) -> Page:
    return open_page(server)


@pytest.fixture
def artifacts(tmp_path) -> Path:
    """Return the folder for screenshots."""
    folder = Path(os.environ.get("DFLASH_ARTIFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def send(page: Page, text: str = SUM, **settings: object) -> None:
    """Send a message; ``settings`` are values by label."""
    for label, value in settings.items():
        page.get_by_label(label).fill(str(value))
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def answered(page: Page) -> str:
    """Wait for the end of an answer and return its text."""
    expect(page.locator("#status")).to_have_text(re.compile(r"^Answered: \d+ tokens$"))
    return page.locator("#log li p").last.inner_text()


def test_a_conversation_by_keyboard(page, artifacts):
    message, log = page.get_by_label("Message"), page.get_by_role("log", name="Conversation")
    page.keyboard.press("Tab")
    expect(message).to_be_focused()
    page.keyboard.press("Control+A")
    page.keyboard.type("add 1 and 2")
    page.keyboard.press("Shift+Enter")
    expect(message).to_have_value("add 1 and 2\n")
    page.keyboard.press("Control+A")
    page.keyboard.type(SUM)
    page.keyboard.press("Enter")
    assert answered(page).endswith("138590.")
    expect(log).to_contain_text(SUM)
    expect(message).to_be_focused()
    page.keyboard.press("Shift+Tab")
    verify = page.get_by_role("button", name="Verify answer 1")
    expect(verify).to_be_focused()
    page.keyboard.press("Enter")
    result = log.get_by_role("status")
    expect(result).to_have_text(re.compile(r"^every token follows from seed and weights: \d+ tokens$"))
    expect(verify).to_be_focused()
    page.screenshot(path=artifacts / "page.png", full_page=True)


def test_colors_and_numbers_are_those_of_the_stream(page):
    page.evaluate(KEEP_ANSWERS)
    send(page, Temperature=0)
    text = answered(page)
    events = [event.removeprefix("data: ") for event in page.evaluate("answer").split("\n\n") if event]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    spans = []
    for choice in choices:
        piece, drafted = choice["delta"].get("content") or "", (choice.get("drafts") or {}).get("characters", 0)
        spans += [("drafted", piece[:drafted]), ("bonus", piece[drafted:])]
    spans = [span for span in spans if span[1]]
    assert {kind for kind, _ in spans} == {"drafted", "bonus"}
    shown = page.locator("#log li p").last.locator("span")
    assert shown.evaluate_all("all => all.map(part => [part.className, part.textContent])") == [[*s] for s in spans]
    assert "".join(piece for _, piece in spans) == text
    colors = shown.evaluate_all("all => all.map(part => `${part.className} ${getComputedStyle(part).color}`)")
    assert len({*colors}) == len({color.split(" ", 1)[1] for color in colors}) == 2
    first, *steps = [choice["drafts"]["tokens"] for choice in choices if choice.get("drafts")]
    rows = page.locator("#histogram tr").all()
    histogram = [[int(cell) for cell in row.locator("th, td:not(.bar)").all_inner_texts()] for row in rows]
    assert histogram == [[*row] for row in sorted(Counter(tokens for tokens in steps if tokens).items())]
    widths = [row.locator(".bar i").bounding_box()["width"] for row in rows]
    assert [width / max(widths) for width in widths] == pytest.approx(
        [count / max(count for _, count in histogram) for _, count in histogram], abs=0.02
    )
    expect(page.locator("#tokens")).to_have_text(str(first + sum(steps)))
    expect(page.locator("#speed")).to_have_text(re.compile(r"^[1-9]\d*$"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(open_page, server, artifacts, scheme):
    page = open_page(server, color_scheme=scheme)
    send(page)
    answered(page)
    for part in ("h1", "#log .drafted", "#log .bonus", "#status", "#message", ".verify button"):
        assert page.locator(part).first.evaluate(CONTRAST) >= 4.5
    is_dark = page.locator("body").evaluate("body => getComputedStyle(body).color") == "rgb(255, 255, 255)"
    assert is_dark == (scheme == "dark")
    page.screenshot(path=artifacts / f"{scheme}.png", full_page=True)


def test_every_control_has_a_name_and_fits_a_narrow_window(page, artifacts):
    page.set_viewport_size({"width": 360, "height": 740})
    send(page)
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.screenshot(path=artifacts / "narrow.png", full_page=True)
    controls = page.locator("button, input, textarea, select").all()
    assert len(controls) == 9  # the message, four settings, and Send, Stop, New conversation, Verify
    for control in controls:
        expect(control).to_have_accessible_name(re.compile(r"\w{3}"))
    expect(page.get_by_role("table", name="Steps by the tokens that they wrote")).to_be_visible()


def test_numbers_are_live_and_stop_ends_an_answer(open_page):
    with live() as server:
        slow_down(server.service, 1.0)
        page = open_page(server.url.removesuffix("v1"))
        log, stop = page.get_by_role("log", name="Conversation"), page.get_by_role("button", name="Stop")
        expect(stop).to_be_disabled()
        send(page)
        expect(page.locator("#speed")).to_have_text(re.compile(r"^[1-9]\d*$"))
        expect(page.locator("#status")).to_have_text("Answering")
        expect(page.locator("#log .drafted")).not_to_have_count(0)
        expect(log).to_have_attribute("aria-busy", "true")
        stop.click()
        expect(page.locator("#status")).to_have_text("Stopped")
        expect(log).not_to_have_attribute("aria-busy", "true")
        expect(stop).to_be_disabled()
        wait_until(lambda: server.service.scheduler.running == 0)
        send(page, **{"Tokens at most": 3})
        answered(page)


def test_without_receipts_the_page_says_why_nothing_can_be_verified(open_page):
    with live() as server:
        page = open_page(server.url.removesuffix("v1"))
        expect(page.get_by_text("started with --receipts FOLDER")).to_be_visible()
        send(page)
        answered(page)
        expect(page.get_by_role("button", name="Verify")).to_have_count(0)
