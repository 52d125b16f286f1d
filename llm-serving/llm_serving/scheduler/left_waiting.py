"""Whom a step leaves waiting, and why."""

from __future__ import annotations

from llm_serving.scheduler.places import Places
from llm_serving.scheduler.schedule import StepDraft
from llm_serving.scheduler.wait_reason import NO_ROOM, Blocked, WaitReason
from llm_serving.scheduler.waits import Waits


def left_waiting(draft: StepDraft, waits: Waits, places: Places) -> Blocked | None:
    """Of a step that is formed; None: nobody waits, or nothing is in the way of those who do."""
    full = waits.gate.full()
    if len(waits.queue) == 0:
        return Blocked(None, None, WaitReason.TENANT, tenants=full) if full else None
    blocked = _left_in_queue(draft, waits, places)
    return blocked._replace(tenants=full) if blocked is not None and full else blocked


def _left_in_queue(draft: StepDraft, waits: Waits, places: Places) -> Blocked | None:
    if not draft.considers_prompts:
        return Blocked(None, None, WaitReason.DECODING)
    blocked = draft.blocked
    if blocked is not None and blocked.reason is WaitReason.BATCH:
        return blocked
    if blocked is not None and blocked.reason in NO_ROOM:
        blocked = _or_slots(blocked, waits, places)
    if draft.closed:
        closed = tuple(sorted(draft.closed))
        return (blocked or Blocked(None, None, WaitReason.SHARE))._replace(closed=closed)
    return blocked


def _or_slots(blocked: Blocked, waits: Waits, places: Places) -> Blocked:
    """Who would not have been admitted by a step with room either, as no slot is free for it, waits for a slot."""
    assert blocked.class_name is not None
    own = waits.queue.queues[blocked.class_name].request_class
    if not places.are_taken or places.has_below(own):
        return blocked
    return blocked._replace(reason=WaitReason.SLOTS, behind=places.other_holder(own))
