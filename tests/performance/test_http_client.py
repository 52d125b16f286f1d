import asyncio
import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_test.http_client import Exchange, HttpClient, HttpError, ResponseParser

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n3;x=y\r\n\r\n!\r\nA\r\n0123456789\r\n0\r\nx-trailer: 1\r\n\r\n"
)
COUNTED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope"
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nall the rest"


def parse(parts: list[bytes]) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    return parser, b"".join(parser.feed(part) for part in parts)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({c % len(data) for c in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(borders)]


@given(st.lists(st.integers(0, 10_000), max_size=60))
def test_http_client_reads_a_chunked_body_split_anywhere(cuts):
    parser, body = parse(cut(CHUNKED, cuts))
    assert (parser.status, body, parser.complete) == (200, b"hello\r\n!0123456789", True)
    assert parser.headers["content-type"] == "text/event-stream"


@given(st.lists(st.integers(0, 10_000), max_size=60))
def test_http_client_reads_a_body_with_content_length_split_anywhere(cuts):
    parser, body = parse(cut(COUNTED, cuts))
    assert (parser.status, body, parser.complete) == (404, b"nope", True)


def test_http_client_reads_a_body_until_the_connection_closes():
    parser, body = parse([UNTIL_CLOSE])
    assert (body, parser.complete) == (b"all the rest", False)
    parser.feed_eof()
    assert parser.complete


def test_http_client_returns_body_bytes_as_they_arrive():
    parser = ResponseParser()
    head, _, rest = CHUNKED.partition(b"5\r\n")
    assert parser.feed(head) == b""
    assert parser.feed(b"5\r\nhel") == b"hel"
    assert parser.feed(b"lo") == b"lo"
    assert parser.feed(rest[5:]) == b"\r\n!0123456789"


def test_http_client_needs_no_body_if_content_length_is_0():
    parser, body = parse([b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n"])
    assert (body, parser.complete) == (b"", True)


def test_http_client_skips_interim_responses():
    parser, body = parse([b"HTTP/1.1 100 Continue\r\n\r\n" + COUNTED])
    assert (parser.status, body) == (404, b"nope")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "closed the connection before the response"),
        (COUNTED[:-1], "closed the connection inside the body"),
        (CHUNKED[:-2], "closed the connection inside the body"),
    ],
)
def test_http_client_raises_if_the_connection_closes_early(data, message):
    parser, _ = parse([data])
    with pytest.raises(HttpError, match=message):
        parser.feed_eof()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP/1.1 response: 'SSH-2.0-OpenSSH'"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n", "not a length: 'many'"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "not a length: '-1'"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", "not a length: 'xyz'"),
    ],
)
def test_http_client_raises_for_bytes_that_are_not_http(data, message):
    with pytest.raises(HttpError, match=message):
        parse([data])


def test_http_client_reports_a_refused_connection():
    with socket.socket() as unused:  # bound but not listening
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(HttpError, match=rf"connection refused: nothing listens at 127\.0\.0\.1:{port}"):
            asyncio.run(HttpClient("127.0.0.1", port).request("GET", "/"))


def test_http_client_times_out_and_closes_the_connection():
    class SilentTransport(asyncio.Transport):
        sent = b""
        closed = False

        def write(self, data):
            self.sent += data

        def close(self):
            self.closed = True

    async def main():
        transport = SilentTransport()
        exchange = Exchange(b"GET / HTTP/1.1\r\n\r\n", idle_timeout_s=0.0)
        exchange.connection_made(transport)
        with pytest.raises(HttpError, match="no data from the server for 0 s"):
            await exchange.response
        return transport

    transport = asyncio.run(main())
    assert transport.sent == b"GET / HTTP/1.1\r\n\r\n"
    assert transport.closed


def test_http_client_pieces_have_increasing_times(fake_server):
    http = HttpClient("127.0.0.1", fake_server.port)
    response = asyncio.run(http.request("POST", "/v1/completions", b'{"prompt": "hello"}'))
    times = [piece.time_s for piece in response.pieces]
    assert response.status == 200
    assert response.body.endswith(b"data: [DONE]\n\n")
    assert times == sorted(times)


def test_http_client_accepts_urls_with_and_without_scheme():
    assert HttpClient.from_url("http://example.org:8000") == HttpClient("example.org", 8000)
    assert HttpClient.from_url("http://example.org/") == HttpClient("example.org", 80)


@pytest.mark.parametrize("url", ["https://example.org", "example.org:8000", "http://", "http://example.org/v1"])
def test_http_client_refuses_other_urls(url):
    with pytest.raises(ValueError, match="`--url` must look like http://host:port"):
        HttpClient.from_url(url)
