"""Answers that are known only when everything has been generated: the best of several, and those of a beam search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import NamedTuple

from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.server.choices import Choices


class ChoiceOutput(NamedTuple):
    choice: int
    """Index of the prompt times n, plus the choice of that prompt."""
    output: RequestOutput


async def select_best(
    pieces: AsyncIterator[ChoiceOutput], choices: Choices, *, with_logprobs: bool
) -> AsyncIterator[ChoiceOutput]:
    """Of `best_of` sequences of each prompt the `n` with the highest mean log-probability a token, best first.

    Among equals the earlier sequence comes first. An error is passed on at once.

    Args:
        pieces: With log-probabilities; numbered by prompt times `best_of`.
        choices: How many of how many.
        with_logprobs: Whether the client wants them too.
    """
    by_sequence: dict[int, list[RequestOutput]] = {}
    async for index, output in pieces:
        if output.failed:
            yield ChoiceOutput(index // choices.best_of * choices.n, output)
        by_sequence.setdefault(index, []).append(output)
    whole, means = [], []
    for index in sorted(by_sequence):
        whole.append(join_pieces(by_sequence[index]))
        means.append(_mean_logprob(whole[-1]))
        await asyncio.sleep(0)  # thousands of pieces each: others are served meanwhile
    for start in range(0, len(whole), choices.best_of):
        of_prompt = whole[start].prompt_logprobs
        ranked = sorted(range(start, start + choices.best_of), key=lambda index: -means[index])
        for place, output in enumerate([whole[index] for index in ranked[: choices.n]]):
            logprobs = output.logprobs if with_logprobs else ()
            answer = replace(output, logprobs=logprobs, prompt_logprobs=None if place else of_prompt)
            yield ChoiceOutput(start // choices.best_of * choices.n + place, answer)


async def select_beams(pieces: AsyncIterator[ChoiceOutput], choices: Choices) -> AsyncIterator[ChoiceOutput]:
    """The answers of one beam search a prompt, best first.

    Args:
        pieces: Numbered by prompt.
        choices: `n` answers each.
    """
    async for prompt, output in pieces:
        if output.finished:
            for place, answer in enumerate(output.beams or (output,)):  # none when it failed
                yield ChoiceOutput(prompt * choices.n + place, answer)


def _mean_logprob(output: RequestOutput) -> float:
    return sum(token.logprob for token in output.logprobs) / max(len(output.logprobs), 1)
