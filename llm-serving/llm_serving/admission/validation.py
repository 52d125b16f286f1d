"""Checks of requests against the model and the limits. A request that can never be served is refused at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from llm_serving.config.sections.model import ModelConfig
from llm_serving.core.request_class import MAX_PRIORITY
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.errors import ContextLengthError, RequestError
from llm_serving.kvcache import BlockManager
from llm_serving.models.spec import ModelSpec
from llm_serving.text.tokenizer.tokenizer import Tokenizer


def check_request(
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    vocab_size: int,
    limits: ModelConfig,
    blocks: BlockManager,
    end_ids: frozenset[int],
) -> None:
    """Raise RequestError if even an idle server could not serve the request."""
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("prompt", "must hold at least one token", num_prompt)
    if num_prompt > limits.max_input_len:
        raise ContextLengthError("prompt", f"must be at most {limits.max_input_len} tokens long", num_prompt)
    total = num_prompt + sampling.max_tokens
    if total > limits.max_generate_length:
        rule = f"with the prompt of {num_prompt} tokens must be at most {limits.max_generate_length} tokens"
        raise ContextLengthError("max_tokens", rule, sampling.max_tokens)
    if total > blocks.max_request_tokens:
        rule = f"with the prompt of {num_prompt} tokens must fit the cache of {blocks.max_request_tokens} tokens"
        raise ContextLengthError("max_tokens", rule, sampling.max_tokens)
    check_token_ids("prompt", prompt_token_ids, vocab_size)
    if sampling.stop_token_ids:
        check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    if sampling.logit_bias:
        check_token_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    if sampling.allowed_token_ids:
        check_token_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    if sampling.bad_words:
        check_token_ids("bad_words", list(itertools.chain.from_iterable(sampling.bad_words)), vocab_size)
    if sampling.bad_words or sampling.min_tokens:
        _check_token_remains(sampling, end_ids, vocab_size)


def check_priority(priority: int) -> None:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise RequestError("priority", f"must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}", priority)


def check_beam_search(limits: ModelConfig, sampling: SamplingParams) -> None:
    """Raise RequestError if beam search does not support an option of the request, or if batching is static."""
    if sampling.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs", "is not supported with use_beam_search")
    if sampling.constraint is not None:
        raise RequestError("constraint", "is not supported with use_beam_search")
    for name in ("stop", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"):
        if getattr(sampling, name):
            raise RequestError(name, "is not supported with use_beam_search")
    if sampling.max_tokens == 0:
        raise RequestError("max_tokens", "must be at least 1 with use_beam_search", 0)
    if limits.batching_strategy == "static":
        raise RequestError("use_beam_search", "is not supported with model_config.batching_strategy: static", True)


def end_token_ids(config: ModelConfig, spec: ModelSpec, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the end-of-text ids that YAML, model config and tokenizer name, except ids outside the vocabulary."""
    configured = () if config.end_token is None else (config.end_token,)
    named = (*configured, *spec.eos_token_ids, *tokenizer.eos_token_ids)
    return frozenset(token_id for token_id in named if token_id < spec.vocab_size)


def stop_token_ids(sampling: SamplingParams, end_ids: frozenset[int]) -> frozenset[int]:
    model_ids = frozenset[int]() if sampling.ignore_eos else end_ids
    return model_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else model_ids


def _check_token_remains(sampling: SamplingParams, end_ids: frozenset[int], vocab_size: int) -> None:
    allowed, forbidden = sampling.allowed_token_ids, {sequence[-1] for sequence in sampling.bad_words}
    if sampling.min_tokens:
        forbidden |= stop_token_ids(sampling, end_ids)
    if not forbidden:
        return
    num_left = vocab_size - len(forbidden) if allowed is None else len(set(allowed) - forbidden)
    if num_left <= 0:
        field = "allowed_token_ids" if allowed is not None else "bad_words" if sampling.bad_words else "min_tokens"
        raise RequestError(
            field, "must leave a token to sample; allowed_token_ids, bad_words and min_tokens exclude all tokens"
        )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        return
    smallest, largest = min(token_ids), max(token_ids)  # a prompt may have 100,000 ids, so two C-speed passes
    if smallest < 0 or largest >= vocab_size:
        rule = f"must hold token ids from 0 to {vocab_size - 1}"
        raise RequestError(field, rule, smallest if smallest < 0 else largest)
