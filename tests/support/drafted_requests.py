"""Requests for tests of speculative decoding, whose output the tests choose."""

from __future__ import annotations

from llm_serving.core.request import RequestStatus
from llm_serving.speculation import SpeculationController
from support.factories import create_request

AGAIN = [1, 2, 3, 4, 5, 6, 7, 8]


def predictable(controller: SpeculationController, *, rounds: int = 2, **options):
    """Return a decoding request whose output repeats the same eight tokens."""
    request = create_request(4, **{"max_tokens": 200, **options})
    request.status = RequestStatus.RUNNING
    controller.add_request(request)
    answer(controller, request, AGAIN * rounds)
    return request


def answer(controller: SpeculationController, request, token_ids, num_rows: int = 1) -> None:
    for token_id in token_ids:
        request.output_token_ids.append(token_id)
        request.num_computed_tokens = request.num_tokens - 1
        controller.record_step([], num_rows)


def repeating_requests(controller: SpeculationController, count: int, num_new: int = 30) -> list:
    requests = [create_request(4, max_tokens=200) for _ in range(count)]
    for request in requests:
        request.status = RequestStatus.RUNNING
        controller.add_request(request)
    for token_id in [*range(500, 500 + num_new), *AGAIN * 6]:
        for request in requests:
            request.output_token_ids.append(token_id)
            request.num_computed_tokens = request.num_tokens - 1
        controller.record_step([], len(requests))
    return requests


def costly(controller: SpeculationController, num_rows: int, step_s: float) -> None:
    """Record steps whose duration is proportional to their tokens."""
    for num_tokens in (num_rows // 2, num_rows):
        controller.gain.record_step(num_tokens, step_s * num_tokens / num_rows, 0.0)
