"""Requests leave no reference cycles, whose collection would block the event loop."""

from __future__ import annotations

import collections
import contextlib
import gc
import ssl
import threading
from functools import partial

import pytest
import trustme
from support.fakes import FakeEngine, Script
from support.http_serving import connect, get, post, read_all, read_until, serving

CLOSE = "Connection: close"
REQUESTS = {
    "a probe": get("/health", CLOSE),
    "two probes": get() + get("/health", CLOSE),
    "a completion": post("/v1/completions", b'{"prompt": "x"}', CLOSE),
    "a stream": post("/v1/completions", b'{"prompt": "x", "stream": true}', CLOSE),
    "a bad body": post("/v1/completions", b'{"prompt": 7}', CLOSE),
    "a long bad body": post("/v1/completions", b'{"prompt": 7, "user": "%s"}' % (b"x" * 40_000), CLOSE),
    "a prompt that does not fit": post("/v1/completions", b'{"prompt": "%s"}' % (b"x " * 40_000), CLOSE),
    "a deadline that has passed": post("/v1/completions", b'{"prompt": "x", "timeout_s": 1e-9}', CLOSE),
    "a conversation that cannot be rendered": post(
        "/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', CLOSE
    ),
    "a form that cannot be compiled": post("/v1/completions", b'{"prompt": "x", "regex": "("}', CLOSE),
    "no HTTP": b"\x16\x03\x01\r\n\r\n",
    "silence": None,
}


def ask(url, request):
    with connect(url) as client:
        if request is not None:
            client.sendall(request)
            assert read_all(client)


def left_behind(act, settle):
    """Return the types of objects that twenty runs leave to the collector; `settle` waits for earlier ones."""
    for _ in range(3):
        act()  # the first fill caches
    settle()
    gc.collect()
    gc.freeze()  # what earlier tests still hold, which their threads may release during the runs
    gc.disable()
    try:
        for _ in range(20):
            act()
        settle()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return collections.Counter(type(each).__qualname__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.fixture(scope="module")
def url():
    with serving(FakeEngine()) as url:
        yield url


@pytest.mark.parametrize("name", REQUESTS)
def test_request_leaves_no_reference_cycles(url, name):
    found = left_behind(partial(ask, url, REQUESTS[name]), partial(ask, url, REQUESTS["a probe"]))
    assert threading.active_count() < 50
    assert found.total() < 40, found.most_common(40)


def test_early_disconnect_leaves_no_reference_cycles():
    engine, aborted = FakeEngine(Script(hold_after=1)), threading.Semaphore(0)
    engine.aborted = type("Aborted", (list,), {"append": lambda self, item: aborted.release()})()

    def leave():
        with connect(url) as client:
            client.sendall(post("/v1/completions", b'{"prompt": "x"}') + get())
            while not engine.submitted:
                pass
            engine.submitted.clear()
        assert aborted.acquire(timeout=30)

    with serving(engine) as url:
        found = left_behind(leave, partial(ask, url, REQUESTS["a probe"]))
    assert found.total() < 40, found.most_common(40)


@pytest.mark.parametrize("hello", [None, b"\x16\x03\x01\x40\x00" + bytes(65536), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_tls_leaves_no_reference_cycles(tmp_path, hello):
    authority, file = trustme.CA(), tmp_path / "certificate.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)

    def fail():
        with connect(url) as client, contextlib.suppress(ConnectionError):
            client.sendall(hello)
            read_all(client)

    def probe():
        with trust.wrap_socket(connect(url), server_hostname="127.0.0.1") as client:
            client.sendall(get("/health", CLOSE))
            assert read_all(client)

    with serving(FakeEngine(limits={"ssl_certfile": file})) as url:
        found = left_behind(probe if hello is None else fail, probe)
    assert found.total() < 40, found.most_common(40)


def test_refused_connection_leaves_no_reference_cycles():
    engine = FakeEngine(Script(hold_after=1), limits={"max_connections_per_address": 1})
    with serving(engine) as url, connect(url) as first:
        first.sendall(post("/v1/completions", b'{"prompt": "x", "stream": true}'))
        read_until(first, b"Hello")
        found = left_behind(partial(ask, url, REQUESTS["a probe"]), lambda: None)
    assert found.total() < 40, found.most_common(40)
