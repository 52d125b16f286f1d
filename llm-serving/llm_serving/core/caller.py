"""Who asks for an answer, and how urgently."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from llm_serving.core.exchange import Exchange


@dataclass(frozen=True)
class Caller:
    """What the engine is told of who asks; nothing of it changes an answer."""

    priority: int = 0
    """Smaller runs first; it also puts a request into its class."""
    tenant: str = ""
    """Who shares fairly with others of the same class: the name of an API key, or the user a client names."""
    cache_salt: str = ""
    """Requests find each other's computed prefixes only where tenant and salt are the same."""
    deadline: float | None = None
    """Seconds on the engine's clock after which the answer is of no more use; None: it waits for it."""
    exchange: Exchange | None = field(default=None, compare=False)
    """The times of the HTTP request it came with."""

    @property
    def cache_namespace(self) -> str:
        return cache_namespace(self.tenant, self.cache_salt)


def cache_namespace(tenant: str, cache_salt: str) -> str:
    """Whose computed prefixes requests may find."""
    return f"{tenant}\0{cache_salt}"


ANYBODY: Final = Caller()
"""Asks without any name or haste."""
