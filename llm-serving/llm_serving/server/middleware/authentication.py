"""Authentication by API key. Every path needs a key, except those listed as open."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from llm_serving.config.tables import ApiKey
from llm_serving.core.timings import Clock
from llm_serving.errors import AuthenticationError, PermissionDeniedError, RateLimitError
from llm_serving.log import get_logger
from llm_serving.server.http.acceptor import network_of
from llm_serving.server.middleware.rate_limits import LineBudget, Quota, TokenBucket
from llm_serving.server.parsing.errors import openai_error_response
from llm_serving.server.request_context import API_KEY_KEY, QUOTA_KEY, api_key_of, request_context_of

logger = get_logger(__name__)

PAGE_METHODS: Final = ("GET", "HEAD")
WRONG_KEYS_PER_MINUTE: Final = 20
MAX_ADDRESSES: Final = 4096
"""Maximum number of addresses whose failures are stored (the latest). An IPv6 address counts as its /64 network."""
LOG_INTERVAL_S: Final = 10.0

K = TypeVar("K")
V = TypeVar("V")


class FailedKeys:
    """Failed authentication attempts by client address. Only the event loop may use it."""

    def __init__(self, clock: Clock, refused: Callable[[str], None]) -> None:
        self._clock = clock
        self._refused = refused
        self._addresses: OrderedDict[str, TokenBucket] = OrderedDict()
        self._succeeded: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        """(address, key hash) pairs that succeeded. They stay valid when other clients at the address fail."""
        self._lines = LineBudget(1, 1 / LOG_INTERVAL_S)

    def check(self, client: str, digest: bytes) -> None:
        """Raise RateLimitError if an address sent too many unknown keys. Keys that it used with success are exempt."""
        address = network_of(client)
        bucket = self._addresses.get(address)
        if bucket is None or (address, digest) in self._succeeded:
            return
        wait_s = bucket.wait_s(1.0, self._clock())
        if wait_s > 0.0:
            self._count("too_many_unknown_keys", address)
            raise RateLimitError("too many unknown API keys came from this address", wait_s)

    def failed(self, client: str, *, shown: bool) -> None:
        """Record a request without a known key. `shown` is True if the request presented an unknown key."""
        address = network_of(client)
        if shown:
            now = self._clock()
            bucket = self._addresses.get(address) or TokenBucket(WRONG_KEYS_PER_MINUTE, now)
            bucket.take(1.0, now)
            _remember(self._addresses, address, bucket)
        self._count("unknown_key" if shown else "missing_key", address)

    def succeeded(self, client: str, digest: bytes) -> None:
        _remember(self._succeeded, (network_of(client), digest), None)

    def _count(self, reason: str, address: str) -> None:
        self._refused(reason)
        if (suppressed := self._lines.take(self._clock())) is not None:
            text = "%d requests without a known API key were refused; the last one came from %s"
            logger.warning(text, suppressed + 1, address)


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_ADDRESSES:
        table.popitem(last=False)


class ApiKeyAuthentication:
    """ASGI middleware that requires an API key, as `Authorization: Bearer KEY` or `X-API-Key: KEY`. It stores the key's
    configuration in the scope. `open_paths` need no key; `open_pages` need none for GET and HEAD.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[ApiKey],
        open_paths: Collection[str],
        open_pages: Collection[str] = (),
        *,
        clock: Clock,
        quotas: Mapping[str, Quota],
        refused: Callable[[str], None],
    ) -> None:
        self._app = app
        self._failures = FailedKeys(clock, refused)
        self._quotas = quotas
        self.reload(keys)
        self._open_paths, self._open_pages = frozenset(open_paths), frozenset(open_pages)

    def reload(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(bytes.fromhex(key.key_sha256), key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (
            scope["type"] == "http"
            and (
                scope["path"] in self._open_paths
                or (scope["path"] in self._open_pages and scope["method"] in PAGE_METHODS)
            )
        ):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            key = self._find(_presented_keys(scope["headers"]), (scope.get("client") or ("", 0))[0])
        except (AuthenticationError, RateLimitError) as error:
            request_context_of(HTTPConnection(scope)).error = type(error).__name__
            await openai_error_response(error)(scope, receive, send)
            return
        request_context_of(HTTPConnection(scope)).tenant = key.name
        await self._app({**scope, API_KEY_KEY: key, QUOTA_KEY: self._quotas.get(key.name)}, receive, send)

    def _find(self, shown: Sequence[bytes], client: str) -> ApiKey:
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


def tenant_seen(connection: HTTPConnection) -> str | None:
    """Return the tenant whose requests the caller may see and control. Return None if these are the requests of all
    tenants, because the caller is an administrator or the server requires no API keys.
    """
    key = api_key_of(connection)
    return None if key is None or key.admin else key.name


def check_operator(connection: HTTPConnection) -> None:
    """Raise PermissionDeniedError unless the caller may see and control the requests of all tenants."""
    if tenant_seen(connection) is not None:
        raise PermissionDeniedError("api_key", "must be an administrator's key")


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _presented_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the distinct API keys of a request, from `x-api-key` and from `Authorization` after `Bearer`."""
    shown = []
    for name, value in headers:
        scheme, _, rest = value.partition(b" ")
        if name == b"x-api-key":
            shown.append(value.strip())
        elif name == b"authorization" and scheme.lower() == b"bearer":
            shown.append(rest.strip())
    return list(dict.fromkeys(filter(None, shown)))
