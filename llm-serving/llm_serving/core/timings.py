"""Clocks, and the times of an HTTP request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class HttpTimings:
    """Times of one HTTP request and its engine requests, in seconds on the engine's clock."""

    received_time: float
    """When the headers arrived, before any wait in the server."""
    arrival_time: float | None = None
    first_token_time: float | None = None
    predicted_ttft_s: float | None = None
    unfinished_request_ids: set[str] = field(default_factory=set)
    last_finished_time: float = 0.0
    num_coalesced: int = 0
    response_sent_time: float | None = None
    """When the last bytes of the response were sent, or the client disconnected."""


Clock = Callable[[], float]
"""Returns seconds since an arbitrary origin. The value never decreases."""

monotonic: Clock = time.monotonic
