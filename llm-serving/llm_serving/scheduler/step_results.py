"""What the rows of a step are to tell of prompts, beside the tokens that follow them.

Draft tokens of a step: which rows have room for some, and how many are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.schedule import PromptResults, ScheduledRow, StepPlan


def collect_prompt_results(rows: Sequence[ScheduledRow]) -> list[PromptResults]:
    """What these rows tell of prompts; of log-probabilities only those that have not come."""
    results = []
    for index, (request, num_computed, query_len, _, _) in enumerate(rows):
        if not request.has_prompt_results or num_computed >= request.num_prompt_tokens:
            continue
        end = num_computed + query_len
        start, last = (
            max(num_computed, request.num_prompt_logprobs_received),
            min(end, request.num_prompt_logprobs_wanted),
        )
        completes = end >= request.num_prompt_tokens
        vector, ends = completes and request.wants_vector, completes and request.sampling.max_tokens == 0
        if start < last or vector or ends:
            results.append(PromptResults(index, min(start, last), last, vector, ends))
    return results


def add_drafts(step: StepPlan, blocks: BlockManager) -> None:
    """Add draft tokens to the decoding rows, higher classes first, as far as their block tables have room.

    A step that computes a prompt gets none, so that they delay no prompt.
    """
    if step.computes_prompts:
        return
    for row in step.rows:
        request = row.request
        if request.draft_token_ids and row.num_samples and row.query_len == 1:
            room = blocks.num_tokens_with_blocks(request.request_id) - row.end
            left = request.sampling.max_tokens - request.num_output_tokens - 1
            step.add_draft_tokens(request, min(len(request.draft_token_ids), room, left))


def count_accepted_tokens(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return how many tokens a reply adds to a request.

    Args:
        drafts: The draft tokens.
        token_ids: The tokens chosen after the newest token and after each draft token; negative where none could be.

    Returns:
        1 for the first token, plus the number of accepted draft tokens.
    """
    count = 1
    for chosen, draft, following in zip(token_ids, drafts, token_ids[1:], strict=False):
        if chosen != draft or following < 0:
            break
        count += 1
    return count
