"""What the rows of a step carry beside tokens to compute: draft tokens, prompt results and exported KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.core.step import BlockMove
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.schedule import PromptResults, ScheduledRow, StepPlan


def collect_prompt_results(rows: Sequence[ScheduledRow]) -> list[PromptResults]:
    """Return the prompt results of these rows; log-probabilities that have come already are left out."""
    results = []
    for index, (request, num_computed, query_len, _, _) in enumerate(rows):
        if not request.has_prompt_results or num_computed >= request.num_prompt_tokens:
            continue
        end = num_computed + query_len
        start = max(num_computed, request.num_prompt_logprobs_received)
        last = min(end, request.num_prompt_logprobs_wanted)
        completes = end >= request.num_prompt_tokens
        vector, ends = completes and request.wants_vector, completes and request.sampling.max_tokens == 0
        if start < last or vector or ends:
            results.append(PromptResults(index, min(start, last), last, vector, ends))
    return results


def plan_exports(rows: Sequence[ScheduledRow], blocks: BlockManager) -> tuple[list[ScheduledRow], list[BlockMove]]:
    """Return the rows whose requests migrate after this step, and the moves that export their blocks.

    A request migrates with its first token, if it is not the last one and the transfer pool has room.
    """
    migrating: list[ScheduledRow] = []
    exports: list[BlockMove] = []
    for row in rows:
        request = row.request
        is_last = request.num_output_tokens + 1 >= request.sampling.max_tokens
        if not request.wants_migration or row.num_samples != 1 or is_last:
            continue
        moves = blocks.export(request.request_id, row.end)
        if moves is not None:
            request.is_migrating = True
            migrating.append(row)
            exports += moves
    return migrating, exports


def add_draft_tokens(plan: StepPlan, blocks: BlockManager) -> None:
    """Add draft tokens to the decoding rows, higher classes first, while their block tables have room.

    A step that computes a prompt gets none, so that they delay no prompt.
    """
    if plan.computes_prompts:
        return
    for row in plan.rows:
        request = row.request
        if request.draft_token_ids and row.num_samples and row.query_len == 1:
            room = blocks.num_tokens_with_blocks(request.request_id) - row.end
            left = request.sampling.max_tokens - request.num_output_tokens - 1
            plan.add_draft_tokens(request, min(len(request.draft_token_ids), room, left))


def count_accepted_tokens(draft_token_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return how many tokens a reply adds to a request.

    Args:
        draft_token_ids: The draft tokens.
        token_ids: The tokens chosen after the newest token and after each draft token; negative if none was possible.

    Returns:
        1 for the first token, plus the number of accepted draft tokens.
    """
    count = 1
    for chosen, draft, following in zip(token_ids, draft_token_ids, token_ids[1:], strict=False):
        if chosen != draft or following < 0:
            break
        count += 1
    return count
