"""Test the page at /ui in a headless Chromium: `python tests/tools/ui_browser.py [--save FOLDER] [NAME ...]`.

Needs the program `chromium` (`apt-get install chromium`). The master is real, the device is a fake. Each scenario below
is run, and the browser's console must show no error; `--save` stores screenshots.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "llm-serving")]

from llm_serving.cli import main as cli
from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from support.browser import Browser
from support.fakes import DEMO_TOKENIZER, FakeEngine, Piece, Script
from support.http_serving import serving
from support.page_server import PageServer
from support.tool_cases import HERMES, prompt_of, tokenizer_with

HOSTILE = """<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>'"`$(touch /tmp/hit)${7*7}\\u2028"""
KEYS = {name: name * 20 for name in ("ann", "bob", "root")}
API_KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(key), admin=name == "root") for name, key in KEYS.items())
COPIED = """
    navigator.clipboard.writeText = async (text) => { window.copied = text; };
"""
SCENARIOS: dict[str, Callable[[Browser, Callable[[str], None]], None]] = {}


def scenario(run: Callable[[Browser, Callable[[str], None]], None]) -> Callable[[Browser, Callable[[str], None]], None]:
    SCENARIOS[run.__name__] = run
    return run


def start(page: Browser, url: str, view: str = "playground") -> None:
    page.look()
    page.open(f"{url}/ui#/{view}")
    page.wait_for("document.querySelector('main').childElementCount")


def ask(page: Browser, text: str, **parameters: object) -> None:
    page.wait_for("document.querySelector('.parameter')")  # until then the elements below it move
    for name, value in parameters.items():
        page.type(f"#p-{name}", str(value))
    page.type("#prompt", text)
    page.click("#send")


# --- playground -----------------------------------------------------------------------------------------------------


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
    """Ask, and show the text of the answer when it has ended."""
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


# --- live -----------------------------------------------------------------------------------------------------------

LONG = {"prompt": list(range(5, 25)), "max_tokens": 450, "temperature": 0, "ignore_eos": True, "seed": 1}


def send(url: str, name: str, key: str = "", **fields: Any) -> threading.Thread:
    """Send a long request in a thread; return the thread."""
    headers = {"content-type": "application/json"} | ({"x-api-key": key} if key else {})
    body = json.dumps(LONG | {"request_id": name, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)

    def run() -> None:
        with contextlib.suppress(OSError):  # the server may end first
            urllib.request.urlopen(request, timeout=60).read()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def cancel(url: str, name: str) -> None:
    request = urllib.request.Request(f"{url}/v1/requests/{urllib.parse.quote(name, safe='')}", method="DELETE")
    urllib.request.urlopen(request, timeout=60).read()


def is_in(group: str, name: str) -> str:
    """Return whether a group lists a request."""
    rows = f"document.querySelectorAll('.group[data-phase={group}] .name')"
    return f"[...{rows}].some((each) => each.textContent === {json.dumps(name)})"


@scenario
def live_view_shows_a_preemption(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer(step_s=0.03, max_num_seqs=1).serving() as server:
        start(page, server.url, "live")
        page.wait_for("document.querySelector('[data-tile=running] strong').textContent === '0'")
        send(server.url, "low", priority_class="batch")
        page.wait_for(is_in("decode", "low"))
        send(server.url, "other", priority_class="batch")
        page.wait_for(is_in("queue", "other"))
        send(server.url, "high", priority_class="interactive")
        page.wait_for(f"{is_in('decode', 'high')} && {is_in('preempted', 'low')}")
        assert page.run("document.querySelectorAll('.slot[data-phase=decode]').length") == 1
        save("preempted")
        cancel(server.url, "high")
        page.wait_for(f"{is_in('ended', 'high')} && {is_in('decode', 'low')}")
        cancel(server.url, "low")
        page.wait_for(f"{is_in('ended', 'low')} && {is_in('decode', 'other')}")
        page.click("#freeze")
        cancel(server.url, "other")
        page.click("#freeze")
        page.wait_for("!document.querySelector('.group[data-phase=decode] .name')")
        page.look(width=390, height=900, dark=True)
        assert page.run("document.documentElement.scrollWidth") <= 390, "the page is wider than the screen"


@scenario
def hostile_tenant_name_is_shown_as_text(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer(step_s=0.01).serving() as server:
        start(page, server.url, "live")
        send(server.url, "a..b:c_d-e", user=HOSTILE)
        page.wait_for(is_in("decode", "a..b:c_d-e"))
        page.wait_for(f"document.querySelector('.who').textContent.includes({json.dumps(HOSTILE)})")
        assert page.run("[window.hit === undefined, document.images.length]") == [True, 0]
        page.run("document.querySelector('.name').click()")
        page.wait_for("location.hash.startsWith('#/why/a..b%3Ac_d-e-')")


@scenario
def tenant_sees_its_requests_and_counts_of_others(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer(step_s=0.03, api_keys=API_KEYS).serving() as server:
        start(page, server.url)
        page.run(f"sessionStorage.setItem('llm-serving.key', {json.dumps(KEYS['ann'])})")
        for name in ("ann", "bob"):
            send(server.url, f"of-{name}", KEYS[name])
        page.run("location.hash = '#/live'")
        page.wait_for(is_in("decode", "of-ann"))
        page.wait_for("document.querySelector('[data-tile=running] strong').textContent === '2'")
        assert "of-bob" not in page.text()
        assert "and 1 that are not shown" in page.text(".requests-card")
        page.run(f"sessionStorage.setItem('llm-serving.key', {json.dumps(KEYS['root'])})")
        page.run("document.dispatchEvent(new CustomEvent('key-changed'))")
        page.wait_for(is_in("decode", "of-bob"))
        page.problems.clear()  # the key was missing at first


# --- advice ---------------------------------------------------------------------------------------------------------


@scenario
def advice_comes_from_recorded_requests(page: Browser, save: Callable[[str], None]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        PageServer(step_s=0.01, max_num_seqs=2, record_path=Path(folder)).serving() as server,
    ):
        threads = [
            send(server.url, f"r-{n}", priority_class=("interactive", "batch")[n % 2], max_tokens=30) for n in range(40)
        ]
        for thread in threads:
            thread.join()
        start(page, server.url, "live")
        page.wait_for("document.querySelector('#advice')")
        page.click("#advice")
        page.wait_for("document.querySelector('#advice').disabled")
        assert "The server goes on meanwhile." in page.text(".more[role=status]")
        page.wait_for("!document.querySelector('#advice').disabled", 200.0)
        assert "40 requests, " in page.text(".more[role=status]"), page.text(".more[role=status]")
        page.wait_for("document.querySelector('.advice tbody td.better')")
        if page.run("document.querySelector('.advice summary') !== null"):  # better in one figure, worse in another
            page.click(".advice summary")
            page.wait_for("document.querySelector('.advice details').open")
        lines = page.run("[...document.querySelectorAll('.advice li > code')].map((each) => each.innerText)")
        slots = [int(number) for line in lines for number in re.findall(r"decode_batch_size: (\d+)", line)]
        assert slots and min(slots) > 2, lines  # the number depends on the measured steps
        page.run("document.querySelector('#advice').scrollIntoView()")
        save("advice")
        page.look(width=390, height=900, dark=True)
        page.run("document.querySelector('#advice').scrollIntoView()")
        assert page.run("document.documentElement.scrollWidth") <= 390, "the page is wider than the screen"
        save("narrow-dark")


# --- why did I wait -------------------------------------------------------------------------------------------------


@scenario
def waiting_time_of_an_answer_is_explained(page: Browser, save: Callable[[str], None]) -> None:
    with PageServer(step_s=0.01, max_num_seqs=1).serving() as server:
        start(page, server.url)
        low = send(server.url, "low", priority_class="batch", max_tokens=60)
        ask(page, "Count from 1 to 60.", max_tokens=30)
        page.wait_for("document.querySelector('.facts a')")
        low.join()
        page.click(".facts a")
        page.wait_for("document.querySelector('.explained')")
        assert "Why did I wait?" in page.text("[aria-current]")
        parts = page.run("[...document.querySelectorAll('.explained tbody th')].map((each) => each.innerText.trim())")
        assert {"queued", "prefill", "decode"} <= set(parts), parts
        page.run("location.hash = '#/why/low'")
        page.wait_for("document.querySelector('.explained h2 code')?.textContent === 'low'")
        page.wait_for("document.querySelector('.explained tbody')?.innerText.includes('preempted')")
        assert "by class standard, recompute" in page.text(".explained")
        page.wait_for("document.querySelector('.timeline + .legend').innerText.includes('shown of')")
        shown = page.text(".timeline + .legend")
        page.run("document.querySelector('.timeline').focus()")
        page.press("ArrowRight")
        page.click("[aria-label='zoom in']")
        assert page.text(".timeline + .legend") != shown
        save("explained")
        page.look(width=390, height=900, dark=True)
        assert page.run("document.documentElement.scrollWidth") <= 390, "the page is wider than the screen"
        save("narrow-dark")
        page.run("location.hash = '#/why/unknown'")
        page.wait_for("document.querySelector('.why .error').innerText.includes('request_id')")
        page.problems.clear()  # error of status 404


# --- replay ---------------------------------------------------------------------------------------------------------


@scenario
def recording_is_shown_step_by_step(page: Browser, save: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with PageServer(step_s=0.001, max_num_seqs=2, record_path=Path(folder)).serving() as server:
            threads = [send(server.url, f"low-{number}", priority_class="batch", user=HOSTILE) for number in range(4)]
            wait_until_running(server.url, 2)
            threads += [send(server.url, f"high-{number}", priority_class="interactive") for number in range(2)]
            for thread in threads:
                thread.join()
        [recording] = Path(folder).glob("*.rec")
        shown = Path(folder) / "replay.html"
        assert cli.main(["replay", str(recording), "--html", str(shown)]) == 0
        page.look()
        page.open(shown.as_uri())
        page.wait_for("document.querySelector('.replay')")
        assert "Step 0 computes" in page.text(".wall")
        page.click("[aria-label='next preemption']")
        page.wait_for("document.querySelector('[aria-label=\"Lost their place\"] li')")
        assert "for class interactive, to be computed again" in page.text("[aria-label='Lost their place']")
        assert "and it waits: " in page.text(".verdict")
        page.click("[aria-label='Lost their place'] button")
        page.wait_for("document.querySelector('.history .parts').childElementCount > 2")
        assert "slots were held by" in page.text(".history")
        save("preempted")
        at = page.run("document.querySelector('#step').value")
        page.run("document.activeElement.blur()")
        page.press("ArrowRight")
        assert page.run("document.querySelector('#step').value") == str(int(at) + 1)
        page.click("[aria-label=play]")
        page.wait_for(f"Number(document.querySelector('#step').value) > {int(at) + 3}")
        assert page.run("[window.hit === undefined, document.images.length]") == [True, 0]
        page.look(width=390, height=900, dark=True)
        assert page.run("document.documentElement.scrollWidth") <= 390, "the page is wider than the screen"
        save("narrow-dark")


def wait_until_running(url: str, count: int) -> None:
    while True:
        with urllib.request.urlopen(f"{url}/v1/scheduler", timeout=60) as answer:
            if json.load(answer)["replicas"][0]["running"] == count:
                return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of scenarios; all if none is given")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where to put pictures")
    parser.add_argument("--browser", default="chromium", metavar="PROGRAM")
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.names or SCENARIOS:
        with Browser(arguments.browser) as page:

            def save(what: str, page: Browser = page, name: str = name) -> None:
                if arguments.save is not None:
                    arguments.save.mkdir(parents=True, exist_ok=True)
                    page.save(arguments.save / f"{name}-{what}.png")

            try:
                SCENARIOS[name](page, save)
                assert not page.problems, json.dumps(page.problems, indent=1)
            except Exception as error:  # noqa: BLE001  after any failure the other scenarios run
                failed += 1
                save("failed")
                sys.stdout.write(f"FAILED {name}: {type(error).__name__}: {error}\n")
            else:
                sys.stdout.write(f"passed {name}\n")
            sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
