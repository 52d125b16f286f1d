"""What is kept of a request that was accepted: from it the same answer follows again."""

from __future__ import annotations

from typing import Final

import msgspec

OVERHEAD_BYTES: Final = 1024
"""What a record takes beside the request and its names."""


class AcceptedRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A request of completions or conversations with all that the server added to it."""

    stream_id: str
    """Random; nobody guesses it."""
    route: str
    tenant: str
    key: str
    """Its Idempotency-Key; empty: it has none."""
    digest: bytes
    """Of the request as it was sent."""
    request: bytes
    """The request as JSON, with its seed."""
    seed: int
    seeded: bool
    """Whether the client gave the seed."""
    streams: bool
    """Whether its answer is a stream that can be resumed."""
    request_id: str
    created: int
    """Seconds since 1970, as answers tell it."""
    model: bytes
    """Of the model, its configuration and what computes: another one gives other answers."""
    prompts: bytes
    """Digest of the token ids of its prompts."""
    accepted_at: float
    """Seconds since 1970."""

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.request) + len(self.key) + len(self.tenant) + len(self.request_id)
