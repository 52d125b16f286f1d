"""One picture of all engines as those who watch them get it: rows without names, whose columns are told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from llm_serving.observe.glance import Glance
from llm_serving.observe.journal import Life, Step
from llm_serving.observe.metrics import Metrics
from llm_serving.observe.scheduler_rows import ClassQueue, RunningRequest, WaitingRequest
from llm_serving.server.scheduler_view import Replica, SchedulerView, Tenant, view_of
from llm_serving.server.streaming import named_event


class EndedRequest(Struct, kw_only=True):
    """A request that has ended since the picture before."""

    id: str
    request_class: str
    tenant: str
    reason: str | None
    seconds: float
    """From its arrival to its end."""
    first_token: float | None
    """Seconds from its arrival to its first token."""
    prompt: int
    cached: int
    output: int
    preemptions: int


class ComputedStep(Struct, kw_only=True):
    """A step that has ended since the picture before; for a tenant, its own rows of it, and no step without one."""

    number: int
    ended: float
    """Seconds on the clock of `time`."""
    seconds: float
    """From when it was formed, or the step before had ended, to its results."""
    prompts: int
    """Rows that computed parts of prompts, or again what was lost."""
    prompt_tokens: int
    decoding: int
    """Rows that computed one token and chose the next."""


ROWS: Final[Mapping[str, type[Struct]]] = {
    "classes": ClassQueue,
    "tenants": Tenant,
    "running_requests": RunningRequest,
    "waiting_requests": WaitingRequest,
    "ended": EndedRequest,
    "steps": ComputedStep,
}
DIGITS: Final = 4
"""Of seconds, behind the point."""


def columns_event() -> bytes:
    """Names of the values of each row of each list; first in every stream."""
    return named_event("columns", {name: kind.__struct_fields__ for name, kind in ROWS.items()})


def picture_event(
    number: int, time: float, glances: Mapping[int, Glance | None], policy: str, tenant: str | None, metrics: Metrics
) -> bytes:
    """The picture with this number, as far as a tenant may see it; all of it with None."""
    known = {index: each for index, each in glances.items() if each is not None}
    silent = [index for index, each in glances.items() if each is None]
    view: SchedulerView = view_of({index: each.state for index, each in known.items()}, silent, policy, tenant)
    return named_event(
        "picture",
        {
            "number": number,
            "time": round(time, DIGITS),
            "totals": {**metrics.totals()._asdict(), "bound_violations": metrics.num_bound_violations},
            "kept": metrics.classes.kept(),
            "replicas": [
                _replica(each, known[each.replica], tenant) | _where(metrics.machine(each.replica), tenant)
                for each in view.replicas
            ],
            "silent": silent,
        },
    )


def _replica(view: Replica, seen: Glance, tenant: str | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "replica": view.replica,
        "step": view.step,
        "policy": view.policy,
        "slots": view.slots,
        "budget": seen.max_step_tokens,
        "step_s": seen.step_s,
        "running": view.running,
        "waiting": view.waiting,
        "blocks": view.blocks,
        "saved": sum(each.blocks for each in seen.state.running.values()) - view.blocks.used,
    }
    own = _sequences(seen, tenant)
    lists: dict[str, Sequence[Struct]] = {
        "classes": view.classes,
        "tenants": view.tenants,
        "running_requests": view.running_requests,
        "waiting_requests": view.waiting_requests,
        "ended": [_ended(life) for life in seen.ended if tenant in (None, life.tenant)],
        "steps": _steps(seen.steps, own),
    }
    return told | {name: [_values(row) for row in rows] for name, rows in lists.items()}


def _where(machine: str, tenant: str | None) -> dict[str, str]:
    """Machines are told to those who may see everything."""
    return {"machine": machine if tenant is None else ""}


def _values(row: Struct) -> list[Any]:
    return [round(value, DIGITS) if isinstance(value, float) else value for value in msgspec.structs.astuple(row)]


def _sequences(seen: Glance, tenant: str | None) -> frozenset[int] | None:
    """`Request.sequence` of what a tenant has, or had until just now; None: of everybody's."""
    if tenant is None:
        return None
    running = [sequence for sequence, row in seen.state.running.items() if row.tenant == tenant]
    waiting = [sequence for sequence, row in seen.state.waiting.items() if row.tenant == tenant]
    return frozenset(running + waiting).union(*(life.sequences for life in seen.ended if life.tenant == tenant))


def _ended(life: Life) -> EndedRequest:
    facts, came = life.facts, life.first_token_time
    ended = life.arrival_time if life.ended_time is None else life.ended_time
    return EndedRequest(
        id=life.request_id,
        request_class=life.request_class.name,
        tenant=life.tenant,
        reason=facts.finish_reason,
        seconds=ended - life.arrival_time,
        first_token=None if came is None else came - life.arrival_time,
        prompt=facts.num_prompt_tokens,
        cached=facts.num_cached_tokens,
        output=facts.num_output_tokens,
        preemptions=facts.num_preemptions,
    )


def _steps(steps: Sequence[tuple[float, Step]], own: frozenset[int] | None) -> list[ComputedStep]:
    found = []
    for began, step in steps:
        chunks = [chunk for chunk in step.chunks if own is None or chunk[0] in own]
        decoding = len(step.singles) if own is None else sum([each in own for each in step.singles])
        if own is None or chunks or decoding:
            found.append(
                ComputedStep(
                    number=step.number,
                    ended=step.ended,
                    seconds=step.ended - began,
                    prompts=len(chunks),
                    prompt_tokens=sum([count for _, _, count in chunks]),
                    decoding=decoding,
                )
            )
    return found
