"""What a request is computed for: who gets its tokens and makes an answer of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from llm_serving.core.step import Float32Array, StepOutput

if TYPE_CHECKING:
    from llm_serving.core.request import FinishReason, Request
    from llm_serving.core.request_output import PromptLogprobs


class Receiver(Protocol):
    """One for each answer, carried by every request that is computed for it; scheduler and WorkAgent never look at it.

    It belongs to the engine's thread. It tells somebody each piece of the answer as it comes, the last one once.
    """

    @property
    def request(self) -> Request:
        """What was asked. The scheduler knows it only where it is among `computed`."""

    @property
    def computed(self) -> Sequence[Request]:
        """What the scheduler computes for the answer at present."""

    def begin(self) -> None:
        """Has the scheduler queue what is to be computed first."""

    def take(self, request: Request, samples: range, output: StepOutput) -> None:
        """A step has chosen tokens for one of `computed`: those that `output` has for these samples."""

    def take_prompt(
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

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends the answer wherever it is; its blocks are free at once. One that has ended is left alone."""

    def reprioritise(self, priority: int) -> bool:
        """Gives all that is computed another priority, or changes nothing; returns whether it has it now."""
