"""One generation request of a client: a new one, a retry, or one whose stream is resumed.

An event id says how far the client has read: the id of the stream, a colon, and the number of events sent for each
choice, joined by dots; after a plus sign, the number of events that follow all choices, or `end`. The order of choices
depends on the load, but the events of each choice do not, so the id determines the remaining events.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from random import Random, SystemRandom
from typing import Final, NamedTuple

import msgspec

from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.coalescing import Sharing
from llm_serving.errors import GoneError, RequestError
from llm_serving.server.generation.sampling import Choices
from llm_serving.server.idempotency.store import AcceptedRequest
from llm_serving.server.parsing.caller import HttpCaller
from llm_serving.server.parsing.offload import INLINE_ITEMS, off_loop

MAX_NUMBERED_CHOICES: Final = 16
"""Maximum number of choices of a stream with event ids. Each id has a number for each choice."""
END: Final = "end"
_COUNT: Final = r"(?:0|[1-9][0-9]{0,8})"
_POSITION: Final = re.compile(rf"({_COUNT}(?:\.{_COUNT}){{0,{MAX_NUMBERED_CHOICES - 1}}})(?:\+({_COUNT}|{END}))?")

STREAM_ID_HEADER: Final = "x-stream-id"
REPLAYED_HEADER: Final = "idempotent-replayed"
_encode: Final = msgspec.msgpack.Encoder().encode


class Position(NamedTuple):
    """How far a client has read a stream."""

    num_read: tuple[int, ...] = ()
    """Number of events read of each choice; empty at the beginning."""
    num_closing: int = 0
    """Number of closing events read. They follow the events of all choices."""
    is_end: bool = False

    @classmethod
    def read(cls, field: str, text: str) -> Position:
        """Parse a position. Raise RequestError if the text is not a position."""
        found = _POSITION.fullmatch(text)
        if found is None:
            raise RequestError(field, "must be the id of an event of this stream, or its part after the colon", text)
        counts, closing = found.groups()
        num_read = tuple(map(int, counts.split(".")))
        return cls(num_read, 0, True) if closing == END else cls(num_read, int(closing or 0))

    def check(self, num_choices: int) -> None:
        """Raise RequestError if the position belongs to a stream with a different number of choices."""
        if self.num_read and len(self.num_read) != num_choices:
            raise RequestError("Last-Event-ID", f"must have one number for each of {num_choices} choices")


BEGINNING: Final = Position()


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=20).digest()


class SharingRules(NamedTuple):
    """How several requests may share a response, as configured."""

    coalesces_identical: bool
    grace_s: float
    """Seconds for which a stream without a reader continues."""


class IdempotentRequest:
    """A request that may be retried or resumed, or whose response identical requests share.

    Args:
        seeded: Whether the client gave a seed.
        record: Stored state of the request; None: the client can neither retry nor resume it.
        known: Whether the server accepted a request with the same key earlier.
        position: Position in the stream up to which the client has received events.
        add: Function that stores `record`.
    """

    def __init__(
        self,
        rules: SharingRules,
        *,
        seeded: bool,
        record: AcceptedRequest | None = None,
        known: bool = False,
        position: Position = BEGINNING,
        add: Callable[[AcceptedRequest], Awaitable[None]] | None = None,
    ) -> None:
        self.known = known
        self.record = record
        self._rules = rules
        self._seeded = seeded
        self.position = position
        self._add = add
        self._prompts = b""

    @property
    def stream_id(self) -> str:
        """Id of the stream; empty: it cannot be resumed."""
        return self.record.stream_id if self.record is not None and self.record.streams else ""

    def id_generator(self, choice: int) -> Random:
        """Return the random generator for a choice's ids, such as those of tool calls.

        It has the same seed for each repetition of a recorded request. Ids of other requests are unpredictable.
        """
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
        """Return how identical or repeated requests share the response; None: they do not."""
        if self._rules.coalesces_identical and caller.deadline is None and (self._seeded or sampling.greedy):
            scope = ""
        elif self.record is not None:
            scope = self.record.stream_id
        else:
            return None
        owner = (scope, caller.tenant, caller.cache_salt, caller.priority, caller.adapter)
        self._prompts = await off_loop(sum(map(len, prompts)) > INLINE_ITEMS, lambda: _digest_of_ids(prompts))
        key = digest_of(_encode((owner, self._prompts, _distinctive(sampling), choices)))
        keeps = self.record is not None and bool(self.record.key)
        return Sharing(key, keeps, self._rules.grace_s if self.stream_id else 0.0)

    async def accept(self) -> None:
        """Store the record of a new request, with the prompts given to `sharing`.

        For a known request, raise GoneError if its prompts now have different tokens.
        """
        if self.record is None:
            return
        if self.known:
            if not hmac.compare_digest(self.record.prompts, self._prompts):
                raise GoneError("the chat template now renders the conversation to different tokens")
        elif self._add is not None:
            self.record = msgspec.structs.replace(self.record, prompts=self._prompts)
            await self._add(self.record)


def _digest_of_ids(prompts: Sequence[list[int]]) -> bytes:
    try:
        return digest_of(_encode(prompts))
    except OverflowError:  # integers that are no token ids, which the engine refuses
        return b""


def _distinctive(sampling: SamplingParams) -> object:
    """Return the sampling parameters that affect the response. With greedy sampling, the seed does not."""
    content = msgspec.to_builtins(sampling)
    if sampling.greedy:
        del content["seed"]
    return content
