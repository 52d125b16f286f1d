"""Limits of a request head."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from llm_serving.config.sections.server import ServerConfig
from llm_serving.server.http.request import RefusedError, check_limits, parse_head

LIMITS = ServerConfig(max_url_bytes=256, max_header_bytes=1024, max_headers=8)
GET = b"GET / HTTP/1.1\r\n"


def status(data: bytes) -> HTTPStatus | None:
    try:
        check_limits(data, len(data), LIMITS)
    except RefusedError as error:
        return error.refusal.status
    return None


@pytest.mark.parametrize(
    ("head", "headers"),
    [
        (GET + b"Host: a\r\nUPGRADE: h2c\r\nA: b\r\n\r\n", b"host: a\r\na: b"),
        (GET + b"Host: a\r\nUpgrade:\r\nupgrade: x\r\n\r\n", b"host: a"),
        (GET + b"Host: a\r\nA: upgrade: x\r\n\r\n", b"host: a\r\na: upgrade: x"),
        (GET + b"Host: a\r\nX-Upgrade: x\r\n\r\n", b"host: a\r\nx-upgrade: x"),
        (b"GET http://b/ HTTP/1.1\r\nA: b\r\nHost: a\r\n\r\n", b"host: b\r\na: b"),
    ],
)
def test_request_head_is_normalized(head, headers):
    assert parse_head(head).data == b"GET / HTTP/1.1\r\n" + headers + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("header", "length"),
    [(b"A: b", 0), (b"Content-Length: 5", 5), (b"Transfer-Encoding: chunked", None), (b"Content-Length: 0", 0)],
)
def test_request_head_content_length(header, length):
    head = parse_head(b"POST / HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n\r\n")
    assert head.body_length == length


class TestRefusal:
    @pytest.mark.parametrize("ended", [True, False])
    @pytest.mark.parametrize(("num_bytes", "expected"), [(256, None), (290, HTTPStatus.REQUEST_URI_TOO_LONG)])
    def test_long_url_is_refused(self, num_bytes, expected, ended):
        line = b"GET /" + b"x" * (num_bytes - 1) + b" HTTP/1.1\r\n" * ended
        assert status(line) == expected

    @pytest.mark.parametrize("ended", [b"", b"\r\n\r\n"])
    @pytest.mark.parametrize(
        ("num_bytes", "expected"), [(900, None), (1024, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)]
    )
    def test_long_header_is_refused(self, num_bytes, expected, ended):
        assert status(GET + b"A: " + b"x" * num_bytes + ended) == expected

    @pytest.mark.parametrize("ended", [b"", b"\r\n"])
    @pytest.mark.parametrize(("count", "expected"), [(8, None), (10, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)])
    def test_too_many_headers_are_refused(self, count, expected, ended):
        assert status(GET + b"A: b\r\n" * count + ended) == expected

    @pytest.mark.parametrize("data", [b"\x16\x03\x01\x02", b"get / HTTP/1.1", b" GET", b"\x00", b"\xff"])
    def test_non_http_data_is_detected_by_its_first_byte(self, data):
        assert status(data) == HTTPStatus.BAD_REQUEST

    @pytest.mark.parametrize(
        "line",
        [
            b"GET  / HTTP/1.1\r\n",
            b"GET /  HTTP/1.1\r\n",
            b"GET / HTTP/1.1 \r\n",
            b"GET\t/\tHTTP/1.1\r\n",
            b"GET / HTTP/1.1\n",
            b"GET /\xe4 HTTP/1.1\r\n",
            b"GET /\x00 HTTP/1.1\r\n",
            b"GET /\r\n",
            b"GET / HTTP/1.10\r\n",
            b"GET / HTTP/2.0\r\n",
            b"SOURCE / ICE/1.0\r\n",
            b"DESCRIBE rtsp://a/ RTSP/1.0\r\n",
            b"HTTP/1.1 200 OK\r\n",
        ],
    )
    def test_invalid_request_line_is_refused(self, line):
        assert status(line) == status(line + b"Host: a\r\n\r\n") == HTTPStatus.BAD_REQUEST

    @pytest.mark.parametrize("line", [GET, b"M-SEARCH * HTTP/1.0\r\n", b"GET http://a/?b HTTP/1.1\r\n", GET[:-1]])
    def test_valid_request_line_is_accepted(self, line):
        assert status(line) is None

    def test_request_head_error_names_the_limit(self):
        with pytest.raises(RefusedError, match="there must be at most 8 headers"):
            check_limits(GET + b"A: b\r\n" * 20, len(GET) + 120, LIMITS)
