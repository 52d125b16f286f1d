"""Several ranks controlled as one WorkAgent; the test plays all of them."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from llm_serving.config import load_config
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.errors import ChannelClosedError, DeadlineExceededError, ProtocolError, WorkerDiedError
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.executor.supervisor import load_settings
from llm_serving.executor.tensor_parallel import RankChannels, RankProcesses
from llm_serving.executor.worker_process import LocalProcess
from llm_serving.transport.channel import Channel
from llm_serving.transport.codec import STEP_TYPES, step_from_arrays
from llm_serving.transport.messages import (
    AgentMessage,
    Failed,
    Hello,
    Loaded,
    LoadModel,
    MasterMessage,
    Progress,
    RunStep,
    StepDone,
    StepEnding,
    StepFailed,
    Welcome,
)
from llm_serving.transport.shared_memory import SharedBuffers
from support.step_factories import sampling_input, step_input

SOON_S = 0.01


class Ranks:
    """The master's end of the channels, and the end of each rank."""

    def __init__(self, count: int = 2) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.master = RankChannels([Channel(ours, AgentMessage) for ours, _ in pairs])  # type: ignore[arg-type]
        self.agents = [Channel(theirs, MasterMessage) for _, theirs in pairs]  # type: ignore[arg-type,var-annotated]

    def all_say(self, *messages: msgspec.Struct) -> None:
        for agent, message in zip(self.agents, messages, strict=True):
            agent.send(message)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.master.close()
    for agent in ranks.agents:
        agent.close()


def done(step: int, token: int = 7, **others: Any) -> StepDone:
    return StepDone(**{"step": step, "arrays": (token.to_bytes(4, "little"), b""), "row_errors": {}, **others})


def test_rank_channels_send_each_rank_its_number(ranks: Ranks) -> None:
    ranks.master.send(Hello(14))
    assert [agent.receive(10) for agent in ranks.agents] == [Hello(14)] * 2
    settings = load_settings(load_config(None, ["cluster_config.tensor_parallel=2"]), 0)
    ranks.master.send(settings)
    received = [agent.receive(10) for agent in ranks.agents]
    loads = [each for each in received if isinstance(each, LoadModel)]
    assert [(each.rank, each.num_ranks, each.device_id) for each in loads] == [(0, 2, 0), (1, 2, 1)]


def test_only_rank_0_announces_the_end_of_a_step(ranks: Ranks) -> None:
    ranks.master.send(RunStep(0, 0, (), announce_ending=True))
    assert [agent.receive(10).announce_ending for agent in ranks.agents] == [True, False]  # type: ignore[union-attr]
    ranks.agents[1].send(StepEnding(1))
    ranks.agents[0].send(StepEnding(0))
    assert ranks.master.receive(10) == StepEnding(0)


def test_progress_of_every_rank_is_reported_at_once(ranks: Ranks) -> None:
    ranks.agents[0].send(Loaded(8, 2, ""))
    ranks.agents[1].send(Progress("reading"))
    assert ranks.master.receive(10) == Progress("rank 1: reading")
    ranks.agents[1].send(Loaded(8, 2, ""))
    assert ranks.master.receive(10) == Loaded(8, 2, "")
    ranks.agents[0].send(Progress("compiling"))
    assert ranks.master.receive(10) == Progress("compiling")


def test_a_reply_is_complete_when_the_last_rank_has_replied(ranks: Ranks) -> None:
    ranks.agents[0].send(done(0))
    with pytest.raises(DeadlineExceededError):
        ranks.master.receive(SOON_S)
    ranks.agents[0].send(done(1, 8))  # in one piece with nothing else, or with what follows
    ranks.agents[1].send(done(0))
    ranks.agents[1].send(done(1, 8))
    assert [ranks.master.receive(10) for _ in range(2)] == [done(0), done(1, 8)]


def test_a_buffer_is_kept_until_the_last_rank_has_replied(ranks: Ranks) -> None:
    buffers = SharedBuffers.create(2, 65536)
    executor = RemoteExecutor(ranks.master, buffers, SOON_S)
    for step in range(2):
        executor.submit(step_input([([3 + step], 0, [1])], step=step, sampling=sampling_input(1, position=1)))
    ranks.agents[0].send(done(0))
    with pytest.raises(WorkerDiedError, match="no reply within"):
        executor.collect()
    slow = [ranks.agents[1].receive(10) for _ in range(2)]
    for step, message in enumerate(slow):
        assert isinstance(message, RunStep)
        arrays = buffers.read(message.buffer, message.shapes, STEP_TYPES)
        assert step_from_arrays(step, arrays).token_ids.tolist() == [3 + step]
    buffers.close()


@pytest.mark.parametrize(
    "other", [done(0, 8), done(1), StepFailed(0, "?"), done(0, row_errors={0: "?"}), done(0, num_vectors=1)]
)
def test_different_replies_of_ranks_are_an_error(ranks: Ranks, other: AgentMessage) -> None:
    ranks.all_say(done(0), other)
    with pytest.raises(ProtocolError, match=r"rank 0 sent StepDone.*, rank 1 sent Step"):
        ranks.master.receive(10)


def test_ranks_must_agree_on_what_they_loaded(ranks: Ranks) -> None:
    for ours, theirs in (
        (Welcome(14, 5, "image"), Welcome(14, 6, "image")),
        (
            Loaded(8, 2, "a notice", ComputeFingerprint(kernels="program")),
            Loaded(8, 2, "", ComputeFingerprint(kernels="program")),
        ),
        (StepFailed(3, "here"), StepFailed(3, "there")),
    ):
        ranks.all_say(ours, theirs)
        assert ranks.master.receive(10) == ours
    ranks.all_say(Loaded(8, 2, ""), Loaded(9, 2, ""))
    with pytest.raises(ProtocolError, match="rank 0 sent Loaded"):
        ranks.master.receive(10)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_error_of_one_rank_fails_the_replica(ranks: Ranks, rank: int) -> None:
    ranks.agents[rank].send(Failed("no such folder"))
    assert ranks.master.receive(10) == Failed("no such folder")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_is_detected_at_once(ranks: Ranks, rank: int) -> None:
    poll = select.poll()
    poll.register(ranks.master.fileno(), select.POLLIN)
    assert not poll.poll(0)
    ranks.agents[1 - rank].send(done(0))
    ranks.agents[rank].close()
    assert poll.poll(10_000)
    with pytest.raises(ChannelClosedError):
        ranks.master.receive(10)


class SeenLate(LocalProcess):
    """A process whose exit is not observable yet, as just after its channel was closed."""

    @property
    def has_exited(self) -> bool:
        return False


def test_error_names_the_rank_that_exited_first() -> None:
    processes = RankProcesses([SeenLate(["sleep", "600"]), SeenLate(["sh", "-c", "exit 7"])])
    os.waitid(os.P_PID, processes.ranks[1].pid, os.WEXITED | os.WNOWAIT)
    processes.kill()
    processes.wait_or_kill(None)
    assert processes.exit_description == "rank 1: code 7"
