"""A request on its way from the replica that has computed its prompt to the one that goes on with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.transfer import Transfer
from llm_serving.engine.audit import Answer
from llm_serving.engine.output_processor import Produced
from llm_serving.executor.block_link import BlockLink
from llm_serving.kvcache.exports import TransferBlock


@dataclass(frozen=True, slots=True)
class Brought:
    """That what a request takes along has been brought to another machine."""

    replica: int
    link: BlockLink
    """To the WorkAgent that has it, as long as this is not closed."""


class Departure(NamedTuple):
    """What an engine lets go of and another one takes, or nobody, if it is not wanted any more."""

    request: Request
    """As it goes on; what the engine knew it by has ended."""
    produced: Produced
    """Its text so far."""
    audited: Answer | None
    """What its client was told, where that is to be compared."""
    time: float
    """When its last step at that engine was replied to."""
    brought: Brought | None = None
    """None: what it takes along is where it was handed over."""

    @property
    def blocks(self) -> list[TransferBlock]:
        """What it takes along."""
        return [] if self.request.transfer is None else self.request.transfer.blocks

    def leave_blocks(self) -> list[TransferBlock]:
        """Has everything computed again; nobody needs these any more."""
        blocks = self.blocks
        if self.request.transfer is not None:
            self.request.transfer = self.request.transfer.without_blocks()
        return blocks


def last_piece(request: Request, reason: FinishReason, error: str) -> RequestOutput:
    """What a client is told where nobody goes on with it."""
    if request.exchange is not None:
        request.exchange.unfinished.discard(request.request_id)
    return RequestOutput(
        request_id=request.request_id,
        text="",
        token_ids=(),
        logprobs=(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=len(request.output_token_ids),
        finish_reason=reason,
        error=error,
    )


def as_it_goes_on(request: Request, transfer: Transfer) -> Request:
    """Another record of the same request, that no engine has yet."""
    return Request(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        beginnings=request.beginnings,
        waits_for_reply=request.waits_for_reply,
        transfer=transfer,
        constraint=request.constraint,
        arrival_time=request.arrival_time,
        deadline=request.deadline,
        exchange=request.exchange,
        output_token_ids=list(request.output_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        first_scheduled_time=request.first_scheduled_time,
    )
