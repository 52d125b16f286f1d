from itertools import pairwise

import pytest
from http_response import HttpError, ResponseParser
from hypothesis import given
from hypothesis import strategies as st

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
def test_chunked_body_split_anywhere(cuts):
    parser, body = parse(cut(CHUNKED, cuts))
    assert (parser.status, body, parser.complete) == (200, b"hello\r\n!0123456789", True)
    assert parser.headers["content-type"] == "text/event-stream"


@given(st.lists(st.integers(0, 10_000), max_size=60))
def test_counted_body_split_anywhere(cuts):
    parser, body = parse(cut(COUNTED, cuts))
    assert (parser.status, body, parser.complete) == (404, b"nope", True)


def test_body_until_the_close():
    parser, body = parse([UNTIL_CLOSE])
    assert (body, parser.complete) == (b"all the rest", False)
    parser.feed_eof()
    assert parser.complete


def test_a_body_is_handed_on_as_it_comes():
    parser = ResponseParser()
    head, _, rest = CHUNKED.partition(b"5\r\n")
    assert parser.feed(head) == b""
    assert parser.feed(b"5\r\nhel") == b"hel"
    assert parser.feed(b"lo") == b"lo"
    assert parser.feed(rest[5:]) == b"\r\n!0123456789"


def test_an_empty_counted_body_is_complete_with_its_head():
    parser, body = parse([b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n"])
    assert (body, parser.complete) == (b"", True)


def test_interim_responses_are_passed_over():
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
def test_an_early_close_is_an_error(data, message):
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
def test_bytes_that_are_not_http(data, message):
    with pytest.raises(HttpError, match=message):
        parse([data])
