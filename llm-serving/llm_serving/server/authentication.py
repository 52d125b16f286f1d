"""API keys: who may ask. Every path is closed unless it is named open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from llm_serving.config.sections.api_key import ApiKey
from llm_serving.core.clock import Clock
from llm_serving.errors import AuthenticationError, PermissionDeniedError, RateLimitError
from llm_serving.server.error_responses import openai_error_response
from llm_serving.server.failed_keys import FailedKeys
from llm_serving.server.note import note_of
from llm_serving.server.quota import SCOPE_KEY as QUOTA_SCOPE_KEY
from llm_serving.server.quota import Quota

SCOPE_KEY: Final = "llm_serving.api_key"


class ApiKeyAuthentication:
    """ASGI middleware in front of all routes; it touches neither the body nor the answer, so streams pass as they are.

    A key arrives as `Authorization: Bearer KEY` or `X-API-Key: KEY`. The row it belongs to goes into the request's
    scope, where `api_key_of` finds it, and `quota_of` what it may ask for. Wrong keys are counted by address; beyond a
    few a minute they are not looked at.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[ApiKey],
        open_paths: Collection[str],
        *,
        clock: Clock,
        quotas: Mapping[str, Quota],
        refused: Callable[[str], None],
    ) -> None:
        self._app = app
        self._failures = FailedKeys(clock, refused)
        self._quotas = quotas
        self.reload(keys)
        self._open_paths = frozenset(open_paths)

    def reload(self, keys: Sequence[ApiKey]) -> None:
        """From now on these are the keys."""
        self._keys = [(bytes.fromhex(key.key_sha256), key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] in self._open_paths):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            key = self._find(_shown_keys(scope["headers"]), (scope.get("client") or ("", 0))[0])
        except (AuthenticationError, RateLimitError) as error:
            if (note := note_of(HTTPConnection(scope))) is not None:
                note.error = type(error).__name__
            await openai_error_response(error)(scope, receive, send)
            return
        if (note := note_of(HTTPConnection(scope))) is not None:
            note.tenant = key.name
        await self._app({**scope, SCOPE_KEY: key, QUOTA_SCOPE_KEY: self._quotas.get(key.name)}, receive, send)

    def _find(self, shown: Sequence[bytes], client: str) -> ApiKey:
        """The row of the one key that is shown.

        Every hash is compared, each in constant time: how long it takes tells nothing of the keys that exist.
        """
        if len(shown) != 1:
            self._failures.failed(client, shown=False)
            rule = "an API key is needed" if not shown else "one API key is needed, not several"
            raise AuthenticationError(f"{rule}: send the header `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        digest = hashlib.sha256(shown[0]).digest()
        self._failures.check(client, digest)
        found = [key for expected, key in self._keys if hmac.compare_digest(expected, digest)]
        if not found:
            self._failures.failed(client, shown=True)
            raise AuthenticationError("the API key is not known")
        self._failures.succeeded(client, digest)
        return found[0]


def api_key_of(connection: HTTPConnection) -> ApiKey | None:
    """The row of the request's API key; None where keys are not needed."""
    key = connection.scope.get(SCOPE_KEY)
    assert key is None or isinstance(key, ApiKey)
    return key


def tenant_seen(connection: HTTPConnection) -> str | None:
    """Whose requests the caller sees and controls: those of its API key's tenant.

    None: everybody's, with the key of an administrator, or where keys are not needed: whoever can ask such a server can
    already claim to be anybody.
    """
    key = api_key_of(connection)
    return None if key is None or key.admin else key.name


def check_operator(connection: HTTPConnection) -> None:
    """Raises PermissionDeniedError for callers who see and control their own requests only."""
    if tenant_seen(connection) is not None:
        raise PermissionDeniedError("api_key", "must be that of an administrator")


def hash_key(key: str) -> str:
    """What `api_keys` has in place of a key: its SHA-256 in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def _shown_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The distinct keys of a request's headers; `Authorization` of another scheme shows none."""
    shown = []
    for name, value in headers:
        scheme, _, rest = value.partition(b" ")
        if name == b"x-api-key":
            shown.append(value.strip())
        elif name == b"authorization" and scheme.lower() == b"bearer":
            shown.append(rest.strip())
    return list(dict.fromkeys(filter(None, shown)))
