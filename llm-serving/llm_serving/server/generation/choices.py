"""Selects a response's choices from the generated sequences: samples, the best of several samples, or beams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from msgspec.structs import replace

from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.core.sampling_params import BeamSearchParams, Whole

MAX_N: Final = 128
MAX_CHOICES: Final = 512
"""Maximum number of sequences of one HTTP request: prompts times `best_of`."""
COUNT: Final = Whole(1, MAX_N)


class Choices(NamedTuple):
    n: int = 1
    best_of: int = 1
    """Number of sequences generated for each prompt; at least `n`."""
    beams: BeamSearchParams | None = None
    """Parameters of a beam search of width `best_of`; None: sequences are sampled."""

    @property
    def counted_by(self) -> str:
        return "best_of" if self.best_of > self.n else "n"


ONE_CHOICE: Final = Choices()


class ChoiceOutput(NamedTuple):
    choice: int
    """Index of the prompt times `n`, plus index of the choice for that prompt."""
    output: RequestOutput


async def select_best(
    outputs: AsyncIterator[ChoiceOutput], choices: Choices, *, with_logprobs: bool
) -> AsyncIterator[ChoiceOutput]:
    """For each prompt, yield the `n` of `best_of` sequences with the highest mean logprob per token, best first."""
    by_sequence: dict[int, list[RequestOutput]] = {}
    async for index, output in outputs:
        if output.failed:
            yield ChoiceOutput(index // choices.best_of * choices.n, output)
        by_sequence.setdefault(index, []).append(output)
    whole, means = [], []
    for index in sorted(by_sequence):
        whole.append(join_pieces(by_sequence[index]))
        logprobs = whole[-1].logprobs
        means.append(sum(token.logprob for token in logprobs) / max(len(logprobs), 1))
        await asyncio.sleep(0)  # a sequence may have thousands of outputs: let other requests run
    for start in range(0, len(whole), choices.best_of):
        prompt_logprobs = whole[start].prompt_logprobs
        ranked = sorted(range(start, start + choices.best_of), key=lambda index: -means[index])
        for rank, output in enumerate([whole[index] for index in ranked[: choices.n]]):
            selected = replace(
                output,
                logprobs=output.logprobs if with_logprobs else (),
                prompt_logprobs=None if rank else prompt_logprobs,
            )
            yield ChoiceOutput(start // choices.best_of * choices.n + rank, selected)


async def select_beams(outputs: AsyncIterator[ChoiceOutput], choices: Choices) -> AsyncIterator[ChoiceOutput]:
    """Yield the `n` best sequences of each prompt's beam search, best first. `outputs`: one for each prompt."""
    async for prompt, output in outputs:
        if output.finished:
            for rank, beam in enumerate(output.beams or (output,)):  # a failed search has no beams
                yield ChoiceOutput(prompt * choices.n + rank, beam)
