"""The expected answers of a beam search over the fake model, computed without engine, scheduler and cache."""

from __future__ import annotations

from collections.abc import Collection

from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.window import NO_WINDOW
from llm_serving.engine.beam_search import BeamSearch, LikelyTokens
from support.fake_runner import most_likely, next_logprobs, seen


def expected_beams(
    prompt_token_ids: list[int],
    params: BeamSearchParams,
    max_tokens: int,
    stop_token_ids: Collection[int],
    window: int = NO_WINDOW,
) -> list[tuple[int, ...]]:
    """Return the answers, best first."""
    search = BeamSearch(params, max_tokens, stop_token_ids)
    while not search.has_ended:
        choices = []
        for beam in search.live:
            context = seen(prompt_token_ids + [token.token_id for token in beam.tokens()], window)
            logprobs, ranked = next_logprobs(context), most_likely(context)[: 2 * params.width]
            choices.append(LikelyTokens(ranked.tolist(), logprobs[ranked].tolist()))
        search.advance(choices)
    return [tuple(token.token_id for token in beam.hypothesis.tokens()) for beam in search.best()]
