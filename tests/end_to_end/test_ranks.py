"""Two real WorkAgents that compute one replica together: answers are equal alone, preempted and after kills."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.executor.cluster.placement import ClusterPlacement
from llm_serving.executor.tensor_parallel import RankProcesses
from llm_serving.transport.tls_identity import ClusterIdentity
from support.engine_harness import bytes_of
from support.fake_ray_actor import ActorStarter
from support.real_replica import RealReplica

pytestmark = pytest.mark.end_to_end

SETTINGS = (
    "cluster_config.tensor_parallel=2",
    "pa_config.num_blocks=20",
    "scheduler_config.max_prefill_tokens=32",
    "scheduler_config.speculative_method=none",
    "model_config.decode_batch_size=8",
)
UNKNOWN_TOKEN = 1_000_000


@pytest.fixture(scope="module")
def replica() -> Iterator[RealReplica]:
    replica = RealReplica(*SETTINGS)
    try:
        yield replica
    finally:
        replica.close()
    assert not any(psutil.pid_exists(process.pid) for each in replica.agents for process in processes(each.process))


def processes(process: object) -> list[psutil.Process]:
    assert isinstance(process, RankProcesses)
    return list(process.ranks)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(replica: RealReplica) -> list[str]:
    return [bytes_of(replica.answer([request])[0]) for request in requests(replica)]


def requests(replica: RealReplica) -> list[Request]:
    """Return greedy and sampled requests, some in chunks, some with prompt logprobs."""
    texts = ("Count from 1 to 9.", "Name the days of the week.", "Repeat the word stone after me. " * 8)
    return [
        Request(
            f"r{index}",
            replica.tokenizer.encode(texts[index % 3]),
            SamplingParams(
                max_tokens=30,
                temperature=0.9 * (index % 2),
                seed=index,
                logprobs=2,
                prompt_logprobs=1 if index == 4 else None,
                ignore_eos=True,
            ),
        )
        for index in range(6)
    ]


def test_ranks_keep_the_answer_of_a_preempted_request(replica: RealReplica, reference: list[str]) -> None:
    crowd = requests(replica)
    assert [bytes_of(each) for each in replica.answer(crowd)] == reference
    assert any(request.num_preemptions for request in crowd)


def test_failed_step_fails_on_all_ranks_and_the_next_one_succeeds(replica: RealReplica, reference: list[str]) -> None:
    failing = Request("failing", [5, UNKNOWN_TOKEN, 6], SamplingParams(max_tokens=4))
    restarts = replica.num_restarts
    *others, failed = replica.answer([*requests(replica), failing])
    assert [bytes_of(each) for each in others] == reference
    assert failed.finish_reason is FinishReason.ERROR
    assert replica.num_restarts == restarts


@pytest.mark.parametrize("rank", [0, 1])
def test_answer_survives_the_death_of_either_rank(replica: RealReplica, reference: list[str], rank: int) -> None:
    restarts = replica.num_restarts
    replica.begin(requests(replica))
    os.kill(processes(replica.agents[-1].process)[rank].pid, signal.SIGKILL)
    assert [bytes_of(each) for each in replica.finish(requests(replica))] == reference
    assert replica.num_restarts == restarts + 1


def test_ranks_on_a_cluster_machine_give_the_same_bytes_and_die_together(reference: list[str], tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.touch(mode=0o600)
    secret_file.write_text(secrets.token_hex(32))
    starter = ActorStarter(secret_file)
    placement = ClusterPlacement("127.0.0.1", ClusterIdentity(secret_file.read_text()), starter, num_threads=1)
    with contextlib.closing(placement), contextlib.closing(RealReplica(*SETTINGS, placement=placement)) as replica:
        lost = starter.ranks()
        replica.begin(requests(replica))
        lost[1].kill()
        assert [bytes_of(each) for each in replica.finish(requests(replica))] == reference
        assert replica.num_restarts == 1
        assert not psutil.wait_procs(lost, timeout=60)[1]
