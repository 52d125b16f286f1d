"""Requests to a running server over HTTP, with the standard library only."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse, InvalidURL
from typing import Any, Final, TypeVar

from llm_serving.cli.arguments import API_KEY_VARIABLE
from llm_serving.errors import ConfigError, LLMServingError, UnavailableError, shorten

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8835
DEFAULT_URL: Final = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
ADMINISTRATOR_KEY: Final = "an administrator's; "
"""Start of the help of `--api-key`, for a command that needs the key of an administrator."""
TIMEOUT_S: Final = 600.0
"""Maximum seconds between two bytes of a response. The limit is high because a request may wait in the queue."""
MAX_ERROR_BYTES: Final = 4096
Content = TypeVar("Content")


def add_server_arguments(parser: argparse.ArgumentParser, whose_key: str = "") -> None:
    parser.add_argument("--url", help=f"URL of the server; default: {DEFAULT_URL}")
    parser.add_argument(
        "--host", metavar="ADDRESS", help=f"address of the server, instead of --url; default: {DEFAULT_HOST}"
    )
    parser.add_argument(
        "--port", metavar="N", type=int, help=f"port of the server, instead of --url; default: {DEFAULT_PORT}"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", default="", help=f"{whose_key}prefer the environment variable {API_KEY_VARIABLE}"
    )


def url_of(arguments: argparse.Namespace) -> str:
    url, host, port = arguments.url, arguments.host, arguments.port
    if url is None:
        host = DEFAULT_HOST if host is None else host
        return f"http://{f'[{host}]' if ':' in host else host}:{DEFAULT_PORT if port is None else port}"
    if host is not None or port is not None:
        raise ConfigError(f"the server must be named by --url or by --host and --port, not by both. Given: --url {url}")
    return str(url)


def api_key_of(arguments: argparse.Namespace) -> str:
    return str(arguments.api_key or os.environ.get(API_KEY_VARIABLE, ""))


class ServerRefusal(LLMServingError):  # noqa: N818  an answer, not an error of this program
    """The server refused the request."""


@contextmanager
def opened(
    url: str, path: str, key: str = "", body: object = None, method: str | None = None
) -> Iterator[HTTPResponse]:
    """Send a request and yield the response. Raise ConfigError if the URL or the key is invalid, ServerRefusal if the
    status is an error, UnavailableError if the connection fails.
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
        raise ServerRefusal(_error_message(error.code, _body_of(error))) from None
    except urllib.error.URLError as error:
        raise UnavailableError(f"no server answers at {url}: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise UnavailableError(f"the connection to {url} broke: {error or type(error).__name__}") from None


def call(
    arguments: argparse.Namespace, path: str, read: Callable[[Any], Content], method: str | None = None
) -> Content:
    """Send a request to the server that `arguments` name. Return `read(JSON value of the response)`. Raise
    ServerRefusal if `read` does not find what this server's responses have, and the errors of `opened`.
    """
    url = url_of(arguments)
    with opened(url, path, api_key_of(arguments), method=method) as response:
        try:
            return read(json.load(response))
        except (ValueError, LookupError, TypeError):
            raise ServerRefusal(f"{url} does not answer like an llm-serving server") from None


def _sent(url: str, path: str, data: bytes | None, headers: dict[str, str], method: str | None) -> HTTPResponse:
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers, method=method)  # noqa: S310  checked
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
    except (InvalidURL, ValueError) as error:
        raise ConfigError(f"--url must be the address of a server: {error}. Given: {url!r}") from None
    return answer


def _body_of(error: urllib.error.HTTPError) -> bytes:
    with suppress(OSError, HTTPException):  # the connection may end before the body does
        return error.read(MAX_ERROR_BYTES)
    return b""


def _error_message(status: int, content: bytes) -> str:
    try:
        return f"{status}: {json.loads(content)['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {shorten(content.decode('utf-8', 'replace'))}"
