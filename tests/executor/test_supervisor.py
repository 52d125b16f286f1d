"""Start and end of WorkAgent processes. Fake programs replace them, so that no model is loaded."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import support.fake_work_agent
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.cluster import ClusterConfig
from llm_serving.config.sections.device import CacheConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.fingerprint import code_fingerprint
from llm_serving.errors import ModelError, ProtocolError, WorkerDiedError
from llm_serving.executor import placement, supervisor
from llm_serving.executor import supervisor as supervised_executor
from llm_serving.executor.executor import RemoteExecutor, RestartFailedError
from llm_serving.executor.supervisor import SupervisedExecutor, load_settings, start_work_agent
from llm_serving.executor.worker_process import StartCancellation
from llm_serving.transport.messages import PROTOCOL_VERSION, Loaded, Progress, Welcome
from support.fake_runner import expected_output
from support.fake_work_agent import NEVER_LOADED
from support.step_factories import sampling_input, step_input

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    """Return the list of started processes, whose pipes are closed at the end."""
    processes, spawn = [], placement._spawn
    monkeypatch.setattr(placement, "_spawn", lambda *args: processes.append(spawn(*args)) or processes[-1])
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def run_instead(monkeypatch, tmp_path):
    """Make every WorkAgent process run a shell script; "$@" are the arguments for Python."""

    def run_instead(script):
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return run_instead


@pytest.fixture
def run_fake_agent(run_instead, monkeypatch):
    """Make every WorkAgent process a real one with a fake model."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, sys.path)]))
    run_instead(f'exec {shlex.quote(sys.executable)} {shlex.quote(support.fake_work_agent.__file__)} "$@"')


def a_config(num_blocks=None):
    return ServingConfig(
        model=ModelConfig(max_generate_length=64, decode_batch_size=4),
        scheduler=SchedulerConfig(max_prefill_tokens=64),
        pa=CacheConfig(num_blocks=num_blocks, num_swap_blocks=5),
    )


def test_work_agent_loads_serves_and_exits(run_fake_agent):
    progress = []
    agent = start_work_agent(a_config(), 0, progress.append)
    assert progress == ["WorkAgent 0: compiling for CPU"]
    assert (agent.loaded.num_blocks, agent.loaded.num_swap_blocks) == (8, 5)
    executor = RemoteExecutor(agent.channel, agent.buffers)
    prompt = [5, 6, 7]
    executor.submit(step_input([(prompt, 0, [1])], step=0, sampling=sampling_input(1, position=3)))
    assert executor.collect().token_ids.tolist() == expected_output(prompt, 1)
    agent.stop()
    assert agent.process.returncode == 0


def two_ranks():
    return replace(a_config(), cluster=ClusterConfig(tensor_parallel=2))


def test_two_ranks_load_serve_and_exit(run_fake_agent, processes):
    progress = []
    agent = start_work_agent(two_ranks(), 0, progress.append)
    assert sorted(progress) == ["WorkAgent 0: compiling for CPU", "WorkAgent 0: rank 1: compiling for CPU"]
    assert agent.loaded.num_blocks == 8
    executor = RemoteExecutor(agent.channel, agent.buffers)
    prompt = [5, 6, 7]
    executor.submit(step_input([(prompt, 0, [1])], step=0, sampling=sampling_input(1, position=3)))
    assert executor.collect().token_ids.tolist() == expected_output(prompt, 1)
    agent.stop()
    assert [process.returncode for process in processes] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_exit_of_one_rank_ends_its_replica(run_fake_agent, processes, rank):
    def start(like, timeout_s):
        return start_work_agent(two_ranks(), 0, lambda text: None, like, timeout_s)

    executor = SupervisedExecutor(start, step_timeout_s=60.0, max_restarts=3)
    processes[rank].kill()
    with pytest.raises(WorkerDiedError) as error:
        while True:
            executor.submit(step_input([([5], 0, [1])], step=executor.next_step, sampling=sampling_input(1)))
            executor.collect()
    executor.restart(str(error.value))
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2 + [None] * 2
    executor.submit(step_input([([5, 6], 0, [1])], step=0, sampling=sampling_input(1, position=2)))
    assert executor.collect().token_ids.tolist() == expected_output([5, 6], 1)
    executor.close()


def test_error_names_the_rank_that_exits_before_it_is_ready(run_instead, monkeypatch):
    run_instead('case "$*" in *"--rank 1"*) exit 3;; esac; exec cat')
    with pytest.raises(WorkerDiedError, match=r"WorkAgent 0 exited \(rank 1: code 3"):
        start_work_agent(two_ranks(), 0, lambda text: None)


def test_stop_kills_a_work_agent_that_does_not_exit(run_fake_agent, monkeypatch):
    agent = start_work_agent(a_config(), 0, lambda text: None)
    monkeypatch.setattr(type(agent.channel), "send", lambda channel, message: None)
    monkeypatch.setattr("llm_serving.executor.supervisor._EXIT_TIMEOUT_S", 0.0)
    agent.process.send_signal(signal.SIGSTOP)  # it does not even notice that its input has ended
    os.waitid(os.P_PID, agent.process.pid, os.WSTOPPED)
    agent.stop()
    assert agent.process.returncode == -signal.SIGKILL


def test_a_load_error_is_reported(run_fake_agent):
    with pytest.raises(ModelError, match=r"pa_config\.num_blocks: must be at least 2\. Given: 1"):
        start_work_agent(a_config(num_blocks=1), 0, lambda text: None)


def test_cancellation_kills_a_loading_work_agent(run_fake_agent):
    cancellation = StartCancellation()
    with pytest.raises(WorkerDiedError, match=r"exited \(code -9\) before it was ready|was cancelled"):
        start_work_agent(a_config(), 0, lambda text: cancellation.cancel(), cancellation=cancellation)


def test_local_work_agents_open_no_port(run_fake_agent):
    """A process that uses a port of `agent_ports` prevents no start and no restart of a WorkAgent."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = replace(a_config(), serving=ServerConfig(agent_ports=(other.getsockname()[1],)))
        agents = [start_work_agent(config, 0, lambda text: None)]
        agents[0].kill()
        agents += [start_work_agent(config, 0, lambda text: None, agents[0].loaded) for _ in range(2)]
        assert [agent.loaded.num_blocks for agent in agents] == [8, 8, 8]
        assert not psutil.Process(agents[1].process.pid).net_connections("inet")
        for agent in agents:
            agent.stop()


MAX_RESTARTS, MANY_KILLS = 5, 8


def test_work_agent_serves_after_repeated_kills(run_fake_agent, processes, monkeypatch):
    """WorkAgents die more often in a row without a step than the limit, which counts at the first start only. Every
    second WorkAgent dies before it is ready.
    """
    monkeypatch.setattr(supervised_executor, "MIN_RESTART_TIMEOUT_S", 600.0)  # none is replaced for being slow
    num_kills = 0

    def kill():
        nonlocal num_kills
        num_kills += 1
        processes[-1].kill()

    def start(like, timeout_s):
        never_loaded = num_kills < MANY_KILLS and num_kills % 2
        device = NEVER_LOADED if never_loaded else 0
        config = replace(a_config(), serving=ServerConfig(start_device_id=device))
        return start_work_agent(config, 0, lambda text: kill() if never_loaded else None, like, timeout_s)

    executor = SupervisedExecutor(start, 30.0, MAX_RESTARTS, pause=lambda delay_s: False)
    open_files = len(set(Path("/proc/self/fd").iterdir()))
    while num_kills < MANY_KILLS:
        kill()
        with pytest.raises(WorkerDiedError):
            executor.collect()
        with pytest.raises(RestartFailedError, match=r"exited \(code -9\) before it was ready|was cancelled"):
            executor.restart("killed when it was ready")
        executor.restart("killed while it loaded")
    prompt = [5, 6, 7]
    executor.submit(step_input([(prompt, 0, [1])], step=0, sampling=sampling_input(1, position=3)))
    assert executor.collect().token_ids.tolist() == expected_output(prompt, 1)
    assert len(processes) == MANY_KILLS + 1
    assert len(set(Path("/proc/self/fd").iterdir())) <= open_files  # what others have left open may be closed meanwhile
    executor.close()


def test_a_work_agent_that_exceeds_its_start_timeout_is_killed(run_instead, processes):
    run_instead("exec sleep 600")
    with pytest.raises(WorkerDiedError, match=r"WorkAgent 0 was not ready within 0\.1 s"):
        start_work_agent(a_config(), 0, lambda text: None, timeout_s=0.1)
    assert processes[0].returncode == -signal.SIGKILL


def test_a_work_agent_without_progress_is_killed(run_instead, processes):
    run_instead("exec sleep 600")
    config = replace(a_config(), serving=ServerConfig(load_timeout_s=0.1))
    rule = r"reported no progress for 0\.1 s while it loaded \(serving_config\.load_timeout_s\)"
    with pytest.raises(WorkerDiedError, match=rule):
        start_work_agent(config, 0, lambda text: None)
    assert processes[0].returncode == -signal.SIGKILL


class SlowLink:
    """A link that counts the whole timeout of each receive as waiting time."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.waited_s = 0.0

    def send(self, message):
        pass

    def receive(self, timeout_s=None):
        self.waited_s += timeout_s
        return self.answers.pop(0)


def test_progress_messages_extend_the_load_timeout():
    loaded = Loaded(8, 0, "")
    link = SlowLink(Welcome(PROTOCOL_VERSION, 1, code_fingerprint()), *[Progress("reading")] * 100, loaded)
    progress = []
    assert supervisor._load(0, link, load_settings(a_config(), 0), progress.append, None, 10.0) is loaded
    assert (len(progress), link.waited_s) == (100, 1020.0)


@pytest.mark.parametrize("call", ["llm_serving.transport.shared_memory.os.memfd_create", "socket.socketpair"])
def test_a_start_without_file_descriptors_fails_and_leaks_none(monkeypatch, call):
    def fail(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(call, fail)
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(WorkerDiedError, match="WorkAgent 0 cannot be started: Too many open files"):
        start_work_agent(a_config(), 0, lambda text: None)
    assert set(Path("/proc/self/fd").iterdir()) <= before  # what others have left open may be closed meanwhile


def test_the_exit_code_of_a_failed_start_is_reported(run_instead):
    run_instead("exit 7")
    with pytest.raises(WorkerDiedError, match=r"WorkAgent 0 exited \(code 7\) before it was ready"):
        start_work_agent(a_config(), 0, lambda text: None)


def test_program_that_is_no_work_agent_is_killed(run_instead, tmp_path):
    answer = (
        "import socket, sys; fd = int(sys.argv[sys.argv.index('--socket-fd') + 1]); "
        "connection = socket.socket(fileno=fd); "
        "connection.sendall(b'HTTP/1.1 400 Bad Request'); sys.stdin.read()"
    )
    run_instead(f'exec {shlex.quote(sys.executable)} -c "{answer}" "$@"')
    with pytest.raises(ProtocolError):
        start_work_agent(a_config(), 0, lambda text: None)


def test_the_pipe_of_a_failed_process_is_closed(run_instead, processes):
    run_instead("exit 3")
    with pytest.raises(WorkerDiedError):
        start_work_agent(a_config(), 0, lambda text: None)
    assert processes[0].stdin.closed


class TestLoadSettings:
    def test_each_work_agent_has_its_own_device(self):
        serving = ServerConfig(agent_ports=(16002, 16003), start_device_id=3)
        settings = [load_settings(ServingConfig(serving=serving), index) for index in range(2)]
        assert [item.device_id for item in settings] == [3, 4]
        assert [item.num_agents for item in settings] == [2, 2]

    def test_cores_are_divided_between_work_agents(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
        for num_agents, num_threads in ((1, 7), (2, 3), (9, 1)):
            config = ServingConfig(serving=ServerConfig(agent_ports=tuple(range(16002, 16002 + num_agents))))
            assert load_settings(config, 0).device.num_threads == num_threads
