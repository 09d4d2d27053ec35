"""The server's page in a browser: what is seen, what the keyboard reaches, what assistive software is told."""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from served import command, live, slow_down, wait_until

SUM = "add 48213 and 90377"
SIZE = {"width": 1280, "height": 1000}
MINUTE = 60_000  # milliseconds
expect.set_options(timeout=MINUTE)

MARKDOWN = (
    """# Sizes

1. one
2. two

A [a page](https://example.org/a?b=1&c=2), ![a picture](https://example.org/a.png) and `code`.

```python
if a < b:
    print(a)
```

| name | size |
| --- | ---: |
| a<br>b | 1 |

A line of 200: """
    + "x" * 200
)
PLANTED = """<script>planted = 1</script>

<img src=x onerror="planted = 2"> and <a href="javascript:planted = 3">press</a>

<iframe srcdoc="<script>parent.planted = 4</script>"></iframe><style>body { display: none }</style>

<svg/onload="planted = 5"><math><mtext><img src=x onerror="planted = 6">

[press](javascript:planted=7) [press](JaVaScRiPt&colon;planted=8) [press](data:text/html,<script>planted=9</script>)
[press](vbscript:x) <javascript:planted=10> ![press](javascript:planted=11)

[press]: javascript:planted=12 "x"

```"onmouseover="planted=13"
</code></pre><img src=x onerror="planted = 14">
```
"""

# The contrast of an element's text with what is behind it, as in WCAG 2.
CONTRAST = """element => {
  const light = color => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
    const [red, green, blue] = parts.map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
    return .2126 * red + .7152 * green + .0722 * blue;
  };
  let behind = element;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  const pair = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(light);
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

    def opened(url: str, script: str = "", is_refused: bool = False, **options) -> Page:
        contexts.append(browser.new_context(**{"viewport": SIZE} | options))
        page = contexts[-1].new_page()
        page.set_default_timeout(MINUTE)
        page.on("console", lambda message: is_refused or found.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: found.append(f"error: {error}"))
        page.on("dialog", lambda dialog: found.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: request.url.startswith(url) or found.append(f"request: {request.url}"))
        page.add_init_script(script)
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


def write(page: Page, *answers: str | dict) -> list[dict]:
    """Answer the page's requests with texts or events, the last again and again; return what it will have sent."""
    sent: list[dict] = []

    def respond(route: Route) -> None:
        sent.append(route.request.post_data_json)
        text = answers[min(len(sent), len(answers)) - 1]
        events = [text] if isinstance(text, dict) else []
        for part in re.findall(r"(?s).{1,9}", text) if isinstance(text, str) else ():
            drafts = {"tokens": 3, "accepted": 2, "characters": len(part) - 1}
            events.append({"id": "x", "choices": [{"delta": {"content": part}, "drafts": drafts}]})
        events.append({"id": "x", "choices": [{"delta": {}, "finish_reason": "stop"}]})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(content_type="text/event-stream", body=f"{body}data: [DONE]\n\n")

    page.route("**/v1/chat/completions", respond)
    return sent


def set_up(page: Page, **settings: object) -> None:
    """Change settings by their ids."""
    page.get_by_role("button", name="Settings").click()
    for name, value in settings.items():
        page.locator(f"#settings #{name}").fill(str(value))
    page.get_by_role("button", name="Close").click()


def send(page: Page, text: str = SUM) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def answered(page: Page) -> str:
    """Wait for the end of an answer and return its text."""
    expect(page.locator("#status")).to_have_text(re.compile(r"^Answered: \d+ tokens$"))
    return page.locator(".assistant > .text").last.inner_text()


def ask(page: Page, text: str = SUM) -> str:
    send(page, text)
    return answered(page)


def titles(page: Page) -> list[str]:
    return page.locator("#list a").all_inner_texts()


def test_a_conversation_by_keyboard(page, artifacts):
    message, log = page.get_by_label("Message", exact=True), page.get_by_role("log", name="Conversation")
    expect(message).to_be_focused()
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
    page.keyboard.press("Enter")  # unfolds the numbers
    expect(page.get_by_role("table", name="Steps by the tokens that they wrote")).to_be_visible()
    page.keyboard.press("Shift+Tab")
    verify = page.get_by_role("button", name="Verify answer 1")
    expect(verify).to_be_focused()
    page.keyboard.press("Enter")
    result = log.get_by_role("status")
    expect(result).to_have_text(re.compile(r"^every token follows from seed and weights: \d+ tokens$"))
    expect(verify).to_be_focused()
    page.screenshot(path=artifacts / "page.png")


def test_colors_and_numbers_are_those_of_the_stream(page):
    page.evaluate(KEEP_ANSWERS)
    set_up(page, temperature=0)
    text = ask(page)
    expect(page.locator(".drafted:visible, .bonus:visible")).to_have_count(0)
    page.get_by_role("button", name="Drafts").click()
    events = [event.removeprefix("data: ") for event in page.evaluate("answer").split("\n\n") if event]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    spans = []
    for choice in choices:
        piece, drafted = choice["delta"].get("content") or "", (choice.get("drafts") or {}).get("characters", 0)
        spans += [("drafted", piece[:drafted]), ("bonus", piece[drafted:])]
    spans = [span for span in spans if span[1]]
    assert {kind for kind, _ in spans} == {"drafted", "bonus"}
    shown = page.locator(".assistant > .text > span")
    assert shown.evaluate_all("all => all.map(part => [part.className, part.textContent])") == [[*s] for s in spans]
    assert "".join(piece for _, piece in spans) == text
    colors = shown.evaluate_all("all => all.map(part => `${part.className} ${getComputedStyle(part).color}`)")
    assert len({*colors}) == len({color.split(" ", 1)[1] for color in colors}) == 2
    page.locator(".numbers summary").click()
    first, *steps = [choice["drafts"]["tokens"] for choice in choices if choice.get("drafts")]
    rows = page.locator(".numbers tbody tr").all()
    histogram = [[int(cell) for cell in row.locator("th, td:not(.bar)").all_inner_texts()] for row in rows]
    assert histogram == [[*row] for row in sorted(Counter(tokens for tokens in steps if tokens).items())]
    widths = [row.locator(".bar i").bounding_box()["width"] for row in rows]
    assert [width / max(widths) for width in widths] == pytest.approx(
        [count / max(count for _, count in histogram) for _, count in histogram], abs=0.02
    )
    numbers = dict(zip(*(page.locator(f".numbers {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
    assert numbers["Tokens"] == str(first + sum(steps))
    assert re.fullmatch(r"[1-9]\d*", numbers["Tokens per second"])
    page.get_by_role("button", name="Drafts").click()
    expect(shown).to_have_count(0)
    assert answered(page) == text


def test_without_a_drafter_and_receipts_nothing_is_said_of_them(open_page):
    with live(block_size=1) as server:
        page = open_page(server.url.removesuffix("v1"))
        ask(page)
        page.locator(".numbers summary").click()
        expect(page.get_by_text("First token after")).to_be_visible()
        buttons = (page.get_by_role("button", name=name) for name in ("Drafts", "Verify"))
        for hidden in (*buttons, page.get_by_text("per step"), page.locator("table")):
            expect(hidden.locator("visible=true")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(open_page, server, artifacts, scheme):
    page = open_page(server, color_scheme=scheme)
    page.get_by_role("button", name="Drafts").click()
    write(page, MARKDOWN)
    ask(page)
    for part in (".text .drafted", ".text .bonus", "#legend .drafted"):
        assert page.locator(part).first.evaluate(CONTRAST) >= 4.5, part
    page.get_by_role("button", name="Drafts").click()
    answer = (".user p", ".text p", ".text a", ".text pre code", ".code span", ".text th", ".numbers summary")
    for part in ("h1", "#new", "#list a", "#model", *answer, ".actions button", "#status", "#message", "#send"):
        assert page.locator(part).first.evaluate(CONTRAST) >= 4.5, part
    is_dark = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor") != "rgb(255, 255, 255)"
    assert is_dark == (scheme == "dark")
    page.screenshot(path=artifacts / f"{scheme}.png")


def test_every_control_has_a_name_and_fits_a_phone(open_page, server, artifacts):
    page = open_page(server, viewport={"width": 390, "height": 844}, has_touch=True)
    write(page, MARKDOWN)
    ask(page, "What can you write?\n" + "x" * 200)
    page.screenshot(path=artifacts / "phone.png")
    message = page.get_by_label("Message", exact=True).bounding_box()
    assert message["y"] + message["height"] < 844
    for opened in ("Conversations", "Settings"):
        page.get_by_role("button", name=opened).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.screenshot(path=artifacts / f"phone-{opened.lower()}.png")
        expect(page.get_by_role("link", name="What can you write?")).to_be_visible(visible=opened == "Conversations")
        for control in page.locator("button, input, textarea, a").locator("visible=true").all():
            expect(control).to_have_accessible_name(re.compile(r"\w{3}"))
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("link", name="New conversation").click()
    expect(page.locator("#log li")).to_have_count(0)
    expect(page.get_by_role("link", name="New conversation")).not_to_be_visible()


def test_an_answer_is_markdown(page):
    write(page, MARKDOWN)
    ask(page)
    answer = page.locator(".assistant > .text")
    expect(answer.get_by_role("heading", name="Sizes")).to_be_visible()
    assert answer.locator("ol > li").all_inner_texts() == ["one", "two"]
    assert [row.split("\t") for row in answer.locator("tr").all_inner_texts()] == [["name", "size"], ["a\nb", "1"]]
    expect(answer.get_by_role("link", name="a page")).to_have_attribute("href", "https://example.org/a?b=1&c=2")
    expect(answer.get_by_role("link", name="a picture")).to_have_attribute("href", "https://example.org/a.png")
    for link in answer.get_by_role("link").all():
        expect(link).to_have_attribute("target", "_blank")
        expect(link).to_have_attribute("rel", "noopener noreferrer")


def test_what_a_model_writes_is_never_run(page):
    write(page, PLANTED)
    ask(page)
    answer = page.locator(".assistant > .text")
    for line in ("<script>", "<img src=x onerror=", '<a href="javascript:', "<iframe", "<style>", "<svg/onload="):
        expect(answer).to_contain_text(line)
    expect(answer.locator("script, img, iframe, style, svg, math, input, form")).to_have_count(0)
    assert not answer.locator("[href^='javascript' i], [href^='data' i], [href^='vbscript' i]").count()
    names = answer.locator("*").evaluate_all("all => all.flatMap(each => [...each.attributes].map(one => one.name))")
    assert {*names} <= {"class", "type", "aria-label", "href", "title", "target", "rel"}
    for link in answer.get_by_text("press").all():
        link.click()
    assert page.evaluate("window.planted") is None


@pytest.mark.parametrize("script", ["", "Object.defineProperty(navigator, 'clipboard', {value: undefined})"])
def test_answers_and_code_are_copied(open_page, server, script):
    page = open_page(server, script)
    write(page, MARKDOWN)
    ask(page)
    message = page.get_by_label("Message", exact=True)
    for name, text in (("Copy code", "if a < b:\n    print(a)\n"), ("Copy answer 1", MARKDOWN)):
        page.get_by_role("button", name=name).click()
        expect(page.locator("#status")).to_have_text("Copied")
        expect(page.get_by_role("button", name=name)).to_be_focused()
        message.fill("")
        message.press("Control+V")
        expect(message).to_have_value(text)


def test_reasoning_is_folded(page):
    write(page, {"id": "x", "choices": [{"delta": {"reasoning_content": "Let me **see**", "content": "Yes"}}]})
    assert ask(page) == "Yes"
    thought = page.get_by_text("Let me see")
    expect(thought).not_to_be_visible()
    page.get_by_text("Reasoning").click()
    expect(thought).to_be_visible()


def test_stop_keeps_what_was_written(open_page):
    with live() as server:
        slow_down(server.service, 1.0)
        page = open_page(server.url.removesuffix("v1"))
        log, stop = page.get_by_role("log", name="Conversation"), page.get_by_role("button", name="Stop")
        expect(stop).not_to_be_visible()
        send(page)
        expect(page.locator(".numbers summary")).to_have_text(re.compile(r"^[1-9]\d* tokens, [1-9]\d* per second"))
        expect(page.locator("#status")).to_have_text("Answering")
        expect(log).to_have_attribute("aria-busy", "true")
        stop.click()
        expect(page.locator("#status")).to_have_text("Stopped")
        expect(log).not_to_have_attribute("aria-busy", "true")
        expect(stop).not_to_be_visible()
        wait_until(lambda: server.service.scheduler.running == 0)
        part = page.locator(".assistant > .text").inner_text()
        assert part
        set_up(page, max_tokens=3)
        with page.expect_request("**/v1/chat/completions") as request:
            send(page, "and 1")
        assert [(each["role"], each["content"].strip()) for each in request.value.post_data_json["messages"]] == [
            ("user", SUM), ("assistant", part), ("user", "and 1"),
        ]  # fmt: skip
        answered(page)
        expect(page.locator(".note").last).to_have_text("Cut off at the limit of tokens")


def test_a_question_that_fails_is_left_out_later(page):
    sent = write(page, "Hello", {"error": {"message": "the model is tired"}}, "Bye")
    ask(page, "first")
    send(page, "second")
    expect(page.locator("#status")).to_have_text("the model is tired")
    expect(page.locator(".note").last).to_contain_text("the model is tired")
    ask(page, "third")
    assert [each["content"] for each in sent[-1]["messages"]] == ["first", "Hello", "third"]


def test_an_answer_is_written_again_with_another_seed_unless_one_is_set(page):
    sent = write(page, "one", "two", {"error": {"message": "the model is tired"}}, "three")
    again = page.get_by_role("button", name="Regenerate")
    ask(page)
    again.click()
    expect(page.locator(".assistant > .text")).to_have_text("two")
    again.click()
    expect(page.locator("#notice")).to_contain_text("There is no new answer: the model is tired")
    expect(page.locator(".assistant > .text")).to_have_text("two")
    set_up(page, seed=7, top_p=0.5)
    again.click()
    expect(page.locator(".assistant > .text")).to_have_text("three")
    expect(page.locator("#notice")).to_contain_text("The seed is 7")
    assert len({request["seed"] for request in sent}) == 4
    assert (sent[-1]["seed"], sent[-1]["top_p"]) == (7, 0.5)
    assert all(request["messages"] == sent[0]["messages"] for request in sent)
    ask(page, "next")
    expect(again).to_have_count(1)


def test_editing_a_message_drops_what_follows(page):
    sent = write(page, "one", "two", "three")
    message = page.get_by_label("Message", exact=True)
    ask(page, "first")
    ask(page, "second")
    message.fill("not sent yet")
    edit = page.get_by_role("button", name="Edit")
    edit.first.click()
    expect(message).to_have_value("first")
    expect(message).to_be_focused()
    message.press("Escape")
    expect(message).to_have_value("not sent yet")
    edit.last.click()
    message.fill("other")
    message.press("Enter")
    expect(page.locator(".assistant > .text").last).to_have_text("three")
    expect(message).to_have_value("not sent yet")
    assert page.locator(".user p").all_inner_texts() == ["first", "other"]
    assert [each["content"] for each in sent[-1]["messages"]] == ["first", "one", "other"]


def test_conversations_are_kept_in_the_browser(page):
    sent = write(page, "Hello **you**")
    ask(page, "first\nline")
    page.get_by_role("link", name="New conversation").click()
    expect(page.locator("#log li")).to_have_count(0)
    page.get_by_text("System prompt", exact=True).click()
    page.get_by_label("System prompt of this conversation").fill("Be brief")
    ask(page, "second")
    assert sent[-1]["messages"] == [
        {"role": "system", "content": "Be brief"}, {"role": "user", "content": "second"},
    ]  # fmt: skip
    page.get_by_label("Title of this conversation").fill("My title")
    page.get_by_label("Title of this conversation").press("Enter")
    set_up(page, temperature=0.5, key="secret")
    page.reload()
    assert titles(page) == ["My title", "first"]
    expect(page.locator(".assistant strong")).to_have_text("you")
    expect(page.locator("#excerpt")).to_have_text(": Be brief")
    expect(page.locator("#temperature")).to_have_value("0.5")
    expect(page.locator("#key")).to_have_value("secret")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    page.get_by_role("link", name="first").click()
    expect(page.locator(".user p")).to_have_text("first\nline")
    expect(page.locator("#excerpt")).to_be_empty()
    ask(page, "again")
    assert [each["content"] for each in sent[-1]["messages"]] == ["first\nline", "Hello **you**", "again"]
    assert titles(page) == ["first", "My title"]
    for undone in (True, False):
        page.get_by_role("button", name="Delete first").click()
        expect(page.locator("#log li")).to_have_count(0)
        assert titles(page) == ["My title"]
        if undone:
            page.get_by_role("button", name="Undo").click()
            expect(page.locator("#log li")).to_have_count(4)
    page.reload()
    assert titles(page) == ["My title"]


def test_another_tab_shows_the_same_conversations(page):
    write(page, "Hello")
    ask(page, "first")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("#log li")).to_have_count(2)
    ask(page, "second")
    expect(other.locator("#log li")).to_have_count(4)
    page.get_by_role("button", name="Delete first").click()
    expect(other.locator("#list li")).to_have_count(0)


def test_an_answer_goes_on_while_another_conversation_is_open(open_page):
    with live() as server:
        slow_down(server.service, 0.2)
        page = open_page(server.url.removesuffix("v1"))
        send(page)
        expect(page.locator("#status")).to_have_text("Answering")
        page.get_by_role("link", name="New conversation").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.get_by_role("link", name=SUM).click()
        assert answered(page).endswith("138590.")


FULL = "localStorage.clear(); for (let size = 2 ** 23; size >= 1; size /= 2) try {"
FULL += " for (let i = 0;; i++) localStorage.setItem(`${size} ${i}`, 'x'.repeat(size)) } catch {}"
FORBIDDEN = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError') }})"


@pytest.mark.parametrize(("script", "reason"), [(FULL, "storage for the page is full"), (FORBIDDEN, "stores nothing")])
def test_a_conversation_goes_on_if_it_cannot_be_kept(open_page, server, script, reason):
    page = open_page(server, script)
    sent = write(page, "Hello")
    for count in (1, 3):
        ask(page, "a question")
        expect(page.locator("#notice")).to_contain_text(reason)
        assert len(sent[-1]["messages"]) == count
    assert titles(page) == ["a question"]


def test_a_broken_conversation_in_the_storage_is_left_out(open_page, server):
    broken = [("1", "{"), ("2", "null"), ("3", "{}"), ("4", '"text"')]
    script = "".join(f"localStorage.setItem('dflash/conversation/{name}', '{text}');" for name, text in broken)
    page = open_page(server, script)
    write(page, "Hello")
    ask(page, "a question")
    assert titles(page) == ["a question"]


def test_a_key_is_asked_for(open_page):
    with live(key="secret") as server:
        page = open_page(server.url.removesuffix("v1"), is_refused=True)
        expect(page.locator("#model")).to_have_text("This server needs its key")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("pair")
        expect(page.get_by_label("API key")).not_to_be_visible()
        ask(page)


def test_a_prompt_to_try_fills_the_message(page):
    page.get_by_role("button", name=SUM).click()
    expect(page.get_by_label("Message", exact=True)).to_have_value(SUM)
    page.keyboard.press("Enter")
    assert answered(page).endswith("138590.")
    expect(page.get_by_text(re.compile(r"tokens, \d+ per second, \d+\.\d per pass of the model"))).to_be_visible()


def test_settings_are_fields_of_the_request(page):
    page.get_by_role("button", name="Settings").click()
    values = {"Top k": 20, "Min p": 0.01, "Repetition penalty": 1.1, "Presence penalty": 0.5, "Frequency penalty": -0.5}
    for label, value in values.items():
        page.get_by_label(label).fill(str(value))
    page.get_by_label("Stop strings").fill("zzz\n makes ")
    page.get_by_label("Stop strings").blur()
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page)
    names = [label.lower().replace(" ", "_") for label in values]
    assert [sent.value.post_data_json[name] for name in names] == [*values.values()]
    assert sent.value.post_data_json["stop"] == ["zzz", " makes "]


def test_conversations_are_found_exported_and_imported(page, open_page, server, tmp_path):
    write(page, "Hello")
    ask(page, "a question")
    page.get_by_role("link", name="New conversation").click()
    ask(page, "another one")
    page.get_by_label("Search conversations").fill("QUESTION")
    assert titles(page) == ["a question"]
    page.get_by_label("Search conversations").fill("nothing of this kind")
    expect(page.get_by_text("No conversation has this text.")).to_be_visible()
    page.get_by_label("Search conversations").fill("")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "all.json"
    download.value.save_as(file)
    other = open_page(server)
    for count in (2, 0):  # the second time nothing is new
        other.get_by_label("File of conversations").set_input_files(file)
        expect(other.get_by_text(f"{count} of 2 conversations are new.")).to_be_visible()
        assert titles(other) == ["another one", "a question"]
    other.get_by_role("link", name="a question").click()
    expect(other.locator(".assistant .text").last).to_have_text("Hello")
    file.write_text("{}")
    other.get_by_label("File of conversations").set_input_files(file)
    expect(other.get_by_text("all.json cannot be imported: it is no export of this page")).to_be_visible()
