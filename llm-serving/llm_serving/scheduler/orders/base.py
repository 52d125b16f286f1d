"""What an order is: numbers."""

from __future__ import annotations

from typing import Protocol

from llm_serving.core.request import Request


class Order(Protocol):
    """A key over numbers. It decides who goes next, never for how long somebody waits: of `max_overtakes` + 1 requests
    of a class that are admitted, one is the oldest, whatever the keys say."""

    shares_fairly: bool
    """Whether the tenant that was served least goes before the others; the key orders the requests of one tenant."""

    def place(self, request: Request) -> float:
        """Smaller goes first; of equals the one that came first, moved by its priority. Asked on arrival, and
        again when the rules of the scheduler change."""

    def ended(self, request: Request) -> None:
        """A request has ended: what there is to learn from its length."""
