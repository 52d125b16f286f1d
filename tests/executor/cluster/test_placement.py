"""WorkAgents that connect over the network. They are processes of this machine with a fake model."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import support.fake_work_agent
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.cluster import ClusterConfig
from llm_serving.config.sections.device import CacheConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.errors import ConfigError, ModelError, ProtocolError, WorkerDiedError
from llm_serving.executor import supervisor
from llm_serving.executor.cluster.placement import ClusterPlacement
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.executor.supervisor import SupervisedExecutor, WorkAgentProcess, start_work_agent
from llm_serving.executor.worker_process import LocalProcess, StartCancellation
from llm_serving.models.weight_reader import weight_fingerprint
from llm_serving.transport.messages import BlockContents, Loaded, StepDone
from llm_serving.transport.shared_memory import InlineArrays
from llm_serving.transport.tls_identity import ClusterIdentity
from llm_serving.work_agent import connect_to_master
from support.fake_ray_actor import ActorStarter
from support.fake_runner import expected_output
from support.step_factories import sampling_input, step_input

TESTS = Path(__file__).parents[2]
PROMPT = [5, 6, 7]


class ProcessStarter:
    """A starter whose cluster is this machine."""

    def __init__(self, secret_file: Path) -> None:
        self.secret_file = secret_file
        self.program = support.fake_work_agent.__file__
        self.processes: list[LocalProcess] = []
        self.is_closed = False

    def start(self, index: int, ranks: Sequence[Sequence[str]]) -> LocalProcess:
        (arguments,) = ranks
        path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        command = [sys.executable, self.program, "-m", "llm_serving.work_agent", *arguments]
        process = LocalProcess(
            [*command, "--secret-file", str(self.secret_file)],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        self.is_closed = True


def write_secret(path: Path) -> None:
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[ProcessStarter]:
    secret_file = tmp_path / "secret"
    write_secret(secret_file)
    starter = ProcessStarter(secret_file)
    yield starter
    for process in starter.processes:
        process.kill()
        process.communicate()


@pytest.fixture
def placement(starter: ProcessStarter) -> Iterator[ClusterPlacement]:
    identity = ClusterIdentity(starter.secret_file.read_text())
    placement = ClusterPlacement("127.0.0.1", identity, starter, num_threads=3)
    yield placement
    placement.close()
    assert starter.is_closed


def a_config(num_blocks: int | None = None) -> ServingConfig:
    return ServingConfig(
        model=ModelConfig(model_path=DEMO_FOLDER, max_generate_length=64, decode_batch_size=4),
        scheduler=SchedulerConfig(max_prefill_tokens=64),
        pa=CacheConfig(num_blocks=num_blocks, num_swap_blocks=5),
    )


def start(placement: ClusterPlacement, num_blocks: int | None = None) -> WorkAgentProcess:
    return start_work_agent(a_config(num_blocks), 0, lambda text: None, placement=placement)


def answer(executor: RemoteExecutor | SupervisedExecutor, step: int) -> list[int]:
    executor.submit(step_input([(PROMPT, 0, [1])], step=step, sampling=sampling_input(1, position=3)))
    tokens: list[int] = executor.collect().token_ids.tolist()
    return tokens


def test_a_remote_work_agent_loads_serves_and_exits(placement: ClusterPlacement, starter: ProcessStarter) -> None:
    agent = start(placement)
    assert isinstance(agent.buffers, InlineArrays)
    assert agent.machine == "127.0.0.1"
    assert agent.loaded.model == weight_fingerprint(DEMO_FOLDER)
    executor = RemoteExecutor(agent.channel, agent.buffers)
    assert [answer(executor, step) for step in range(3)] == [expected_output(PROMPT, 1)] * 3
    agent.stop()
    assert starter.processes[0].returncode == 0


def test_a_restarted_work_agent_uses_a_new_connection(placement: ClusterPlacement, starter: ProcessStarter) -> None:
    def again(previous: Loaded | None, timeout_s: float | None) -> WorkAgentProcess:
        return start_work_agent(a_config(), 0, lambda text: None, previous, timeout_s, placement=placement)

    executor = SupervisedExecutor(again, 30.0, 5, pause=lambda delay_s: False)
    assert answer(executor, 0) == expected_output(PROMPT, 1)
    starter.processes[0].kill()
    with pytest.raises(WorkerDiedError):
        answer(executor, 1)
    executor.restart("killed")
    assert answer(executor, 0) == expected_output(PROMPT, 1)
    executor.close()


@pytest.fixture
def of_ranks(tmp_path: Path) -> ActorStarter:
    """Return a starter of actors, each of which runs the fake WorkAgents of all ranks."""
    secret_file = tmp_path / "secret"
    write_secret(secret_file)
    program = tmp_path / "program"
    command = shlex.join([sys.executable, support.fake_work_agent.__file__])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
    return ActorStarter(secret_file, str(program))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_a_connection_and_all_are_lost_together(of_ranks: ActorStarter, rank: int) -> None:
    identity = ClusterIdentity(of_ranks.secret_file.read_text())
    config = replace(a_config(), cluster=ClusterConfig(engine="ray", tensor_parallel=2))

    def again(previous: Loaded | None, timeout_s: float | None) -> WorkAgentProcess:
        return start_work_agent(config, 0, lambda text: None, previous, timeout_s, placement=placement)

    with contextlib.closing(ClusterPlacement("127.0.0.1", identity, of_ranks)) as placement:
        executor = SupervisedExecutor(again, 30.0, 5, pause=lambda delay_s: False)
        assert executor.machine == "127.0.0.1"
        assert [answer(executor, step) for step in range(3)] == [expected_output(PROMPT, 1)] * 3
        lost = of_ranks.ranks()
        lost[rank].kill()
        with pytest.raises(WorkerDiedError):
            answer(executor, 3)
        executor.restart("killed")
        assert answer(executor, 0) == expected_output(PROMPT, 1)
        executor.close()
        assert not psutil.wait_procs(lost, timeout=60)[1]
        assert of_ranks.actors[-1].wait() == 1, "it returns how its ranks ended"


def test_work_agent_exits_when_its_block_connection_is_lost(
    placement: ClusterPlacement, starter: ProcessStarter
) -> None:
    config = replace(a_config(), cluster=ClusterConfig(replicas=2, roles=("prefill", "decode"), num_transfer_blocks=4))
    agent = start_work_agent(config, 0, lambda text: None, placement=placement)
    assert agent.block_link is not None
    blocks = BlockContents([2, 7], [5, 6], [4, 3], bytes(range(32)))
    agent.block_link.write([blocks])
    assert list(agent.block_link.read([[(2, 5), (7, 6)]])) == [blocks]
    executor = RemoteExecutor(agent.channel, agent.buffers)
    assert answer(executor, 0) == expected_output(PROMPT, 1)
    agent.block_link.close()
    with pytest.raises(WorkerDiedError):  # whether it notices or not
        answer(executor, 1)
    assert starter.processes[0].wait() == 0
    agent.kill()


def test_no_block_connection_without_block_transfer(placement: ClusterPlacement) -> None:
    agent = start(placement)
    assert agent.block_link is None
    agent.stop()


def test_a_load_error_is_reported(placement: ClusterPlacement) -> None:
    with pytest.raises(ModelError, match=r"pa_config\.num_blocks: must be at least 2\. Given: 1"):
        start(placement, num_blocks=1)


def test_an_exit_before_the_connection_is_reported_with_its_code(
    placement: ClusterPlacement, starter: ProcessStarter, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(7)")
    starter.program = str(program)
    with pytest.raises(WorkerDiedError, match=r"WorkAgent 0 exited \(code 7\) before it was ready"):
        start(placement)


def test_a_work_agent_with_another_secret_is_rejected(
    placement: ClusterPlacement, starter: ProcessStarter, tmp_path: Path
) -> None:
    starter.secret_file = tmp_path / "other"
    write_secret(starter.secret_file)
    message = "WorkAgent 0 exited (code 3: its machine has no usable cluster_config.secret_file"
    with pytest.raises(WorkerDiedError, match=re.escape(message)):
        start(placement)


def test_a_work_agent_that_cannot_reach_the_master_reports_it(placement: ClusterPlacement) -> None:
    with socket.socket() as unused:  # bound, so that no other program listens there
        unused.bind(("127.0.0.1", 0))
        placement._listener.address = unused.getsockname()
        message = (
            "WorkAgent 0 exited (code 4: it did not reach the master at cluster_config.master_host) before it was ready"
        )
        with pytest.raises(WorkerDiedError, match=re.escape(message)):
            start(placement)


def test_placement_ignores_messages_of_an_earlier_start(placement: ClusterPlacement, starter: ProcessStarter) -> None:
    class Late:
        """A fake of a process."""

        pid = None
        has_exited = False
        exit_description = ""
        is_killed = False

        def kill(self) -> None:
            self.is_killed = True

        def wait_or_kill(self, timeout_s: float | None) -> None:
            pass

    late = Late()
    channels = []

    def come(index: int, ranks: Sequence[Sequence[str]]) -> Late:
        (arguments,) = ranks
        token = arguments[arguments.index("--token") + 1]
        channels.append(connect_to_master(f"127.0.0.1:{placement._listener.address[1]}", token, starter.secret_file))
        channels[0].send(StepDone(7, (), {}))
        return late

    placement._starter = types.SimpleNamespace(start=come, close=starter.close)  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="WorkAgent 0 does not support version"):
        start(placement)
    assert late.is_killed
    channels[0].close()


@pytest.mark.parametrize("reason", ["given up", "too late"])
def test_a_work_agent_that_does_not_connect_is_killed(
    placement: ClusterPlacement, starter: ProcessStarter, tmp_path: Path, reason: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import signal; signal.pause()")
    starter.program = str(program)
    cancellation = StartCancellation()
    if reason == "given up":
        cancellation.cancel()
        message = "was cancelled"
    else:
        message = r"was not ready within 0\.1 s"
    with pytest.raises(WorkerDiedError, match=message):
        start_work_agent(a_config(), 0, lambda text: None, None, 0.1, cancellation, placement)
    assert starter.processes[0].returncode is not None


def test_a_work_agent_with_other_code_is_rejected(placement: ClusterPlacement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "code_fingerprint", lambda: "0123456789abcdef")
    with pytest.raises(
        ProtocolError,
        match=r"runs different code \(fingerprint [0-9a-f]{12}\) than the master \(fingerprint 0123456789ab\)",
    ):
        start(placement)


def test_the_placement_sets_the_number_of_threads(placement: ClusterPlacement) -> None:
    settings = supervisor.load_settings(a_config(), 2)
    assert placement.settings(settings).device.num_threads == 3
    assert placement.settings(settings).device_id == 2


def test_assigned_devices_are_numbered_from_0(starter: ProcessStarter) -> None:
    identity = ClusterIdentity(starter.secret_file.read_text())
    with contextlib.closing(ClusterPlacement("127.0.0.1", identity, starter, own_devices=True)) as placement:
        assert placement.settings(supervisor.load_settings(a_config(), 2)).device_id == 0


def test_master_host_must_be_an_address_of_this_machine(starter: ProcessStarter) -> None:
    identity = ClusterIdentity(starter.secret_file.read_text())
    with pytest.raises(
        ConfigError, match=r"cluster_config\.master_host must be an address of this machine.*192\.0\.2\.77"
    ):
        ClusterPlacement("192.0.2.77", identity, starter)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_master_host_must_not_be_unspecified(starter: ProcessStarter, host: str) -> None:
    identity = ClusterIdentity(starter.secret_file.read_text())
    with pytest.raises(
        ConfigError, match=rf"master_host must be an address that the other machines can connect to\. Given: {host}"
    ):
        ClusterPlacement(host, identity, starter)


def test_the_first_start_has_a_connect_timeout(
    placement: ClusterPlacement, starter: ProcessStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_connect_timeout_s", 0.1)
    program = tmp_path / "program.py"
    program.write_text("import signal; signal.pause()")
    starter.program = str(program)
    with pytest.raises(
        WorkerDiedError, match=r"was not ready within 0\.1 s: it has not connected to the cluster's port"
    ):
        start(placement)
