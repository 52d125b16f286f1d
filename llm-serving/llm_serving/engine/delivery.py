"""Delivery of the results of a step to the sinks of their requests: tokens, prompt log-probabilities and vectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import PromptLogprobs
from llm_serving.core.step import Float32Array, Scores, StepOutput
from llm_serving.scheduler import Schedule


class PromptReply(NamedTuple):
    request: Request
    start: int
    logprobs: PromptLogprobs | None
    """Log-probabilities of the prompt tokens that follow position `start`."""
    vector: Float32Array | None
    error: str | None
    """Why a result cannot be given, if one cannot."""


def prompt_replies(schedule: Schedule, output: StepOutput) -> Iterator[PromptReply]:
    """What was asked of each row of a step, and what came of it."""
    num_samples, num_scores = len(output.token_ids), output.scores.top.num_results
    score = vector = 0
    for row, start, end, wants_vector, _ in schedule.prompt_results:
        request = schedule.rows[row].request
        scores = range(score, score + end - start)
        vectors = range(vector, vector + wants_vector)
        score, vector = scores.stop, vectors.stop
        results = (*(num_samples + each for each in scores), *(num_samples + num_scores + each for each in vectors))
        error = next((output.row_errors[each] for each in results if each in output.row_errors), None)
        given = bool(scores) and error is None
        yield PromptReply(
            request,
            start,
            _logprobs(request.prompt_token_ids[start + 1 : end + 1], output.scores, scores) if given else None,
            output.vectors[vectors.start] if vectors and error is None else None,
            error,
        )


def _logprobs(token_ids: list[int], scores: Scores, results: range) -> PromptLogprobs:
    """Results of one request, which names one token in each and wants as many of the most likely ones in all."""
    part = slice(results.start, results.stop)
    first, last = scores.top.offsets[[results.start, results.stop]].tolist()
    shape = len(results), (last - first) // len(results)
    return PromptLogprobs(
        np.array(token_ids, np.int32),
        scores.logprobs[part],
        scores.ranks[part],
        scores.top.token_ids[first:last].reshape(shape),
        scores.top.logprobs[first:last].reshape(shape),
    )


def deliver(schedule: Schedule, updated: list[Request], output: StepOutput) -> None:
    """Pass each result to the sink of its request.

    Args:
        schedule: The step.
        updated: What `Scheduler.update` returned of it.
        output: Its reply.
    """
    ended = _deliver_prompts(schedule, output) if schedule.prompt_results else set()
    all_are_live = len(updated) == len(schedule.rows) and not ended  # as in most steps, with many rows
    live = set() if all_are_live else set(updated) - ended
    stop = 0
    for request, _, _, samples, _ in schedule.rows:
        start, stop = stop, stop + samples
        if not samples or not (all_are_live or request in live):
            continue
        sink = request.sink
        if sink is None:
            continue
        if start in output.row_errors:
            sink.finish(FinishReason.ERROR, output.row_errors[start])
        else:
            sink.add_tokens(request, range(start, start + request.num_new_tokens), output)


def end(request: Request, reason: FinishReason, error: str | None = None) -> None:
    """Ends the answer that the request is computed for, unless it has had its last piece."""
    if request.sink is not None:
        request.sink.finish(reason, error)


def _deliver_prompts(schedule: Schedule, output: StepOutput) -> set[Request]:
    """Returns the requests that end as a result of theirs cannot be given."""
    ended = set()
    for request, start, logprobs, vector, error in prompt_replies(schedule, output):
        sink = request.sink
        if sink is None:
            continue
        if error is not None:
            sink.finish(FinishReason.ERROR, error)
            ended.add(request)
        else:
            sink.add_prompt_result(request, start, logprobs, vector)
    return ended
