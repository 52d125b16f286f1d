"""Scenarios of the operator's views at /ui: live requests, advice, explanations of waits, and replays."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_serving.cli import main as cli
from support.browser import Browser
from support.page_server import PageServer
from support.ui_scenarios import API_KEYS, HOSTILE, KEYS, ask, scenario, start

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
        # One class: with two classes, the order of arrival would decide whether more slots help.
        threads = [send(server.url, f"r-{n}", max_tokens=30) for n in range(40)]
        for thread in threads:
            thread.join()
        start(page, server.url, "live")
        page.wait_for("document.querySelector('.panels > .panels').childElementCount")  # panels move the button down
        page.click("#advice")
        page.wait_for("document.querySelector('#advice').disabled")
        assert "The server serves requests meanwhile." in page.text(".more[role=status]")
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
