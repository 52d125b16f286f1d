"""What the rows of a step are to tell of prompts, beside the tokens that follow them.

Guesses in a step: who has room for some, and how many of them were right.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.schedule import PromptResults, ScheduledRow, StepDraft


def prompt_results_of(rows: Sequence[ScheduledRow]) -> list[PromptResults]:
    """What these rows tell of prompts; of log-probabilities only those that have not come."""
    results = []
    for index, (request, num_computed, query_len, _, _) in enumerate(rows):
        if not request.tells_of_its_prompt or num_computed >= request.num_prompt_tokens:
            continue
        end = num_computed + query_len
        start, last = max(num_computed, request.num_results), min(end, request.num_results_wanted)
        completes = end >= request.num_prompt_tokens
        vector, ends = completes and request.wants_vector, completes and request.sampling.max_tokens == 0
        if start < last or vector or ends:
            results.append(PromptResults(index, min(start, last), last, vector, ends))
    return results


def add_drafts(step: StepDraft, blocks: BlockManager) -> None:
    """Adds guesses to the rows of requests that decode, higher classes first, in the room that their tables have.

    A step that computes a prompt gets none: no prompt is to wait for them.
    """
    if step.computes_prompts:
        return
    for row in step.rows:
        request = row.request
        if request.draft_token_ids and row.samples and row.query_len == 1:
            room = blocks.num_tokens_with_room(request.request_id) - row.end
            left = request.sampling.max_tokens - request.num_output_tokens - 1
            step.add_drafts(request, min(len(request.draft_token_ids), room, left))


def num_chosen(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens a reply brings.

    Args:
        drafts: The guesses.
        token_ids: What was chosen behind the newest token and behind each guess; below 0 where nothing could be.

    Returns:
        The first counts, and each other one as long as the guesses before it are what was chosen.
    """
    count = 1
    for chosen, draft, following in zip(token_ids, drafts, token_ids[1:], strict=False):
        if chosen != draft or following < 0:
            break
        count += 1
    return count
