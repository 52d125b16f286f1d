"""Which host a request is for, and which path of it (RFC 9112, 3.2)."""

from __future__ import annotations

import re
from typing import Final

from llm_serving.server.front_door.older_http import OLDER
from llm_serving.server.front_door.refusals import NO_HOST, NO_PATH, RefusedError

_AUTHORITY: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)


def for_one_host(version: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Path and query of a URL; a host that it names takes the place of `Host`.

    Whoever passed the request on may have gone by another line of several, or by the URL.

    Args:
        version: Of HTTP.
        url: As in the request line.
        headers: Names in small letters.

    Raises:
        RefusedError: Clients of HTTP/1.0 alone need name no host.
    """
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts != 1 and not (version == OLDER and num_hosts == 0):
        raise RefusedError(NO_HOST)
    if (absolute := _ABSOLUTE.match(url)) is not None:
        path = url[absolute.end() :]
        url = path if path.startswith(b"/") else b"/" + path
        headers[:] = [(name, value) for name, value in headers if name != b"host"]
        headers.append((b"host", absolute[1]))
    elif not url.startswith((b"/", b"*")):
        raise RefusedError(NO_PATH)
    if any(name == b"host" and not _AUTHORITY.fullmatch(value) for name, value in headers):
        raise RefusedError(NO_HOST)
    return url
