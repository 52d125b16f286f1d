"""The output of a request, in pieces, and the interface that turns sampled tokens into a client's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from msgspec import Struct, structs

from llm_serving.core.request import FinishReason
from llm_serving.core.step import Float32Array, Int32Array, StepOutput

if TYPE_CHECKING:
    from llm_serving.core.request import FinishReason, Request


PIECE_BYTES, TOKEN_BYTES, ALTERNATIVE_BYTES = 300, 150, 80
"""Estimated bytes of a piece, of the log-probability of a token, and of each alternative token."""
FAILURES: Final = frozenset({FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.UNAVAILABLE})


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of P consecutive tokens of a prompt, each given all tokens before it."""

    token_ids: Int32Array  # [P]
    logprobs: Float32Array  # [P]
    ranks: Int32Array  # [P], 1 for the most likely token
    top_token_ids: Int32Array  # [P, K], most likely first
    top_logprobs: Float32Array  # [P, K]

    def __len__(self) -> int:
        return len(self.token_ids)

    def starting_at(self, start: int) -> PromptLogprobs:
        return self if start == 0 else PromptLogprobs(*(getattr(self, each.name)[start:] for each in fields(self)))

    def tokens(self, count: int) -> list[TokenLogprobs]:
        top_ids, top_logprobs = self.top_token_ids[:, :count].tolist(), self.top_logprobs[:, :count].tolist()
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), top_ids, top_logprobs, strict=True)
        return [TokenLogprobs(token_id, logprob, tuple(ids), tuple(values)) for token_id, logprob, ids, values in rows]

    @classmethod
    def concatenate(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
        if len(parts) < 2:
            return parts[0] if parts else None
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))


class RequestOutput(Struct, gc=False):  # one is created for each token: a dataclass would take seven times as long
    """The output that one step added to a request. Treat it as immutable."""

    request_id: str
    text: str
    """New text. Text is held back while a character is incomplete, or the text may become a stop string."""
    token_ids: tuple[int, ...]
    """New token ids, including the one that ended the output, and those whose text is held back."""
    logprobs: tuple[TokenLogprobs, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    queued_s: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    vector: Float32Array | None = None
    """Hidden state of the last prompt token, [hidden size], in the last piece."""
    beams: tuple[RequestOutput, ...] = ()
    """All answers of a beam search, best first. Only the last piece of the best answer has them."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_bytes(self) -> int:
        size = PIECE_BYTES + len(self.text)
        if self.logprobs:
            size += sum(TOKEN_BYTES + ALTERNATIVE_BYTES * len(each.top_token_ids) for each in self.logprobs)
        if (of_prompt := self.prompt_logprobs) is not None:
            size += sum(getattr(of_prompt, each.name).nbytes for each in fields(of_prompt))
        if self.beams:
            size += sum(each.num_bytes for each in self.beams)
        return size if self.vector is None else size + self.vector.nbytes

    @property
    def failed(self) -> bool:
        return self.finish_reason in FAILURES


def join_pieces(pieces: Sequence[RequestOutput]) -> RequestOutput:
    of_prompt = [each for piece in pieces if (each := piece.prompt_logprobs) is not None]
    return structs.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprobs for piece in pieces for logprobs in piece.logprobs),
        prompt_logprobs=PromptLogprobs.concatenate(of_prompt),
    )


class OutputSink(Protocol):
    """Makes a client's answer from results of the requests that compute it. Only the engine's thread may call it."""

    @property
    def request(self) -> Request:
        """The client's request. The scheduler may not know it, as in a beam search."""

    @property
    def active_requests(self) -> Sequence[Request]:
        """The requests that the scheduler computes now for the answer."""

    def start(self) -> None: ...

    def add_tokens(self, request: Request, samples: range, output: StepOutput) -> None:
        """Record the tokens that a step sampled for an active request. `samples`: their indices in `output`."""

    def add_prompt_result(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        """Record results for prompt tokens from index `start` on. If `logprobs` and `vector` are None, record only that
        the prompt is done. The request may have finished. A recomputation may record the same results again.
        """

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Finish the answer and free its blocks at once. Do nothing if it has finished."""

    def set_priority(self, priority: int) -> bool:
        """Change the priority of all active requests, or of none. Return whether it was changed."""
