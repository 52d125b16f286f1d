import asyncio
import socket

import pytest
from http_client import Exchange, HttpClient
from http_response import HttpError


def test_connection_refused_says_so():
    with socket.socket() as unused:  # bound but not listening
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(HttpError, match=rf"connection refused: nothing listens at 127\.0\.0\.1:{port}"):
            asyncio.run(HttpClient("127.0.0.1", port).request("GET", "/"))


def test_a_silent_server_fails_the_request_and_the_connection_is_closed():
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
        with pytest.raises(HttpError, match="nothing heard from the server for 0 s"):
            await exchange.response
        return transport

    transport = asyncio.run(main())
    assert transport.sent == b"GET / HTTP/1.1\r\n\r\n"
    assert transport.closed


def test_pieces_are_stamped_in_order(fake_server):
    http = HttpClient("127.0.0.1", fake_server.port)
    response = asyncio.run(http.request("POST", "/v1/completions", b'{"prompt": "hello"}'))
    times = [piece.time_s for piece in response.pieces]
    assert response.status == 200
    assert response.body.endswith(b"data: [DONE]\n\n")
    assert times == sorted(times)


def test_url_forms():
    assert HttpClient.from_url("http://example.org:8000") == HttpClient("example.org", 8000)
    assert HttpClient.from_url("http://example.org/") == HttpClient("example.org", 80)


@pytest.mark.parametrize("url", ["https://example.org", "example.org:8000", "http://", "http://example.org/v1"])
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match="`--url` must look like http://host:port"):
        HttpClient.from_url(url)
