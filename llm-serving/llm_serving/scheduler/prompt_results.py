"""What the rows of a step are to tell of prompts, beside the tokens that follow them."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.scheduler.schedule import PromptResults, ScheduledRow


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
