"""An exception in a step of a real WorkAgent ends the request that caused it; other requests get their reference
answers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import support.raising_work_agent
from llm_serving.core.process import command_of
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.executor.worker_process import LocalProcess
from support.factories import create_request
from support.raising_work_agent import POISON
from support.real_replica import RealReplica

pytestmark = pytest.mark.end_to_end

SETTINGS = ("scheduler_config.max_prefill_tokens=32", "model_config.decode_batch_size=16")
UNKNOWN_TOKEN = 1_000_000
"""A token id above the vocabulary; admission control, which would refuse it, is not part of a `RealReplica`."""


@pytest.fixture(scope="module")
def replica() -> Iterator[RealReplica]:
    """Yield a replica with the shipping WorkAgent, which raises after computing a step with the token."""

    def start_the_other(command: list[str], **options: Any) -> LocalProcess:
        shipping = command_of("llm_serving.work_agent")
        assert command[: len(shipping)] == shipping
        return LocalProcess([sys.executable, support.raising_work_agent.__file__, *command[len(shipping) :]], **options)

    replica = RealReplica(*SETTINGS, process=start_the_other)
    try:
        yield replica
    finally:
        replica.close()
    assert not any(psutil.pid_exists(agent.process.pid) for agent in replica.agents)


def other_requests(replica: RealReplica) -> list[Request]:
    """Return requests that are greedy, sampled, in chunks, a fork of a prompt, and a beam search."""
    texts = ("Count from 1 to 9.", "Name the days of the week.", "Repeat the word stone after me. " * 8)
    requests = [
        create_request(max_tokens=40, temperature=0.9 * (index % 2), seed=index, logprobs=2, ignore_eos=True)
        for index in range(5)
    ]
    for index, request in enumerate(requests):
        request.prompt_token_ids = replica.tokenizer.encode(texts[index % 3])
    fork, search = requests[3:]
    fork.prompt_token_ids, fork.fork_of = requests[0].prompt_token_ids, requests[0].request_id
    search.beam_search = BeamSearchParams(width=3, num_returned=3)
    return requests


def bytes_of(output: RequestOutput) -> Any:
    parts = output.beams or (output,)
    return [(part.text, part.token_ids, part.logprobs, part.finish_reason) for part in parts]


def failing_request(token_id: int, position: int) -> Request:
    """Return a request of three chunks whose second or third chunk has the token."""
    request = create_request(80, max_tokens=40)
    request.prompt_token_ids[position] = token_id
    return request


@pytest.fixture(scope="module")
def reference(replica: RealReplica) -> list[Any]:
    return [bytes_of(replica.answer([each])[0]) for each in other_requests(replica)]


@pytest.mark.parametrize("position", [40, 70])
@pytest.mark.parametrize(
    ("token_id", "error"),
    [
        (UNKNOWN_TOKEN, "WorkerError: token_ids must be below"),
        (POISON, "FloatingPointError: poison"),
    ],
    ids=["refused", "computed"],
)
def test_step_exception_ends_only_the_request_that_caused_it(
    replica: RealReplica, reference: list[Any], token_id: int, error: str, position: int
) -> None:
    failing, others = failing_request(token_id, position), other_requests(replica)
    failed, *answers = replica.answer([failing, *others])
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None and failed.error.startswith(error)
    assert failed.token_ids == ()
    assert [bytes_of(answer) for answer in answers] == reference
    assert replica.num_restarts == 0, "the process lives on"
    assert replica.engine.scheduler.blocks.pool.num_used_blocks == 0


@pytest.mark.parametrize("token_id", [UNKNOWN_TOKEN, POISON], ids=["refused", "computed"])
def test_step_exceptions_end_only_the_two_requests_that_caused_them(
    replica: RealReplica, reference: list[Any], token_id: int
) -> None:
    first, *others, last = replica.answer(
        [failing_request(token_id, 3), *other_requests(replica), failing_request(token_id, 79)]
    )
    assert first.finish_reason is last.finish_reason is FinishReason.ERROR
    assert [bytes_of(output) for output in others] == reference
