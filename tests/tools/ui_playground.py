"""Scenarios of the playground at /ui: answers, parameters, Markdown, keys and copied requests."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from llm_serving.config.sections.lora import LoraConfig
from llm_serving.engine.adapters import Adapter
from support.browser import Browser
from support.fakes import DEMO_TOKENIZER, FakeEngine, Piece, Script
from support.http_serving import serving
from support.page_server import PageServer
from support.tool_cases import HERMES, prompt_of, tokenizer_with
from support.ui_scenarios import API_KEYS, HOSTILE, KEYS, ask, scenario, start

COPIED = """
    navigator.clipboard.writeText = async (text) => { window.copied = text; };
"""


@scenario
def an_adapter_is_chosen_from_the_list_of_models(page: Browser, save: Callable[[str], None]) -> None:
    server = PageServer(lora=LoraConfig(lora_folder=Path("adapters")))
    server.engine.adapters.add(Adapter("sql", Path("sql"), "1" * 64))
    with server.serving():
        start(page, server.url)
        page.wait_for("!document.querySelector('#model').hidden")
        page.run("const list = document.querySelector('#model'); list.value = 'sql'; list.onchange();")
        page.wait_for("document.querySelector('.welcome strong')?.textContent === 'sql'")


@scenario
def answer_streams_and_its_tokens_show_their_probabilities(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer(step_s=0.02).serving() as server:
        start(page, server.url)
        page.wait_for("document.querySelector('.example')")
        save("welcome")
        ask(page, "Count from 1 to 60.", max_tokens=40, seed=1)
        page.wait_for("document.querySelectorAll('.token').length > 3")
        assert page.run("document.querySelectorAll('.token').length") < 40, "it came whole"
        page.wait_for("document.querySelector('.facts a')")
        assert page.run("document.querySelectorAll('.token').length") == 40
        assert "ended: length" in page.text(".facts")
        page.hover(".token:nth-child(3)")
        page.wait_for("!document.querySelector('.tip').hidden")
        assert page.run("document.querySelectorAll('.tip li').length") == 6, (
            "the five most likely tokens and the chosen one"
        )
        save("tokens")
        page.run("document.querySelector('.token').focus()")
        page.press("ArrowRight")
        assert page.run("document.activeElement === document.querySelectorAll('.token')[1]")
        page.press("Escape")
        assert page.run("document.querySelector('.tip').hidden")
        page.click(".flip")
        assert page.run("!document.querySelector('.answer .text').hidden")
        page.look(width=390, height=800, dark=True)
        assert page.run("document.documentElement.scrollWidth") <= 390, "the page is wider than the screen"
        save("narrow-dark")


@scenario
def parameters_keep_their_position(page: Browser, save: Callable[[str], None]) -> None:
    position = "Math.round(document.querySelector('.composer').getBoundingClientRect().bottom + scrollY)"
    with PageServer(step_s=0.02).serving() as server:
        for width in (390, 1360):
            page.open("about:blank")
            start(page, server.url)
            page.look(width=width)
            page.run("(document.querySelector('.welcome')?.remove(), scrollTo(0, 0))")
            before = page.run(position)
            page.click("#clear")
            page.wait_for("document.querySelector('.welcome')")
            assert page.run(position) == before, "the welcome moves the composer"
            ask(page, "Count.", max_tokens=3)
            page.wait_for("document.querySelector('.facts a')")
            assert page.run(position) == before, "an answer moves the composer"
            save(f"answered-{width}")
        ask(page, "Count from 1 to 60.", max_tokens=400)
        page.wait_for("document.querySelectorAll('.facts a').length === 2")
        page.run("scrollTo(0, 0)")
        assert page.run("document.documentElement.scrollHeight > innerHeight")
        assert page.run(position) == before, "a long answer moves the composer"


@scenario
def stopped_answer_keeps_its_text(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer(step_s=0.02).serving() as server:
        start(page, server.url)
        ask(page, "Tell me.", max_tokens=400)
        page.wait_for("document.querySelectorAll('.token').length > 3")
        page.click("#stop")
        page.wait_for("document.querySelector('.facts a')")
        assert "ended: abort" in page.text(".facts")
        assert 3 < page.run("document.querySelectorAll('.token').length") < 400
        ask(page, "Again.", max_tokens=3)
        page.wait_for("document.querySelectorAll('.facts a').length === 2")


@scenario
def unreachable_server_is_reported(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer(step_s=0.05).serving() as server:
        start(page, server.url)
        ask(page, "Tell me.", max_tokens=400)
        page.wait_for("document.querySelectorAll('.token').length > 3")
    page.wait_for("document.querySelector('.talk > .error').innerText === 'the connection to the server was lost'")
    ask(page, "Are you there?")
    page.wait_for("document.querySelector('.talk > .error').innerText === 'the server does not answer'")
    page.wait_for("document.querySelector('#status').dataset.state === 'gone'")
    assert page.run("document.querySelector('#prompt').value") == "Are you there?", "the streamed text is lost"
    save("gone")
    page.problems.clear()  # the console reports a failed connection as an error


@scenario
def completion_with_several_choices(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer(step_s=0.001).serving() as server:
        start(page, server.url)
        page.click("[data-mode=completion]")
        ask(page, "Once upon a time", max_tokens=5, n=3)
        page.wait_for("document.querySelectorAll('.answer').length === 3")
        page.wait_for("document.querySelectorAll('.answer:not([aria-busy])').length === 3")
        assert page.run("document.querySelectorAll('.token').length") == 15


@scenario
def invalid_parameter_is_explained(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer().serving() as server:
        start(page, server.url)
        ask(page, "x", temperature="warm")
        page.wait_for("!document.querySelector('.error').hidden")
        assert page.text(".error") == "temperature must be a number"
        ask(page, "x", temperature=101)
        page.wait_for("document.querySelector('.error').innerText.includes('0.0 to 100.0')")
        page.problems.clear()  # the console reports a status of 400 as an error
        page.click(".parameters summary")
        between = """(() => {
            const rows = [...document.querySelectorAll("details .parameter")].map((row) => row.getBoundingClientRect());
            return Math.min(...rows.slice(1).map((row, index) => row.top - rows[index].bottom));
        })()"""
        assert page.run(between) > 4, "fields overlap"


@scenario
def reasoning_is_shown_apart_from_the_answer(page: Browser, save: Callable[[str], None]) -> None:
    pieces = (Piece("<think>"), Piece("Hmm."), Piece("</think>"), Piece("Yes."), Piece(""))
    engine = FakeEngine(script=Script(pieces))
    engine.tokenizer = tokenizer_with(HERMES)
    with serving(engine) as url:
        start(page, url)
        for number in (1, 2):  # first streamed, then whole
            ask(page, "Well?")
            page.wait_for(f"document.querySelectorAll('.facts a').length === {number}")
            answer = f".answer:nth-of-type({2 * number})"
            page.click(f"{answer} .flip")
            assert page.text(f"{answer} .thought") == "Hmm."
            assert page.text(f"{answer} .markdown") == "Yes."
            save(f"thought-{number}")
            page.click("#stream")
        [_, before, _], _ = prompt_of(engine, 1)
        assert before == {"role": "assistant", "content": "Yes."}


@scenario
def hostile_text_is_shown_as_text(page: Browser, save: Callable[[str], None]) -> None:
    script = Script([Piece(HOSTILE), Piece(HOSTILE), Piece("", 1)])
    with serving(FakeEngine(script=script, model_name=HOSTILE)) as url:
        start(page, url)
        page.wait_for("document.querySelector('.welcome')")
        assert HOSTILE[:40] in page.text(".welcome")
        ask(page, HOSTILE)
        page.wait_for("document.querySelector('.facts a')")
        page.click(".flip")
        for shown in (".answer .text", ".user .text"):
            assert HOSTILE[:40] in page.text(shown)
        assert page.run("window.hit") is None
        assert page.run("document.images.length") == 0
        assert page.run("document.querySelectorAll('script').length") == 1
        refused = "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } })()"
        assert page.run(refused), "the browser makes elements of text"
        page.problems.clear()  # errors of the requests that it refused


MARKDOWN = """# Sorting

Use **`sorted`**, *never* __by hand__, ~~ever~~; see [the docs](https://docs.python.org/3/howto/sorting.html "how to").
A line of its own, snake_case_name, 2 * 3 * 4, and https://example.org/a_(b), so it ends.

```python
def first(items):
    return sorted(items)[0]  # **not bold** <b>&amp;</b>
```

1. one
   - nested `a``b`
   - second

   ```
   in a list
   ```
2. two

> quoted
> text

| name | size |
| :--- | ---: |
| a | 1 |

---
Done"""
ATTACK = """<img src=x onerror="window.hit = 1"> <b>bold</b> [x](javascript:alert(1))
[y](data:text/html,<script>hit()</script>)
[z](https://a.example/"onmouseover="window.hit=1) ![i](https://a.example/i.png)
<javascript:alert(1)> [//evil](//evil.example)
[<img src=x onerror=hit()>](https://a.example) **<script>window.hit = 1</script>** `<svg onload=hit()>`

```html onclick="window.hit=1"
<script>window.hit = 1</script>
```

| <img src=x> | b |
| --- | --- |
| <a href="javascript:hit()">x</a> | **<i>** |

- <iframe srcdoc="<script>parent.hit=1</script>"></iframe>
> <style>* { display: none }</style>
"""
SLOW = "".join(
    (
        "[" * 9000,
        "*a **b " * 3000,
        "`" * 5000,
        "\n\n",
        "> " * 3000,
        "\n\n",
        "- " * 3000,
        "x\n",
        "|" * 5000,
        "\n",
        "|-" * 5000,
    )
)
"""Marks that never close, and blocks in blocks without end."""


def answered(page: Browser) -> None:
    """Send a prompt, and show the answer's text once it is complete."""
    page.wait_for("document.querySelector('.parameter')")
    page.type("#prompt", "x")
    page.click("#send")
    page.wait_for("document.querySelector('.answer:not([aria-busy])')")
    page.click(".flip")


@scenario
def markdown_of_an_answer_becomes_elements(page: Browser, save: Callable[[str], None]) -> None:
    pieces = re.findall(r"(?s).{1,7}", MARKDOWN)
    with serving(FakeEngine(script=Script([*map(Piece, pieces), Piece("", 1)]))) as url:
        start(page, url)
        page.run(COPIED)
        answered(page)
        found = page.run(
            """[...document.querySelectorAll(".markdown > *")].map((each) => each.tagName + " " + each.className)"""
        )
        assert found == ["H3 ", "P ", "DIV code", "OL ", "BLOCKQUOTE ", "DIV wide", "HR ", "P "], found

        def texts(selector: str) -> list[str]:
            return page.run(f"[...document.querySelectorAll('.markdown {selector}')].map((each) => each.textContent)")

        assert (texts("strong"), texts("em"), texts("s")) == (["sorted", "by hand"], ["never"], ["ever"])
        links = page.run(
            "[...document.querySelectorAll('.markdown a')].map((each) => [each.href, each.rel, each.target])"
        )
        safe = ["noopener noreferrer nofollow", "_blank"]
        assert links == [["https://docs.python.org/3/howto/sorting.html", *safe], ["https://example.org/a_(b)", *safe]]
        assert "snake_case_name, 2 * 3 * 4" in texts("p")[0]
        assert texts("pre") == [
            "def first(items):\n    return sorted(items)[0]  # **not bold** <b>&amp;</b>",
            "in a list",
        ]
        assert texts("li li") == ["nested a``b", "second"]
        assert texts("td") == ["a", "1"]
        page.click(".code .copy")
        page.wait_for("window.copied")
        assert page.run("window.copied") == texts("pre")[0]
        save("markdown")
        page.look(width=390, height=900, dark=True)
        assert page.run("document.documentElement.scrollWidth") <= 390, "the page is wider than the screen"
        save("narrow-dark")


@scenario
def hostile_markdown_stays_text(page: Browser, save: Callable[[str], None]) -> None:
    with serving(FakeEngine(script=Script([Piece(ATTACK), Piece("", 1)]))) as url:
        start(page, url)
        answered(page)
        assert page.run("window.hit") is None
        elements = page.run(
            "[...new Set([...document.querySelectorAll('.markdown *')].map((each) => each.tagName))].sort()"
        )
        known = {
            "A",
            "BLOCKQUOTE",
            "BUTTON",
            "CODE",
            "DIV",
            "LI",
            "P",
            "PRE",
            "SPAN",
            "STRONG",
            "TABLE",
            "TBODY",
            "TD",
            "TH",
        }
        assert set(elements) <= known | {"THEAD", "TR", "UL"}, elements
        links = page.run("[...document.querySelectorAll('.markdown a')].map((each) => each.href)")
        assert links and all(link.startswith("https://a.example/") for link in links), links
        names = page.run("[...document.querySelectorAll('.markdown *')].flatMap((each) => each.getAttributeNames())")
        assert set(names) <= {"class", "href", "title", "target", "rel", "type", "tabindex"}, set(names)
        for text in ("<img src=x onerror", "javascript:alert(1)", "<iframe srcdoc", "<style>", "<svg onload=hit()>"):
            assert text in page.text(".markdown"), text
        save("hostile")


@scenario
def markdown_without_end_is_drawn_in_time(page: Browser, save: Callable[[str], None]) -> None:
    with serving(FakeEngine(script=Script([Piece(SLOW), Piece("", 1)]))) as url:
        start(page, url)
        answered(page)
        assert page.text(".markdown").startswith("[[[")
        long = SLOW.replace("\n", ""), "**a*" * 5000, "_a " * 6600, "[a](" * 5000, "http://" * 2800
        for text in (SLOW, *long, "[a [b](https://c.example)"):
            draw = f"new module.Markdown().show({json.dumps(text)})"
            timed = f"(() => {{ const began = performance.now(); {draw}; return performance.now() - began; }})()"
            spent = page.run(f"import('/ui/markdown.js').then((module) => {timed})")
            assert spent < 5000, (text[:20], spent)


@scenario
def key_is_kept_in_the_session_only(page: Browser, save: Callable[[str], None]) -> None:
    with serving(FakeEngine(api_keys=API_KEYS)) as url:
        start(page, url)
        page.wait_for("document.querySelector('#key-dialog').open")
        save("key")
        page.type("#key-text", KEYS["ann"])
        page.press("Enter")
        page.wait_for("document.querySelector('.example')")
        page.problems.clear()  # errors of status 401 before
        assert page.run("sessionStorage.getItem('llm-serving.key')") == KEYS["ann"]
        assert page.run("JSON.stringify(localStorage) + document.cookie + location.href").find(KEYS["ann"]) == -1
        ask(page, "Hello")
        page.wait_for("document.querySelector('.facts a')")
        page.click("#key")
        page.click("[value=forget]")
        page.wait_for("sessionStorage.length === 0")
        page.problems.clear()


@scenario
def copied_request_equals_the_sent_one(page: Browser, save: Callable[[str], None]) -> None:
    engine = FakeEngine()
    with serving(engine) as url:
        start(page, url)
        page.run(COPIED)
        page.wait_for("document.querySelector('.example')")
        page.click("[data-mode=completion]")
        page.wait_for("document.querySelector('[data-mode=completion][aria-pressed=true]')")
        page.type("#prompt", HOSTILE)
        page.type("#p-seed", str(2**64 - 1))
        page.click("#copy-curl")
        page.wait_for("window.copied")
        command = page.run("window.copied")
        assert shlex.split(command)[0] == "curl"
        answer = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=True)
        assert "[DONE]" in answer.stdout, answer.stdout
        assert DEMO_TOKENIZER.decode(engine.submitted[-1].prompt_token_ids) == HOSTILE
        assert engine.submitted[-1].sampling.seed == 2**64 - 1
        assert not Path("/tmp/hit").exists()
        page.click("#copy-python")
        page.wait_for("window.copied.includes('openai')")
        call = next(
            node for node in ast.walk(ast.parse(page.run("window.copied")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "create"
        )  # fmt: skip
        given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        assert (given["prompt"], given["seed"], given["stream"]) == (HOSTILE, 2**64 - 1, True)
