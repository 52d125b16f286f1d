"""HTTP requests to a running server, with the standard library only."""

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
"""Maximum seconds between two bytes of a response. The limit is high because a request may wait in the queue."""
MAX_ERROR_BYTES: Final = 4096


class ServerRefusal(LLMServingError):  # noqa: N818  an answer, not an error of this program
    """The server refused the request."""


@contextmanager
def opened(
    url: str, path: str, key: str = "", body: object = None, method: str | None = None
) -> Iterator[HTTPResponse]:
    """Send a request and yield the response. Without `method`, it is POST if there is a `body`, else GET.

    Raises:
        ConfigError: The URL or the key is invalid.
        ServerRefusal: The status is an error.
        UnavailableError: The connection fails.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://. Given: {url}")
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "an API key must consist of printable ASCII characters; this one has other characters, perhaps a line break"
        )
    try:
        with _sent(url, path, data, headers, method) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise ServerRefusal(_error_message(error.code, error.read(MAX_ERROR_BYTES))) from None
    except urllib.error.URLError as error:
        raise UnavailableError(f"no server answers at {url}: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"the connection to {url} broke: {error or type(error).__name__}") from None


def _sent(url: str, path: str, data: bytes | None, headers: dict[str, str], method: str | None) -> HTTPResponse:
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=method)  # noqa: S310  checked
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
    except (InvalidURL, ValueError) as error:
        raise ConfigError(f"--url must be the address of a server: {error}. Given: {url!r}") from None
    return answer


def _error_message(status: int, content: bytes) -> str:
    try:
        return f"{status}: {json.loads(content)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {shorten(content.decode('utf-8', 'replace'))}"
