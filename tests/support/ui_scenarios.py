"""Registers the scenarios of the page at /ui that `tests/tools/ui_browser.py` runs; steps that many of them share."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from support.browser import Browser

HOSTILE = """<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>'"`$(touch /tmp/hit)${7*7}\\u2028"""
KEYS = {name: name * 20 for name in ("ann", "bob", "root")}
API_KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(key), admin=name == "root") for name, key in KEYS.items())
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
