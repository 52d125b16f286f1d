"""Attaches data to the scope of an HTTP request: its log record, its API key and the quota of that key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import HTTPConnection

from llm_serving.config.tables import ApiKey
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import HttpTimings
from llm_serving.engine.request_stream import RequestStream
from llm_serving.server.http.acceptor import network_of
from llm_serving.server.middleware.rate_limits import Quota

CONTEXT_KEY: Final = "llm_serving.request_context"
API_KEY_KEY: Final = "llm_serving.api_key"
QUOTA_KEY: Final = "llm_serving.quota"


@dataclass(eq=False, slots=True)
class RequestContext:
    """The log record of one request, which `Accounting` creates. It holds no text of the request or response."""

    http_timings: HttpTimings
    method: str
    route: str
    """The string "other" if no endpoint has the path."""
    client: str = ""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    """Header names in lower case -> values. For a repeated header, only the first value is kept. Never logged."""
    status: int | None = None
    error: str = ""
    """Kind of the error and the name of the wrong field, if any. Empty if there is no error."""
    request_id: str = ""
    tenant: str = ""
    request_class: str = ""
    num_prompt_tokens: int = 0
    streams_per_prompt: int = 1
    streams: Sequence[RequestStream] = ()
    """The request's streams, in the order of the prompts. Empty if nothing was generated."""
    ignored_parameters: str | None = None
    """Names of fields and headers that have no effect, separated by commas."""
    read_headers: tuple[str, ...] = ()
    """Names in `CHECKED_HEADERS` that the route has read. `ignored_headers` returns the other ones of the request."""

    @property
    def outputs(self) -> list[RequestOutput | None]:
        """For each stream, the latest output that the server sent or collected, or None if there is none yet."""
        return [stream.latest for stream in self.streams]

    @property
    def longest_answers(self) -> list[int]:
        """For each prompt, the number of tokens of the longest of its answers so far."""
        lens = [0 if each.latest is None else each.latest.num_output_tokens for each in self.streams]
        return [max(lens[i : i + self.streams_per_prompt]) for i in range(0, len(lens), self.streams_per_prompt)]


def request_context_of(connection: HTTPConnection) -> RequestContext:
    context: RequestContext = connection.scope[CONTEXT_KEY]
    return context


def api_key_of(connection: HTTPConnection) -> ApiKey | None:
    """Return the client's API key. Return None if the server or the route requires no key."""
    key: ApiKey | None = connection.scope.get(API_KEY_KEY)
    return key


def quota_of(connection: HTTPConnection) -> Quota | None:
    quota: Quota | None = connection.scope.get(QUOTA_KEY)
    return quota


def source_of(connection: HTTPConnection) -> str:
    """Return the client to which a request is charged: its key's name, its IPv4 address or its IPv6 network."""
    if (key := api_key_of(connection)) is not None:
        return key.name
    return "" if connection.client is None else network_of(connection.client.host)
