"""The chat page in a real browser, against a server that follows a script."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.helpers.page_server import SEED, Script, serve_page

sync_api = pytest.importorskip("playwright.sync_api", reason="the page is driven by playwright, which is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to open the page with")

# No request of the browser's own: each would have to time out here.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
TIMEOUT_MS = 8000

Page = Any
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page of a scripted server; at the end, no page may have complained or asked anybody else."""
    complaints: list[str] = []
    strangers: list[str] = []
    expected: list[str] = []
    with ExitStack() as stack:

        def open_(script: Script, **context: Any) -> Page:
            address = stack.enter_context(serve_page(script))
            if script.error or script.api_key:
                expected.append("Failed to load resource")  # the browser itself reports every 4xx
            page = browser.new_context(**context).new_page()
            stack.callback(page.context.close)
            page.set_default_timeout(TIMEOUT_MS)
            page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda asked: asked.url.startswith(address) or strangers.append(asked.url))
            page.goto(address)
            return page

        yield open_
    assert [text for text in complaints if not any(text.startswith(start) for start in expected)] == []
    assert strangers == []


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def expect_text(page: Page, selector: str, text: str) -> None:
    sync_api.expect(page.locator(selector).last).to_contain_text(text, timeout=TIMEOUT_MS)


def test_an_answer_streams_with_its_accepted_tokens_marked(open_page: Open) -> None:
    script = Script([[("The", False)], [(" boats", True), (" have", True), (" left", False)], [(".", False)]])
    page = open_page(script)
    expect_text(page, "#model", "tiny")
    ask(page, "Where are they?")
    expect_text(page, ".figures", f"seed {SEED}")
    assert page.locator(".answer .text").inner_text().strip() == "The boats have left."
    assert page.locator(".answer .draft").all_inner_texts() == ["boats", "have"]
    # Tint and underline: one of them alone would not do for everybody.
    mark = page.locator(".answer .draft").first
    assert mark.evaluate("e => getComputedStyle(e).textDecorationLine") == "underline"
    assert mark.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"
    # Five tokens, the first by the prompt's pass, two of the other four guessed: two passes.
    figures = page.locator(".figures").inner_text()
    for figure in ("61.6 tok/s", "2.00 tokens per pass", "2 of 40 guesses accepted", "5 tokens", "first after 41 ms"):
        assert figure in figures
    [body] = script.bodies
    assert body["messages"] == [{"role": "user", "content": "Where are they?"}]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["speculative"] == {"metrics": "steps"}


def test_the_conversation_and_the_settings_go_along(open_page: Open) -> None:
    script = Script([[("Yes", False)]])
    page = open_page(script, viewport={"width": 1400, "height": 800})
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Most tokens").fill("")
    page.get_by_label("Drafter").select_option("suffix")
    ask(page, "One?")
    page.get_by_role("button", name=f"seed {SEED}").click()
    page.get_by_label("Guess ahead").uncheck()
    ask(page, "Two?")
    page.wait_for_function("document.querySelectorAll('.figures button').length === 2")
    first, second = script.bodies
    assert first["speculative"] == {"method": "suffix", "metrics": "steps"}
    assert (first["temperature"], first["top_p"]) == (0.25, 0.9)
    assert not {"max_tokens", "seed"} & first.keys()
    assert second["seed"] == SEED
    assert second["speculative"] == {"enabled": False, "metrics": "steps"}
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "One?", "Yes", "Two?"]
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    ask(page, "Three?")
    expect_text(page, ".figures", "seed")
    assert [message["content"] for message in script.bodies[-1]["messages"]] == ["Be brief.", "Three?"]


def test_a_server_without_drafters_has_nothing_to_switch_on(open_page: Open) -> None:
    script = Script([[("Yes", False)]], drafters=())
    page = open_page(script, viewport={"width": 1400, "height": 800})
    sync_api.expect(page.get_by_label("Guess ahead")).to_be_disabled()
    assert not page.get_by_label("Drafter").is_visible()
    ask(page, "One?")
    expect_text(page, ".figures", "seed")
    assert script.bodies[0]["speculative"] == {"metrics": "steps"}


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_an_answer_can_be_stopped(open_page: Open, how: str) -> None:
    script = Script([[("Once", False)], [(" upon", False)]], hold=threading.Event())
    page = open_page(script)
    ask(page, "A story")
    expect_text(page, ".answer .text", "Once")
    assert not page.get_by_role("button", name="Send").is_visible()
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    expect_text(page, ".figures", "Stopped")
    assert script.gone.wait(5), "the server was not told"
    assert page.get_by_role("button", name="Send").is_visible()
    assert page.locator(".answer .text").inner_text().strip() == "Once"
    script.hold = None
    ask(page, "Go on")
    expect_text(page, ".answer .text", "Once upon")
    # What had been written when it was stopped is part of the conversation.
    assert [message["content"] for message in script.bodies[-1]["messages"]] == ["A story", "Once", "Go on"]


def test_a_refusal_is_shown_as_a_sentence_and_can_be_tried_again(open_page: Open) -> None:
    script = Script([[("Better", False)]], error=(400, "the prompt is too long"))
    page = open_page(script)
    ask(page, "Hello")
    expect_text(page, ".answer .notice", "The prompt is too long.")
    script.error = None
    page.get_by_role("button", name="Try again").click()
    expect_text(page, ".answer .text", "Better")
    assert page.locator(".notice:visible").count() == 0


def test_a_fault_in_the_middle_keeps_what_there_was(open_page: Open) -> None:
    page = open_page(Script([[("Half", False)]], late_error="the engine failed on this request"))
    ask(page, "Hello")
    expect_text(page, ".answer .notice", "The engine failed on this request.")
    expect_text(page, ".answer .text", "Half")


def test_an_answer_that_just_ends_is_not_taken_for_a_whole_one(open_page: Open) -> None:
    page = open_page(Script([[("Half", False)]], is_cut=True))
    ask(page, "Hello")
    expect_text(page, ".answer .notice", "The server ended the answer before it was complete.")


def test_a_key_is_asked_for_and_kept_for_the_tab(open_page: Open) -> None:
    script = Script([[("Hi", False)]], api_key="secret")
    page = open_page(script)
    expect_text(page, "#notice", "API key")
    page.get_by_label("API key").fill("secret")
    page.get_by_label("API key").press("Tab")
    expect_text(page, "#model", "tiny")
    page.reload()
    expect_text(page, "#model", "tiny")
    ask(page, "Hello")
    expect_text(page, ".answer .text", "Hi")


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("size", [1, 1000])
def test_what_a_model_writes_is_shown_and_never_run(open_page: Open, size: int, is_draft: bool) -> None:
    evil = "<img src=x onerror=alert(1)> **bold <b>x</b>** `<i>`\n\n```html\n<script>alert(2)</script>\n```\n"
    page = open_page(Script([[(evil[i : i + size], is_draft)] for i in range(0, len(evil), size)]))
    page.on("dialog", lambda dialog: pytest.fail(f"the page ran {dialog.message}"))
    ask(page, "Attack")
    expect_text(page, ".figures", "seed")
    assert page.locator(".answer .text img, .answer .text script, .answer .text b, .answer .text i").count() == 0
    assert "<img src=x onerror=alert(1)>" in page.locator(".answer .text").inner_text()
    assert page.locator(".answer .text strong").inner_text() == "bold <b>x</b>"
    assert page.locator(".answer pre").inner_text().strip() == "<script>alert(2)</script>"


MARKDOWN = """\
# Title

A *first* line with `a*b*c` and snake_case_name,
2 * 3 * 4 = 24.

1. one
2. two
   - inner **bold**
   - last

```python
def f(x):

    return x * 2
```
After
---
````
```
open
"""
SHOWN = (
    "<h3>Title</h3>"
    "<p>A <em>first</em> line with <code>a*b*c</code> and snake_case_name,\n2 * 3 * 4 = 24.</p>"
    "<div><ol><li>one</li><li>two<ul><li>inner <strong>bold</strong></li><li>last</li></ul></li></ol></div>"
    "<figure>def f(x):\n\n    return x * 2</figure>"
    "<p>After</p><hr>"
    "<figure>```\nopen\n</figure>"
)
RENDER = """
async (tokens) => {
  const { Marks, parseBlocks, renderBlock } = await import("./markdown.js");
  const marks = new Marks();
  for (const [text, isDraft] of tokens) marks.append(text, isDraft);
  const source = tokens.map(([text]) => text).join("");
  const holder = document.createElement("div");
  for (const block of parseBlocks(source)) holder.append(renderBlock(source, block, marks));
  const drafts = [...holder.querySelectorAll(".draft")].map((element) => element.textContent);
  for (const element of holder.querySelectorAll(".draft")) element.replaceWith(element.textContent);
  for (const code of holder.querySelectorAll("figure")) code.textContent = code.querySelector("pre").textContent;
  for (const element of holder.querySelectorAll("*")) {
    for (const name of element.getAttributeNames()) element.removeAttribute(name);
  }
  return [holder.innerHTML, drafts];
}
"""


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_markdown_is_shown_whatever_its_tokens_are(open_page: Open, size: int) -> None:
    page = open_page(Script([]))
    pieces = [MARKDOWN[start : start + size] for start in range(0, len(MARKDOWN), size)]
    html, drafts = page.evaluate(RENDER, [(piece, index % 2 == 0) for index, piece in enumerate(pieces)])
    assert html == SHOWN
    assert len("".join(drafts)) > len(MARKDOWN) / 4


def test_hostile_markdown_takes_no_time(open_page: Open) -> None:
    page = open_page(Script([]))
    for text in ("*" * 8000, "`" * 8000, "**a " * 3000, "_a*" * 3000, "- " * 4000, "#" * 8000):
        html, _ = page.evaluate(RENDER, [(text, False)])
        assert html


def test_events_may_be_cut_anywhere(open_page: Open) -> None:
    page = open_page(Script([]))
    text = ': comment\r\n\r\ndata: {"a": "é"}\n\ndata:two\r\rid: 1\ndata: three\ndata: more\n\n'
    source = """
    async ([bytes, size]) => {
      const { eventsOf } = await import("./api.js");
      const stream = new ReadableStream({
        start(controller) {
          for (let i = 0; i < bytes.length; i += size) controller.enqueue(new Uint8Array(bytes.slice(i, i + size)));
          controller.close();
        },
      });
      const events = [];
      for await (const data of eventsOf(stream)) events.push(data);
      return events;
    }
    """
    for size in (1, 2, 3, 7, 1000):
        events = page.evaluate(source, [list(text.encode()), size])
        assert events == ['{"a": "é"}', "two", "three\nmore"]


def test_the_page_works_on_a_narrow_screen(open_page: Open) -> None:
    word = "Donaudampfschifffahrt" * 8
    page = open_page(
        Script([[(word, False)], [("\n```\n" + word + "\n```", True)]]), viewport={"width": 360, "height": 640}
    )
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_label("Temperature").is_visible()
    ask(page, word)
    expect_text(page, ".figures", "seed")
    for selector in ("html", "#scroller"):
        assert page.locator(selector).evaluate("e => e.scrollWidth <= e.clientWidth"), selector
    for name in ("Settings", "New chat", "Send"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    # Shift and Enter write a new line and send nothing.
    page.get_by_label("Message").fill("a")
    page.get_by_label("Message").press("Shift+Enter")
    assert page.get_by_label("Message").input_value() == "a\n"
    assert page.locator(".turn").count() == 1


def test_every_control_has_a_name(open_page: Open) -> None:
    page = open_page(Script([]))
    page.get_by_role("button", name="Settings").click()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")].filter((element) =>
          !(element.labels?.length || element.textContent.trim() || element.getAttribute("aria-label"))
        ).map((element) => element.outerHTML)"""
    )
    assert nameless == []


@pytest.mark.parametrize(("label", "value"), [("Temperature", "9"), ("Seed", "x"), ("Seed", str(2**53))])
def test_a_field_that_makes_no_sense_is_not_sent(open_page: Open, label: str, value: str) -> None:
    script = Script([[("Hi", False)]])
    page = open_page(script, viewport={"width": 1400, "height": 800})
    page.get_by_label(label).fill(value)
    ask(page, "Hello")
    assert page.get_by_label(label).evaluate("e => document.activeElement === e")
    assert page.locator(".turn").count() == 0
    assert script.bodies == []
