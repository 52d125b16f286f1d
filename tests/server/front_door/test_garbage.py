"""What requests leave behind: nothing that refers to itself, which a search that holds the event loop has to find."""

from __future__ import annotations

import collections
import gc
import threading

import pytest
from fakes import FakeEngine
from http_serving import connect, get, post, read_all, serving

CLOSE = "Connection: close"
REQUESTS = {
    "a probe": get("/health", CLOSE),
    "two probes": get() + get("/health", CLOSE),
    "a completion": post("/v1/completions", b'{"prompt": "x"}', CLOSE),
    "a stream": post("/v1/completions", b'{"prompt": "x", "stream": true}', CLOSE),
    "a bad body": post("/v1/completions", b'{"prompt": 7}', CLOSE),
    "no HTTP": b"\x16\x03\x01\r\n\r\n",
    "silence": None,
}


def ask(url, request):
    with connect(url) as client:
        if request is not None:
            client.sendall(request)
            assert read_all(client)


@pytest.fixture(scope="module")
def url():
    with serving(FakeEngine()) as url:
        yield url


@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_leaves_what_only_a_search_finds(url, name):
    for _ in range(3):
        ask(url, REQUESTS[name])  # the first fill caches
    ask(url, REQUESTS["a probe"])
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            ask(url, REQUESTS[name])
        ask(url, REQUESTS["a probe"])  # when it is answered, the ends before it have been seen
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = collections.Counter(type(each).__qualname__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert threading.active_count() < 50
    assert found.total() < 40, found.most_common(40)
