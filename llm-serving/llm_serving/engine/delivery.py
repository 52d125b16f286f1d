"""The results of a step go to those they were computed for."""

from __future__ import annotations

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.step import StepOutput
from llm_serving.engine.prompt_replies import prompt_replies
from llm_serving.scheduler import Schedule


def deliver(schedule: Schedule, updated: list[Request], output: StepOutput) -> None:
    """Gives each result to the receiver of its request.

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
        receiver = request.receiver
        if receiver is None:
            continue
        if start in output.row_errors:
            receiver.end(FinishReason.ERROR, output.row_errors[start])
        else:
            receiver.take(request, range(start, start + request.num_new_tokens), output)


def end(request: Request, reason: FinishReason, error: str | None = None) -> None:
    """Ends the answer that the request is computed for, unless it has had its last piece."""
    if request.receiver is not None:
        request.receiver.end(reason, error)


def _deliver_prompts(schedule: Schedule, output: StepOutput) -> set[Request]:
    """Returns the requests that end as a result of theirs cannot be given."""
    ended = set()
    for request, start, logprobs, vector, error in prompt_replies(schedule, output):
        receiver = request.receiver
        if receiver is None:
            continue
        if error is not None:
            receiver.end(FinishReason.ERROR, error)
            ended.add(request)
        else:
            receiver.take_prompt(request, start, logprobs, vector)
    return ended
