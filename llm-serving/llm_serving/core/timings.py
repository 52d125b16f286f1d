"""The times of one HTTP request and its answer.

Where time comes from: everything that needs it is given a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class HttpTimings:
    """Shared by the server and the requests of the engine that answer one HTTP request.

    Times are seconds on the engine's clock. The server writes the first and the last, the engines the rest.
    """

    received_time: float
    """Its headers had come to the server, whatever they waited for there before they were looked at."""
    arrival_time: float | None = None
    """When the first of its requests came to an engine."""
    first_token_time: float | None = None
    """When the first token of an answer came."""
    predicted_ttft_s: float | None = None
    """Seconds from arrival to the first token of the last of its requests, as the door predicted; None: too little had
    been measured."""
    unfinished_request_ids: set[str] = field(default_factory=set)
    """Ids of the requests that answer it and have not ended."""
    last_finished_time: float = 0.0
    """When the one that ended last did."""
    num_coalesced: int = 0
    """Answers that others got without a computation of their own, because it computes them."""
    response_sent_time: float | None = None
    """When the last bytes of the answer were handed to the socket, or the client had left."""


Clock = Callable[[], float]
"""Returns seconds from an arbitrary origin, never going back."""

monotonic: Clock = time.monotonic
