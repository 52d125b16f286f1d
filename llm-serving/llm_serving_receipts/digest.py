"""Hashes of a response. The server that issues a receipt and the verifier compute them with the same code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from struct import pack
from typing import Any

import numpy as np
from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import SamplingParams

from llm_serving_receipts.receipt import ReceiptChoice


class ResponseDigest:
    """Accumulates the outputs of a request. The order of choices and the size of outputs do not affect the result.

    Log-probabilities are hashed as little-endian bytes. For each generated token: id (int32), log-probability
    (float32), number of top tokens (int32), their ids (int32) and log-probabilities (float32). For a prompt: SHA-256 of
    the ids of its tokens except the first (int32), of their log-probabilities (float32), of their ranks (int32), and of
    the top tokens' ids (int32) and log-probabilities (float32), each over all tokens; then SHA-256 of these five
    hashes.
    """

    def __init__(self, sampling: SamplingParams, n: int, num_prompts: int) -> None:
        self._n = n
        self._with_logprobs = sampling.logprobs is not None
        self._num_prompt_logprobs = sampling.prompt_logprobs
        self._choices = [_ChoiceDigest() for _ in range(n * num_prompts)]
        self._prompts: list[_PromptDigest | None] = [None] * num_prompts

    def add(self, index: int, output: RequestOutput) -> None:
        """Add an output of a choice. `index`: index of the prompt times n, plus index of the choice."""
        self._choices[index].add(output)
        if output.prompt_logprobs is not None and self._num_prompt_logprobs is not None:
            prompt = self._prompts[index // self._n] = self._prompts[index // self._n] or _PromptDigest()
            prompt.add(output.prompt_logprobs, self._num_prompt_logprobs)

    def choices(self) -> list[ReceiptChoice]:
        """Return the choices, all of which must have finished."""
        return [choice.finish(with_logprobs=self._with_logprobs) for choice in self._choices]

    def prompt_logprobs(self) -> list[str | None]:
        return [None if prompt is None else prompt.hash() for prompt in self._prompts]


class _ChoiceDigest:
    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._text, self._logprobs = hashlib.sha256(), hashlib.sha256()
        self._last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self._token_ids += output.token_ids
        self._text.update(output.text.encode())
        for token in output.logprobs:
            self._logprobs.update(_logprob_bytes(token))
        self._last = output

    def finish(self, *, with_logprobs: bool) -> ReceiptChoice:
        assert self._last is not None
        assert self._last.finish_reason is not None
        return ReceiptChoice(
            token_ids=self._token_ids,
            finish_reason=self._last.finish_reason.value,
            stop_reason=self._last.stop_reason,
            text=self._text.hexdigest(),
            logprobs=self._logprobs.hexdigest() if with_logprobs else None,
        )


def _logprob_bytes(token: TokenLogprobs) -> bytes:
    k = len(token.top_token_ids)
    return pack(f"<ifi{k}i{k}f", token.token_id, token.logprob, k, *token.top_token_ids, *token.top_logprobs)


class _PromptDigest:
    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(5)]

    def add(self, logprobs: PromptLogprobs, num_top_tokens: int) -> None:
        top = logprobs.top_token_ids[:, :num_top_tokens], logprobs.top_logprobs[:, :num_top_tokens]
        arrays = [logprobs.token_ids, logprobs.logprobs, logprobs.ranks, *top]
        for part, array in zip(self._parts, arrays, strict=True):
            kind = "<f4" if array.dtype.kind == "f" else "<i4"
            part.update(np.ascontiguousarray(array).astype(kind, copy=False).tobytes())

    def hash(self) -> str:
        return hashlib.sha256(b"".join(part.digest() for part in self._parts)).hexdigest()


def response_texts(response: Mapping[str, Any]) -> dict[int, str]:
    """Return index -> text for the choices of a decoded response, except choices with reasoning or tool calls."""
    choices = response.get("choices")
    return dict(_texts(choices)) if isinstance(choices, list) else {}


def _texts(choices: list[Any]) -> Iterator[tuple[int, str]]:
    for position, choice in enumerate(choices):
        if not isinstance(choice, dict):
            continue
        index, text, message = choice.get("index", position), choice.get("text"), choice.get("message")
        if isinstance(message, dict) and not message.get("tool_calls") and not message.get("reasoning_content"):
            text = message.get("content")
        if isinstance(text, str) and isinstance(index, int):
            yield index, text


def has_hash(text: str, prompt: str, text_hash: str) -> bool:
    """Return whether `text` has this SHA-256. The text may begin with the last part of the prompt (`echo`), which is
    not hashed.
    """
    return any(
        prompt.endswith(text[:k]) and hashlib.sha256(text[k:].encode()).hexdigest() == text_hash
        for k in range(min(len(text), len(prompt)) + 1)
    )
