"""Host and path of a request."""

from __future__ import annotations

import asyncio

import pytest
from support.connection_harness import connected, settle

HOST = b"Host: a\r\n"


def answered(line, *heads):
    """Return the status, the written bytes, and the path and hosts of the request."""
    asked = []

    async def application(scope, receive, send):
        asked.append((scope["path"], scope["query_string"], [v for name, v in scope["headers"] if name == b"host"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def run():
        async with connected() as (server, connection, transport):
            server.app = application
            connection.data_received(b"\r\n".join([line, *heads, b"", b""]))
            await settle()
            return transport.statuses[0], transport.written, asked

    return asyncio.run(run())


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [b"Host: a", b"Host: a"],
        [b"Host: a", b"host: b"],
        [b"Host: a b"],
        [b"Host: a/b"],
        [b"Host: u@a"],
        [b"Host: a:b"],
        [b"Host: a:1:2"],
        [b"Host: \xc3\xa4"],
        [b"Host: [::1"],
        [b"Host: a, b/"],
    ],
)
def test_request_needs_exactly_one_host(hosts):
    status, written, asked = answered(b"GET / HTTP/1.1", *hosts)
    assert (status, asked) == (400, [])
    assert b"`Host` must be given once" in written
    assert b"connection: close" in written


def test_request_has_at_most_one_origin():
    """The checks of browser requests read only the first `Origin`."""
    origins = b"Origin: http://a", b"origin: http://b"
    status, written, asked = answered(b"GET / HTTP/1.1", HOST[:-2], *origins)
    assert (status, asked) == (400, [])
    assert b"`Origin` must be given at most once" in written
    assert answered(b"GET / HTTP/1.1", HOST[:-2], origins[0])[0] == 200


@pytest.mark.parametrize("host", [b"", b"a", b"a.b-c_d", b"a:80", b"a:", b"127.0.0.1:8835", b"[::1]", b"[fe80::1]:80"])
def test_valid_host_headers(host):
    status, _, asked = answered(b"GET / HTTP/1.1", b"Host:" + host)
    assert (status, asked) == (200, [("/", b"", [host])])


@pytest.mark.parametrize(("hosts", "status"), [([], 200), ([b"Host: a"], 200), ([b"Host: a", b"Host: b"], 400)])
def test_http_1_0_needs_no_host(hosts, status):
    assert answered(b"GET / HTTP/1.0", *hosts)[0] == status


@pytest.mark.parametrize(
    ("url", "path", "query", "host"),
    [
        (b"http://b", "/", b"", b"b"),
        (b"http://b?x=1", "/", b"x=1", b"b"),
        (b"HTTPS://b:1/p%20q?x=http://c/", "/p q", b"x=http://c/", b"b:1"),
        (b"http://[::1]:8/p", "/p", b"", b"[::1]:8"),
        (b"/http://b/", "/http://b/", b"", b"a"),
    ],
)
def test_host_in_the_url_replaces_the_header(url, path, query, host):
    """The check of host names uses it (RFC 9112, 3.2.2)."""
    assert answered(b"GET " + url + b" HTTP/1.1", b"Host: a")[2] == [(path, query, [host])]


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        (b"http://u@b/p", b"`Host` must be"),
        (b"http://b:c/p", b"`Host` must be"),
        *((url, b"the URL must be a path") for url in (b"http://", b"http:///p", b"ftp://b/p")),
        *((url, b"this is not a request") for url in (b"b:80", b"p", b"p?http://b/")),
    ],
)
def test_url_without_host_or_path_is_refused(url, rule):
    status, written, _ = answered(b"GET " + url + b" HTTP/1.1", b"Host: a")
    assert status == 400
    assert rule in written


def test_asterisk_url_is_accepted():
    assert answered(b"OPTIONS * HTTP/1.1", b"Host: a")[0] == 200


def test_request_behind_a_refused_one_gets_no_response():
    _, written, asked = answered(b"GET / HTTP/1.1", b"", b"GET / HTTP/1.1", b"Host: a")
    assert (written.count(b"HTTP/1.1 "), asked) == (1, [])
