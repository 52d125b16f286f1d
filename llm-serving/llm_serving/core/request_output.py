"""What a client is told about its request, piece by piece.

What a request is computed for: who gets its tokens and makes an answer of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from llm_serving.core.request import FinishReason
from llm_serving.core.step import Float32Array, Int32Array, StepOutput

if TYPE_CHECKING:
    from llm_serving.core.request import FinishReason, Request


PIECE_BYTES, TOKEN_BYTES, ALTERNATIVE_BYTES = 300, 150, 80
"""Of memory that Python takes for a piece, for a token's log-probability, and for each likely token beside it."""
FAILURES: Final = frozenset({FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.UNAVAILABLE})


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token and the likeliest tokens at its place."""

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...]
    """Most likely first."""
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of P tokens of a prompt that follow one another, each given all before it."""

    token_ids: Int32Array  # [P]
    logprobs: Float32Array  # [P]
    ranks: Int32Array  # [P], 1 for the most likely token
    top_token_ids: Int32Array  # [P, K], most likely first
    top_logprobs: Float32Array  # [P, K]

    def __len__(self) -> int:
        return len(self.token_ids)

    def starting_at(self, start: int) -> PromptLogprobs:
        """Those behind the first `start`."""
        return self if start == 0 else PromptLogprobs(*(getattr(self, each.name)[start:] for each in fields(self)))

    def tokens(self, count: int) -> list[TokenLogprobs]:
        """Each with `count` of its most likely tokens, as far as they are known."""
        top_ids, top_logprobs = self.top_token_ids[:, :count].tolist(), self.top_logprobs[:, :count].tolist()
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), top_ids, top_logprobs, strict=True)
        return [TokenLogprobs(token_id, logprob, tuple(ids), tuple(values)) for token_id, logprob, ids, values in rows]

    @classmethod
    def concatenate(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
        """Those of one prompt, in order; None of none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))


@dataclass(slots=True)  # not frozen: one is made for each token, and that would cost four times as much
class RequestOutput:
    """What one step added to a request. Joined in order, the pieces are the whole answer. Nobody changes one."""

    request_id: str
    text: str
    """New text; empty while a character or a possible stop string is incomplete."""
    token_ids: tuple[int, ...]
    """New token ids, also those whose text is still held back. The token that ended the output is included."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each of `token_ids` where the request asked for them, otherwise empty."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_output_tokens: int
    """Tokens generated so far."""
    finish_reason: FinishReason | None = None
    """None until the last piece."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the output; None for the model's end of sequence."""
    error: str | None = None
    """Set when it `failed`."""
    queued_s: float = 0.0
    """Seconds from arrival to first being scheduled."""
    prompt_logprobs: PromptLogprobs | None = None
    """Of the next tokens of the prompt, where the request asked for them; the first one has none."""
    vector: Float32Array | None = None
    """[hidden size], in the last piece of a request that asked for it: the last hidden state of its prompt."""
    beams: tuple[RequestOutput, ...] = ()
    """Only in the last piece of a beam search: its answers, each as one piece, best first. This piece is the best."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        size = PIECE_BYTES + len(self.text)
        size += sum(TOKEN_BYTES + ALTERNATIVE_BYTES * len(each.top_token_ids) for each in self.logprobs)
        if (of_prompt := self.prompt_logprobs) is not None:
            size += sum(getattr(of_prompt, each.name).nbytes for each in fields(of_prompt))
        return size

    @property
    def failed(self) -> bool:
        """Whether this is all there will be, and not an answer."""
        return self.finish_reason in FAILURES


def join_pieces(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """The pieces of one answer as a single output."""
    last = pieces[-1]
    of_prompt = [each for piece in pieces if (each := piece.prompt_logprobs) is not None]
    return RequestOutput(
        request_id=last.request_id,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprobs for piece in pieces for logprobs in piece.logprobs),
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_output_tokens=last.num_output_tokens,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        queued_s=last.queued_s,
        prompt_logprobs=PromptLogprobs.concatenate(of_prompt),
        vector=last.vector,
        beams=last.beams,
    )


class OutputSink(Protocol):
    """One for each answer, carried by every request that is computed for it; scheduler and WorkAgent never look at it.

    It belongs to the engine's thread. It tells somebody each piece of the answer as it comes, the last one once.
    """

    @property
    def request(self) -> Request:
        """What was asked. The scheduler knows it only where it is among `computed`."""

    @property
    def active_requests(self) -> Sequence[Request]:
        """What the scheduler computes for the answer at present."""

    def start(self) -> None:
        """Has the scheduler queue what is to be computed first."""

    def add_tokens(self, request: Request, samples: range, output: StepOutput) -> None:
        """A step has chosen tokens for one of `computed`: those that `output` has for these samples."""

    def add_prompt_result(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        """A step tells something of the prompt of one of `computed`, or just that all of it has been computed.

        Whoever has lost what it had computed may be told again what it has been told.

        Args:
            request: One of `computed`; it may have ended.
            start: A token of its prompt.
            logprobs: Of the tokens that follow those from `start` on.
            vector: The last hidden state of the prompt.
        """

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends the answer wherever it is; its blocks are free at once. One that has ended is left alone."""

    def set_priority(self, priority: int) -> bool:
        """Gives all that is computed another priority, or changes nothing; returns whether it has it now."""
