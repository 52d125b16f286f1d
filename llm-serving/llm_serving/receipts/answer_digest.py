"""The answers of one request as a receipt has them, whoever computes them: the server, or who checks it."""

from __future__ import annotations

import hashlib
from struct import pack

import numpy as np

from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.receipts.receipt import ReceiptChoice


class AnswerDigest:
    """Takes pieces in any order of choices; how an answer is cut into pieces makes no difference.

    Log-probabilities are hashed as little-endian bytes. Of an answer, for each token: id (int32), log-probability
    (float32), number of likely tokens (int32), their ids (int32) and log-probabilities (float32). Of a prompt: SHA-256
    of the ids of its tokens but the first (int32), their log-probabilities (float32), ranks (int32), and the likely
    ones' ids (int32) and log-probabilities (float32), each over all tokens; then of these five.
    """

    def __init__(self, sampling: SamplingParams, n: int, num_prompts: int) -> None:
        self._n = n
        self._tells_logprobs = sampling.logprobs is not None
        self._count = sampling.prompt_logprobs
        self._choices = [_Choice() for _ in range(n * num_prompts)]
        self._prompts: list[_Prompt | None] = [None] * num_prompts

    def add(self, index: int, output: RequestOutput) -> None:
        """A piece of a choice; `index` is that of its prompt times n, plus that of the choice."""
        self._choices[index].add(output)
        if output.prompt_logprobs is not None and self._count is not None:
            prompt = self._prompts[index // self._n] = self._prompts[index // self._n] or _Prompt()
            prompt.add(output.prompt_logprobs, self._count)

    def choices(self) -> list[ReceiptChoice]:
        """Once each has ended."""
        return [choice.told(with_logprobs=self._tells_logprobs) for choice in self._choices]

    def prompt_logprobs(self) -> list[str | None]:
        return [None if prompt is None else prompt.hash() for prompt in self._prompts]


class _Choice:
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

    def told(self, *, with_logprobs: bool) -> ReceiptChoice:
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


class _Prompt:
    def __init__(self) -> None:
        self._parts = [hashlib.sha256() for _ in range(5)]

    def add(self, told: PromptLogprobs, count: int) -> None:
        likely = told.top_token_ids[:, :count], told.top_logprobs[:, :count]
        arrays = [told.token_ids, told.logprobs, told.ranks, *likely]
        for part, array in zip(self._parts, arrays, strict=True):
            kind = "<f4" if array.dtype.kind == "f" else "<i4"
            part.update(np.ascontiguousarray(array).astype(kind, copy=False).tobytes())

    def hash(self) -> str:
        return hashlib.sha256(b"".join(part.digest() for part in self._parts)).hexdigest()
