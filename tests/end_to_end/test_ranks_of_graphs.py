"""Two processes whose graphs use MindSpore's collectives as on Ascend, with MCCL in place of HCCL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from families import models
from families.test_exactness import write_tokenizer
from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.executor.tensor_parallel import RankProcesses
from support.engine_harness import bytes_of
from support.real_replica import RealReplica

pytestmark = pytest.mark.end_to_end

NAME = "qwen3"
ONE_LAYER = {"num_hidden_layers": 1}
"""Has four sums: of embeddings, attention, products and the head. MindSpore compiles a layer for seconds."""
SETTINGS = (
    "cluster_config.tensor_parallel=2",
    "pa_config.num_blocks=24",
    "scheduler_config.max_prefill_tokens=64",
    "model_config.decode_batch_size=4",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    models.write(NAME, folder, changes=ONE_LAYER)
    write_tokenizer(folder, models.model(NAME).config["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def by_programs(folder: Path) -> list[str]:
    replica = RealReplica(*SETTINGS, model=folder)
    try:
        return answers(replica)
    finally:
        replica.close()


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[RealReplica]:
    replica = RealReplica(*SETTINGS, "device_config.kernels=primitives", model=folder)
    members = processes(replica)
    try:
        yield replica
        members += processes(replica)
    finally:
        replica.close()
    psutil.wait_procs(members, timeout=60)
    assert not any(process.is_running() for process in members)


def processes(replica: RealReplica) -> list[psutil.Process]:
    """Return both ranks, and the scheduler process through which they found each other."""
    group = replica.agents[-1].process
    assert isinstance(group, RankProcesses)
    ranks = [psutil.Process(process.pid) for process in group.ranks]
    return [*ranks, *ranks[0].children()]


def requests() -> list[Request]:
    """Return requests in chunks, in one step, and sampled ones."""
    prompts = models.golden(NAME).prompts
    prompt = prompts[max(prompts)].token_ids.tolist()
    sampling = SamplingParams(max_tokens=16, temperature=0.0, logprobs=2)
    sampled = SamplingParams(max_tokens=16, temperature=0.9, seed=7)
    return [Request(f"r{length}", prompt[:length], sampling if length > 20 else sampled) for length in (150, 40, 9)]


def answers(replica: RealReplica) -> list[str]:
    return [bytes_of(each) for each in replica.answer(requests())]


def test_graph_ranks_give_the_bits_of_program_ranks(replica: RealReplica, by_programs: list[str]) -> None:
    assert [bytes_of(replica.answer([each])[0]) for each in requests()] == by_programs
    assert answers(replica) == by_programs


def test_graph_ranks_are_all_restarted_when_one_dies(replica: RealReplica, by_programs: list[str]) -> None:
    first, second, scheduler = processes(replica)
    replica.begin(requests())
    os.kill(second.pid, signal.SIGKILL)
    assert [bytes_of(each) for each in replica.finish(requests())] == by_programs
    assert replica.num_restarts == 1
    psutil.wait_procs([first, scheduler], timeout=60)
    assert not first.is_running()
    assert not scheduler.is_running()
