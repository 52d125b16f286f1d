"""Log-probabilities of a prompt's tokens: what a request may ask of them, and what an answer says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.core.request_output import PromptLogprobs
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import RequestError
from llm_serving.server.choices import Choices
from llm_serving.server.generation import MIN_LOGPROB
from llm_serving.server.schemas import GenerationRequest, PromptLogprob
from llm_serving.text.tokenizer.tokenizer import Tokenizer

MAX_VALUES: Final = 2**19
"""Log-probabilities of prompts in one answer, the named tokens among them; some 60 bytes of JSON each."""

PromptAnswer = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, by token id: itself first, then the most likely ones; None for the first token."""


def check_prompt_logprobs(request: GenerationRequest, field: str, choices: Choices) -> None:
    """Refuses what log-probabilities of a prompt do not go with.

    Args:
        request: It asks for them.
        field: By which name.
        choices: How its answers are found.

    Raises:
        RequestError: They are not streamed, and beams have none.
    """
    if request.stream:
        raise RequestError("stream", f"must be false with {field}", True)
    if choices.beams is not None:
        raise RequestError(field, "is not supported with use_beam_search")


def check_size(prompts: Sequence[list[int]], sampling: SamplingParams, field: str, n: int) -> None:
    """Raises RequestError where `n` answers would have more than `MAX_VALUES` log-probabilities of prompts."""
    if sampling.prompt_logprobs is None:
        return
    num_values = (1 + sampling.prompt_logprobs) * n * sum(map(len, prompts))
    if num_values > MAX_VALUES:
        rule = f"and one, times the tokens of the prompts of all answers, must be at most {MAX_VALUES}"
        raise RequestError(field, rule, num_values)


def prompt_answer(tokenizer: Tokenizer, logprobs: PromptLogprobs | None, count: int) -> PromptAnswer:
    """What vLLM tells of a prompt.

    Args:
        tokenizer: Of the model.
        logprobs: Of all tokens but the first; None of a prompt of one token.
        count: How many of the most likely tokens to tell.
    """
    answer: PromptAnswer = [None]
    if logprobs is None:
        return answer
    text = tokenizer.token_text
    for token_id, logprob, rank, top_ids, top_logprobs in zip(
        logprobs.token_ids.tolist(),
        logprobs.logprobs.tolist(),
        logprobs.ranks.tolist(),
        logprobs.top_token_ids[:, :count].tolist(),
        logprobs.top_logprobs[:, :count].tolist(),
        strict=True,
    ):
        told = {str(token_id): PromptLogprob(max(logprob, MIN_LOGPROB), rank, text(token_id))}
        for place, (likely, value) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
            told.setdefault(str(likely), PromptLogprob(max(value, MIN_LOGPROB), place, text(likely)))
        answer.append(told)
    return answer
