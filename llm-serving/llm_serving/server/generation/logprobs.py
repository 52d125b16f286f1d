"""Logprobs in responses: those of generated tokens, and those of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from llm_serving.core.request_output import PromptLogprobs, RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import RequestError
from llm_serving.server.generation.sampling import Choices
from llm_serving.server.protocols.openai.schemas import GenerationRequest, PromptLogprob
from llm_serving.text.tokenizer.tokenizer import Tokenizer

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON lacks. OpenAI uses the same value."""
MAX_PROMPT_VALUES: Final = 2**19
"""Maximum number of prompt logprobs in a response; each takes about 60 bytes of JSON."""

PromptTokenLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token: token id -> logprob, for this token and the most likely ones. None for the first token."""


class TokenOutput(NamedTuple):
    token_id: int
    logprob: float
    text: str


def token_outputs(output: RequestOutput) -> list[TokenOutput]:
    """Split an output into tokens, for protocols with one event per token. The last one gets all text of the output."""
    logprobs = [token.logprob for token in output.logprobs] or [0.0] * len(output.token_ids)
    last = len(output.token_ids) - 1
    return [
        TokenOutput(token_id, max(logprob, MIN_LOGPROB), output.text if i == last else "")
        for i, (token_id, logprob) in enumerate(zip(output.token_ids, logprobs, strict=True))
    ]


def check_prompt_logprobs(request: GenerationRequest, field: str, choices: Choices) -> None:
    """Raise RequestError if `field`, which asks for prompt logprobs, is given with a stream or a beam search."""
    if request.stream:
        raise RequestError("stream", f"must be false with {field}", True)
    if choices.beams is not None:
        raise RequestError(field, "is not supported with use_beam_search")


def check_prompt_logprobs_size(prompts: Sequence[list[int]], sampling: SamplingParams, field: str, n: int) -> None:
    if sampling.prompt_logprobs is None:
        return
    num_values = (1 + sampling.prompt_logprobs) * n * sum(map(len, prompts))
    if num_values > MAX_PROMPT_VALUES:
        rule = f"plus one, times the number of prompt tokens of all choices, must be at most {MAX_PROMPT_VALUES}"
        raise RequestError(field, rule, num_values)


def prompt_token_logprobs(tokenizer: Tokenizer, logprobs: PromptLogprobs | None, count: int) -> PromptTokenLogprobs:
    """Return prompt logprobs in vLLM's format: each position has its token and the `count` most likely tokens."""
    reported: PromptTokenLogprobs = [None]
    if logprobs is None:
        return reported
    text = tokenizer.token_text
    for token_id, logprob, rank, top_ids, top_logprobs in zip(
        logprobs.token_ids.tolist(),
        logprobs.logprobs.tolist(),
        logprobs.ranks.tolist(),
        logprobs.top_token_ids[:, :count].tolist(),
        logprobs.top_logprobs[:, :count].tolist(),
        strict=True,
    ):
        by_id = {str(token_id): PromptLogprob(max(logprob, MIN_LOGPROB), rank, text(token_id))}
        for top_rank, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
            by_id.setdefault(str(top_id), PromptLogprob(max(value, MIN_LOGPROB), top_rank, text(top_id)))
        reported.append(by_id)
    return reported
