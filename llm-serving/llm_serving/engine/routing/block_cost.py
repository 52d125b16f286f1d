"""Fewest blocks to compute and to hold; the rule of NVIDIA Dynamo's KV router, both weighing the same, as by default.

https://docs.nvidia.com/dynamo/design-docs/router-design
"""

from __future__ import annotations

from llm_serving.engine.routing.base import Candidate, Candidates, Predict


class BlockCost:
    needs_prefixes = True

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        del predict
        return min(candidates, key=lambda each: (_cost(each), each.num_unfinished, each.replica))

    def chosen(self, replica: int) -> None:
        del replica


def _cost(candidate: Candidate) -> float:
    """Blocks of prompts that are to be computed there with this one, and those held while all of them decode."""
    uncached = candidate.num_prompt_tokens - candidate.num_cached_tokens
    num_new = (candidate.num_owed_tokens + uncached) / candidate.block_size
    return 2 * num_new + candidate.num_used_blocks
