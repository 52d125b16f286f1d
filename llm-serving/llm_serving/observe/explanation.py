"""Why a request took as long as it did: its spans summed up, beside the bounds of its class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from llm_serving.observe.attribution import OwnRow, Part, Span, attribute, largest_decode_gap, num_right, own_rows
from llm_serving.observe.journal import Life, Record
from llm_serving.observe.live_requests import client_id_of
from llm_serving.scheduler.bounds import ClassBounds


class ExplainedPart(Struct, kw_only=True):
    """Time that went into one thing."""

    what: str
    detail: str
    ms: float
    steps: int
    """That ran meanwhile."""


class ExplainedSteps(Struct, kw_only=True):
    """Steps from its arrival to its end."""

    first: int | None
    """Number of the first step that computed it; None: none did, or it is no longer kept."""
    last: int | None
    prefill: int
    computed_again: int
    decode: int
    left_out: int
    """Steps it shared while it had its place."""


class ExplainedTokens(Struct, kw_only=True):
    prompt: int
    cached: int
    """Of the prompt, found computed."""
    output: int
    guessed: int
    """Of the output, tokens that took no step of their own, as they had been guessed; of the steps still known."""


class BoundAndMet(Struct, kw_only=True):
    """What the request was promised, and what it met; in steps or times."""

    bound: int | None
    met: int | None


class ExplainedBounds(Struct, kw_only=True):
    wait: BoundAndMet
    """Steps from its arrival to its first admission."""
    wait_bound_s: float | None
    """Seconds that the bound comes to at the time a step takes of late."""
    decode_gap: BoundAndMet
    """Steps in a row that left it out between two of its tokens; null where its next step waits for more."""
    preemptions: BoundAndMet


class ExplainedFirstToken(Struct, kw_only=True):
    """Milliseconds from the arrival at the server to the first token."""

    predicted_ms: float | None
    """Told to the client when it was let in; null: too little had been measured."""
    real_ms: float | None
    """Null: it has none yet."""


class Explanation(Struct, kw_only=True):
    """Where the time of one request of the engine went; the parts add up to `wall_ms`."""

    id: str
    """The client's id, and a number that tells choices apart."""
    request_class: str
    tenant: str | None
    """Only told where API keys say who asks."""
    replica: int
    status: str
    finish_reason: str | None
    wall_ms: float
    first_token: ExplainedFirstToken
    parts: list[ExplainedPart]
    steps: ExplainedSteps
    tokens: ExplainedTokens
    num_preemptions: int
    num_sharing: int
    """Answers that others got from the same computation as those of this HTTP request."""
    bounds: ExplainedBounds


def answers_to(life: Life, names: Collection[str]) -> bool:
    """Whether a client means this request by one of `names`, which are `client_ids`: its own id, that of the answer, or
    the engine's."""
    return life.request_id in names or client_id_of(life.request_id) in names


def explain(
    life: Life,
    record: Record,
    bounds: ClassBounds,
    replica: int,
    *,
    with_tenant: bool,
    step_s: float | None = None,
) -> Explanation:
    """The explanation of one request from a record of its engine's journal; `step_s` is how long a step takes."""
    facts = life.facts
    wait_bound_s = None if facts.wait_bound is None or step_s is None else facts.wait_bound * step_s
    spans, rows = attribute(life, record), own_rows(life, record)
    computed = {part: sum(row.part is part for row in rows) for part in Part}
    gap = None if life.has_beams else largest_decode_gap(life, record, rows)
    return Explanation(
        id=life.request_id,
        request_class=life.request_class.name,
        tenant=life.tenant if with_tenant else None,
        replica=replica,
        status=facts.status,
        finish_reason=facts.finish_reason,
        wall_ms=_ms(spans[-1].end - spans[0].start) if spans else 0.0,
        first_token=_first_token(life),
        parts=_sum_up(spans),
        steps=_steps(rows, computed, spans),
        tokens=ExplainedTokens(
            prompt=facts.num_prompt_tokens,
            cached=facts.num_cached_tokens,
            output=facts.num_output_tokens,
            guessed=sum(num_right(row.step, life) for row in rows),
        ),
        num_preemptions=facts.num_preemptions,
        num_sharing=0 if life.exchange is None else life.exchange.num_sharing,
        bounds=ExplainedBounds(
            wait=BoundAndMet(bound=facts.wait_bound, met=facts.num_steps_waited),
            wait_bound_s=wait_bound_s,
            decode_gap=BoundAndMet(bound=bounds.max_decode_gap, met=gap),
            preemptions=BoundAndMet(bound=bounds.max_preemptions, met=facts.num_preemptions),
        ),
    )


def _first_token(life: Life) -> ExplainedFirstToken:
    predicted_s = None if life.exchange is None else life.exchange.predicted_ttft_s
    came = life.first_token_time
    began = life.arrival_time if life.exchange is None else life.exchange.received_time
    return ExplainedFirstToken(
        predicted_ms=None if predicted_s is None else 1000 * predicted_s,
        real_ms=None if came is None else 1000 * (came - began),
    )


def _sum_up(spans: Iterable[Span]) -> list[ExplainedPart]:
    """One part for each reason, in the order in which they first came."""
    sums: dict[tuple[Part, str], int] = {}
    steps: dict[tuple[Part, str], set[int]] = {}
    for span in spans:
        key = (span.part, span.detail)
        sums[key] = sums.get(key, 0) + span.end - span.start
        if span.step is not None:
            steps.setdefault(key, set()).add(span.step)
    return [
        ExplainedPart(what=part.value, detail=detail, ms=_ms(total), steps=len(steps.get((part, detail), ())))
        for (part, detail), total in sums.items()
    ]


def _steps(rows: Sequence[OwnRow], computed: dict[Part, int], spans: Iterable[Span]) -> ExplainedSteps:
    return ExplainedSteps(
        first=rows[0].step.number if rows else None,
        last=rows[-1].step.number if rows else None,
        prefill=computed[Part.PREFILL],
        computed_again=computed[Part.COMPUTED_AGAIN],
        decode=computed[Part.DECODE],
        left_out=len({span.step for span in spans if span.part is Part.SHARING}),
    )


def _ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6
