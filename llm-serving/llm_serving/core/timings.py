"""Clocks, and the times of one HTTP request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class HttpTimings:
    """Times of one HTTP request and of the engine requests that answer it, in seconds on the engine's clock.

    The server sets the first and the last time, the engines set the rest.
    """

    received_time: float
    """When its headers arrived, before any wait in the server."""
    arrival_time: float | None = None
    """When its first engine request was submitted."""
    first_token_time: float | None = None
    predicted_ttft_s: float | None = None
    """Predicted TTFT of its last engine request at admission; None without a prediction."""
    unfinished_request_ids: set[str] = field(default_factory=set)
    last_finished_time: float = 0.0
    """When its last engine request finished."""
    num_coalesced: int = 0
    """Identical requests that it answers as well, by request coalescing."""
    response_sent_time: float | None = None
    """When the last bytes of the response were written to the socket, or the client disconnected."""


Clock = Callable[[], float]
"""Returns seconds from an arbitrary origin, never going back."""

monotonic: Clock = time.monotonic
