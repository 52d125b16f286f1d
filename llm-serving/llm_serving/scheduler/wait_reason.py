"""What the scheduler tells of those it left waiting, and of those it made wait again."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from llm_serving.core.request import Request


class WaitReason(enum.StrEnum):
    """Why a step was formed without the request that was to be admitted next."""

    SLOTS = "no free slot"
    BLOCKS = "no free block"
    BUDGET = "the step has all its tokens"
    PROMPTS = "the step has all its prompts"
    SHARE = "share limit of its class"
    IN_FLIGHT = "its newest token is not back"
    DECODING = "the step only decodes"
    BATCH = "a batch is collected"
    TENANT = "its tenant runs as many as it may"


NO_ROOM: Final = (WaitReason.BUDGET, WaitReason.PROMPTS)
"""Reasons that are the step's alone: with a smaller step before it, the request might have been admitted."""


class Blocked(NamedTuple):
    """Who was to be admitted next and was not; everybody who waits and is not of a closed class is behind it."""

    request_id: str | None
    """None where the reason holds for all."""
    class_name: str | None
    reason: WaitReason
    behind: str | None = None
    """Another class, the one that holds most of the places the reason is about, if any does."""
    closed: tuple[str, ...] = ()
    """Classes passed over, as they hold as many slots or blocks as they may."""
    tenants: tuple[str, ...] = ()
    """Tenants that run as many requests as they may; their others are in nobody's way."""

    @classmethod
    def of(cls, request: Request, reason: WaitReason) -> Blocked:
        return cls(request.request_id, request.request_class.name, reason)


class Preemption(NamedTuple):
    """A running request that lost its place."""

    request_id: str
    by_class: str
    """The class it was done for; its own where it gave way to others of its class."""
    swapped: bool
    """Whether what it had computed was moved out; otherwise it is computed again."""
