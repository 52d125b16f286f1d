"""One request to a running server, with nothing but the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse, InvalidURL
from typing import Final

from llm_serving.errors import ConfigError, LLMServingError, UnavailableError, shorten

TIMEOUT_S: Final = 600.0
"""Seconds without a byte of an answer: it may wait in a queue before it begins."""
MAX_ERROR_BYTES: Final = 4096


class ServerRefusal(LLMServingError):  # noqa: N818  what a server says is not our error
    """The server answers that it will not."""


@contextmanager
def opened(
    url: str, path: str, key: str = "", body: object = None, method: str | None = None
) -> Iterator[HTTPResponse]:
    """The answer to a request; closing it ends the request.

    Args:
        url: Of the server, without a path.
        path: Of the route.
        key: API key; empty: none is shown.
        body: Sent as JSON; None: nothing is sent.
        method: None: POST with a body, GET without.

    Raises:
        ConfigError: The address or the key is none.
        Refusal: The server refuses.
        UnavailableError: It cannot be reached, or is gone.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://. Given: {url}")
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("an API key must be of printable ASCII characters; this one has others, perhaps a line's end")
    try:
        with _sent(url, path, data, headers, method) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise ServerRefusal(_told(error.code, error.read(MAX_ERROR_BYTES))) from None
    except urllib.error.URLError as error:
        raise UnavailableError(f"no server answers at {url}: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"{url} is gone: {error or type(error).__name__}") from None


def _sent(url: str, path: str, data: bytes | None, headers: dict[str, str], method: str | None) -> HTTPResponse:
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=method)  # noqa: S310  checked
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
    except (InvalidURL, ValueError) as error:
        raise ConfigError(f"--url must be the address of a server: {error}. Given: {url!r}") from None
    return answer


def _told(status: int, content: bytes) -> str:
    """What an error says to people."""
    try:
        return f"{status}: {json.loads(content)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {shorten(content.decode('utf-8', 'replace'))}"
