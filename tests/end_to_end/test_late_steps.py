"""Late scheduling: steps are scheduled when a real WorkAgent announces that the previous one is about to end."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from llm_serving.core.request import Request
from llm_serving.engine import engine
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.transport.messages import AgentMessage, StepDone, StepEnding
from support.factories import create_request
from support.real_replica import RealReplica

pytestmark = pytest.mark.end_to_end

NUM_REQUESTS = 6


def requests() -> list[Request]:
    return [
        create_request(5 + 9 * index, max_tokens=30, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
        for index in range(NUM_REQUESTS)
    ]


def test_late_scheduling_keeps_answers_and_every_step_announces_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SHORT_STEP_S", 0.0)
    replica = RealReplica(
        "scheduler_config.max_prefill_tokens=32",
        "scheduler_config.speculative_method=none",
        "model_config.decode_batch_size=16",
    )
    received: list[AgentMessage] = []
    early: list[AgentMessage] = []
    receive = replica.executor._channel.receive

    def listen(timeout_s: float | None = None) -> AgentMessage:
        received.append(message := receive(timeout_s))
        if isinstance(message, StepEnding) and replica.executor.next_step != message.step + 1:
            early.append(message)
        return message

    try:
        with patch.object(RemoteExecutor, "await_ending", lambda self: None):
            reference = [replica.answer([each])[0].token_ids for each in requests()]
        monkeypatch.setattr(replica.executor._channel, "receive", listen)
        assert [answer.token_ids for answer in replica.answer(requests())] == reference
    finally:
        replica.close()
    ended = [message.step for message in received if isinstance(message, StepDone)]
    assert [(type(message), message.step) for message in received] == [  # type: ignore[union-attr]
        (kind, step) for step in ended for kind in (StepEnding, StepDone)
    ]
    assert len(ended) >= 30
    assert early == [], "the next step was formed before"
