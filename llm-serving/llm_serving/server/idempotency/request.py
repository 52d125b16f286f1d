"""Generation requests that a client may retry with the same Idempotency-Key, and streams that it may resume.

The event id `STREAM:12.7` says that the stream has sent 12 events of choice 0 and 7 of choice 1. Events after the end
of all choices have ids such as `STREAM:12.7+1`, and the last event `STREAM:12.7+end`. The order of choices depends on
the load, but the events of each choice do not, so the id determines the remaining events.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Final, NamedTuple

import msgspec
from starlette.requests import Request

from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.request_stream import Sharing
from llm_serving.errors import GoneError, IdempotencyError, RequestError
from llm_serving.server.generation.sampling import Choices
from llm_serving.server.idempotency.store import AcceptedRequest, AcceptedRequests, Claim
from llm_serving.server.parsing.caller import HttpCaller, within_deadline
from llm_serving.server.parsing.headers import ResponseIdentity, identify, read_header
from llm_serving.server.parsing.offload import INLINE_BYTES, INLINE_ITEMS, off_loop
from llm_serving.server.protocols.openai.schemas import GenerationRequest
from llm_serving.server.request_context import api_key_of, request_context_of

MAX_NUMBERED_CHOICES: Final = 16
"""Maximum number of choices of a stream with event ids. Each id has a number for each choice."""
END: Final = "end"
_COUNT: Final = r"(?:0|[1-9][0-9]{0,8})"
_POSITION: Final = re.compile(rf"({_COUNT}(?:\.{_COUNT}){{0,{MAX_NUMBERED_CHOICES - 1}}})(?:\+({_COUNT}|{END}))?")

STREAM_ID_HEADER: Final = "x-stream-id"
REPLAYED_HEADER: Final = "idempotent-replayed"
_encode: Final = msgspec.msgpack.Encoder().encode
KEY_HEADER: Final = "idempotency-key"
EVENT_HEADER: Final = "last-event-id"
MAX_KEY_CHARS: Final = 255
SEED_BYTES: Final = 8
_RESUMABLE: Final = f"stream: true, serving_config.resume_streams, at most {MAX_NUMBERED_CHOICES} choices"
_SEND_ANEW: Final = "Send the request again without Last-Event-ID and with a new Idempotency-Key"
_encode_json: Final = msgspec.json.Encoder().encode


class Position(NamedTuple):
    """How far a client has read a stream."""

    num_read: tuple[int, ...] = ()
    """Number of events read of each choice; empty at the beginning."""
    num_closing: int = 0
    """Number of events read that follow those of all choices."""
    is_end: bool = False
    field: str = "Last-Event-ID"
    """Header or query parameter that gave the position."""
    text: str = ""
    """Its value."""

    @classmethod
    def read(cls, field: str, text: str) -> Position:
        found = _POSITION.fullmatch(text)
        if found is None:
            raise RequestError(field, "must be an event id of this stream, or the part of the id after the colon", text)
        counts, closing = found.groups()
        num_read = tuple(map(int, counts.split(".")))
        is_end = closing == END
        return cls(num_read, 0 if is_end else int(closing or 0), is_end, field, text)

    def check(self, num_choices: int) -> None:
        if self.num_read and len(self.num_read) != num_choices:
            raise self.error(f"must have one number for each of {num_choices} choices")

    def error(self, rule: str) -> RequestError:
        return RequestError(self.field, rule, self.text)


BEGINNING: Final = Position()


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=20).digest()


@dataclass(eq=False)
class IdempotentRequest:
    """A request that its client may retry or resume, or that may share its response with identical requests."""

    serving: ServerConfig
    seeded: bool
    record: AcceptedRequest | None = None
    """The record of the request, or None if the client can neither retry nor resume it."""
    known: bool = False
    """Whether the server accepted a request with this key earlier."""
    position: Position = BEGINNING
    accepted: AcceptedRequests | None = None
    """The store that gets the record of a new request."""
    claim: Claim | None = None
    _prompts: bytes = b""

    @property
    def stream_id(self) -> str:
        """Id of the stream. Empty if the client cannot resume the stream."""
        return self.record.stream_id if self.record is not None and self.record.streams else ""

    def id_generator(self, choice: int) -> Random:
        """Return a generator of tool call ids. A retry of a recorded request gets the same ids; others are random."""
        return SystemRandom() if self.record is None else Random(f"{self.record.stream_id} {choice}")

    @property
    def headers(self) -> dict[str, str]:
        headers = {STREAM_ID_HEADER: self.stream_id} if self.stream_id else {}
        if self.known and self.record is not None and self.record.key:
            headers[REPLAYED_HEADER] = "true"
        return headers

    async def sharing(
        self, prompts: Sequence[list[int]], sampling: SamplingParams, choices: Choices, caller: HttpCaller
    ) -> Sharing | None:
        """Return the key by which identical requests find a shared response, and its lifetime. None: not shared."""
        if self.serving.coalesce_identical_requests and caller.deadline is None and (self.seeded or sampling.greedy):
            scope = ""
        elif self.record is not None:
            scope = self.record.stream_id
        else:
            return None
        owner = (scope, caller.tenant, caller.cache_salt, caller.priority, caller.adapter)
        self._prompts = await off_loop(sum(map(len, prompts)) > INLINE_ITEMS, lambda: _digest_of_ids(prompts))
        key = digest_of(_encode((owner, self._prompts, _distinctive(sampling), choices)))
        keeps = self.record is not None and bool(self.record.key)
        return Sharing(key, keeps, self.serving.resume_grace_s if self.stream_id else 0.0)

    async def accept(self) -> None:
        """Store a new request's record. Raise GoneError if a repeated request's prompts now have different tokens."""
        if self.record is None:
            return
        if self.known:
            if not hmac.compare_digest(self.record.prompts, self._prompts):
                raise GoneError(f"the chat template now renders the conversation to different tokens. {_SEND_ANEW}")
        elif self.accepted is not None:
            self.record = msgspec.structs.replace(self.record, prompts=self._prompts)
            await self.accepted.add(self.record)
            if self.claim is not None:
                self.accepted.settle(self.claim)


def _digest_of_ids(prompts: Sequence[list[int]]) -> bytes:
    try:
        return digest_of(_encode(prompts))
    except OverflowError:  # integers that are no token ids, which the engine refuses
        return b""


def _distinctive(sampling: SamplingParams) -> object:
    """Return the sampling parameters that affect the response. With greedy sampling, they exclude the seed."""
    content = msgspec.to_builtins(sampling)
    if sampling.greedy:
        del content["seed"]
    return content


class ResumedStream(NamedTuple):
    record: AcceptedRequest
    position: Position


class ClaimedRequest(NamedTuple):
    identity: ResponseIdentity
    idempotent: IdempotentRequest


@asynccontextmanager
async def claim_request(
    engine: AsyncEngine,
    http_request: Request,
    request: GenerationRequest,
    caller: HttpCaller,
    *,
    route: str,
    prefix: str,
    num_streams: int,
) -> AsyncIterator[ClaimedRequest]:
    """Hold the idempotency key of a request until the context exits. Yield the request, and the id and creation time of
    its response; the id begins with `prefix`. A request with a key but no seed gets a seed from key, tenant and body,
    so that a retry gets the same tokens even if the record was evicted. `num_streams` is the number of choices of all
    prompts. Raise RequestError if the key or the event id is malformed or belongs to another request, GoneError if
    another model or adapter accepted the request, TimedOutError if another request holds the key until the deadline.
    """
    accepted: AcceptedRequests = http_request.app.accepted
    serving = engine.config.serving
    seeded = request.seed is not None
    key = _key(http_request) if accepted.keeps else ""
    streams = bool(serving.resume_streams and accepted.keeps and request.stream and num_streams <= MAX_NUMBERED_CHOICES)
    resumed: ResumedStream | None = getattr(http_request.state, "resumed", None)
    event_id = read_header(http_request, EVENT_HEADER) or ""
    if resumed is None and event_id and not streams:
        raise RequestError("Last-Event-ID", f"may be given only for a stream that can be resumed: {_RESUMABLE}")
    if resumed is None and not key and not streams:
        yield ClaimedRequest(
            identify(engine, http_request, request.request_id, prefix), IdempotentRequest(serving, seeded)
        )
        return
    claim: Claim | None = None
    digest, size = b"", 0
    record, position = resumed or (None, BEGINNING)
    if resumed is None:
        size = int(http_request.headers.get("content-length", INLINE_BYTES + 1))
        digest = digest_of(await off_loop(size > INLINE_BYTES, lambda: route.encode() + _encode_json(request)))
        if event_id:
            record, position = resumed_by(accepted, http_request, "Last-Event-ID", event_id)
            if record.digest != digest:
                raise IdempotencyError("Last-Event-ID", "must be the id of an event of the same request", event_id)
        elif key:
            found = await within_deadline(caller.deadline, engine.clock, accepted.claim(caller.tenant, key, digest))
            record, claim = (None, found) if isinstance(found, Claim) else (found, None)
    try:
        longest = engine.max_model_len, engine.config.model.max_input_len
        state = http_request.app.model_state.digest(engine.compute_fingerprint, *longest, caller.adapter)
        if record is not None:
            position.check(num_streams)
            if record.model != state:
                raise GoneError(
                    f"the earlier request was accepted by another model or adapter, or with other kernels. {_SEND_ANEW}"
                )
            request.seed, request_id, name = record.seed, record.request_id, engine.config.model.model_name
            request_context_of(http_request).request_id = request_id
            identity = ResponseIdentity(f"{prefix}-{request_id}", request_id, record.created, name)
            yield ClaimedRequest(identity, IdempotentRequest(serving, record.seeded, record, True, position))
            return
        if request.seed is None:
            request.seed = seed_of(caller.tenant, key, digest) if key else secrets.randbits(64)
        identity = identify(engine, http_request, request.request_id, prefix)
        record = AcceptedRequest(
            stream_id=secrets.token_hex(16),
            route=route,
            tenant=caller.tenant,
            key=key,
            digest=digest,
            request=await off_loop(size > INLINE_BYTES, lambda: _encode_json(request)),
            seed=request.seed,
            seeded=seeded,
            streams=streams,
            request_id=identity.request_id,
            created=identity.created,
            model=state,
            prompts=b"",
            accepted_at=time.time(),
        )
        idempotent = IdempotentRequest(serving, seeded, record, accepted=accepted, claim=claim)
        yield ClaimedRequest(identity, idempotent)
    finally:
        if claim is not None:
            accepted.settle(claim)


def seed_of(tenant: str, key: str, digest: bytes) -> int:
    hashed = hashlib.blake2b(_encode_json((tenant, key)) + digest, digest_size=SEED_BYTES, person=b"idempotency-key")
    return int.from_bytes(hashed.digest())


def _key(http_request: Request) -> str:
    key = read_header(http_request, KEY_HEADER) or ""
    if len(key) > MAX_KEY_CHARS:
        raise RequestError("Idempotency-Key", f"must be text of at most {MAX_KEY_CHARS} characters", len(key))
    return key


def resumed_by(
    accepted: AcceptedRequests, http_request: Request, field: str, event_id: str, stream_id: str | None = None
) -> ResumedStream:
    """Return the request and position that an event id names. With `stream_id` from the URL, the event id may be only
    the part after the colon. Raise RequestError for `field` if the event id is invalid or its stream is unknown.
    """
    named, colon, text = event_id.rpartition(":")
    if stream_id is not None and colon and named != stream_id:
        raise RequestError(field, "must be an event id of this stream, or the part of the id after the colon", event_id)
    key = api_key_of(http_request)
    record = accepted.find(field, stream_id or named, None if key is None else key.name)
    return ResumedStream(record, Position.read(field, text) if text else BEGINNING)
