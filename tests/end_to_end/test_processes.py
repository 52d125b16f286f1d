"""Starting, stopping and killing: no process or memory is left, and no command waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.core.process import command_of
from support.server_process import (
    ONE_THREAD,
    ROOT,
    free_ports,
    run_script,
    shared_memory_names,
    start_server,
    work_agents,
)

pytestmark = pytest.mark.end_to_end


def test_server_survives_one_lost_replica_and_can_exit_without_work_agents() -> None:
    """The second replica cannot be restarted, because the model was removed."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        shutil.copytree(DEMO_FOLDER, model)
        settings = ("serving_config.max_worker_restarts=0", "serving_config.exit_without_work_agents=True", ONE_THREAD)
        server = start_server("--model", str(model), *(x for each in settings for x in ("--set", each)), num_agents=2)
        try:
            (model / "model.safetensors").unlink()
            agents = server.processes[1:]
            assert len(agents) == 2

            async def run() -> None:
                async with asyncio.timeout(300), server.client() as client:
                    os.kill(agents[0].pid, signal.SIGKILL)
                    while "retrying" not in (health := await client.get("/health")).text:
                        await asyncio.sleep(0.01)
                    assert health.status_code == 200
                    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
                    agents[1].kill()

            asyncio.run(run())
            assert not psutil.wait_procs(server.processes, timeout=60)[1]
            server.stop()  # wait until the log is complete
            last = server.log.splitlines()[-1]
            assert last.startswith("error: WorkAgent ")  # either failure may be reported first
            assert "WorkAgent 0 completed no step after 0 restarts in a row; retrying: " in last
        finally:
            server.stop()


def test_server_exits_with_the_error_of_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    model = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    # exits with the code of the server that it started
    failed = run_script("start.sh", "--model", str(model), "--port", str(port))
    assert failed.returncode == 2, failed.stderr
    last = failed.stderr.splitlines()[-1].strip()
    assert last.startswith("error: ") and "model.safetensors" in last


def test_second_start_is_refused_and_a_killed_master_leaves_no_processes() -> None:
    """Neither start affects the running server. When it is killed, its WorkAgent ends and no memory is left."""
    before = shared_memory_names()
    server = start_server(by_script=True)
    try:
        again = run_script("start.sh", "--port", str(server.port))
        assert again.returncode == 2
        assert f"a server already runs on port {server.port}" in again.stderr
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            for foreground in ((), ("--foreground",)):
                refused = run_script("start.sh", "--port", str(port), *foreground)
                assert refused.returncode == 2
                assert f"127.0.0.1:{port} is in use by another program" in refused.stderr
        assert httpx.get(f"{server.url}/health").status_code == 200
        master, agent = server.processes
        scrape = httpx.get(f"{server.url}/metrics").text.splitlines()
        memory = {line.split("{")[0]: float(line.split()[-1]) for line in scrape if line.startswith("llm_serving:")}
        assert memory["llm_serving:kv_cache_reserved_bytes"] == 1024 * 16 * 2560
        assert memory["llm_serving:kv_cache_committed_bytes"] == 0
        assert abs(memory["llm_serving:work_agent_resident_memory_bytes"] - agent.memory_info().rss) < 2**26
        master.kill()
        assert not psutil.wait_procs([master, agent], timeout=60)[1]
        assert shared_memory_names() == before
    finally:
        server.stop()


def test_command_line_errors_are_explained_without_a_traceback(tmp_path: Path) -> None:
    typo = tmp_path / "typo.yaml"
    typo.write_text("model_config:\n    model_path: demo\n    decode_batchsize: 4\n")
    answer = run_script("start.sh", "--config", str(typo))
    assert answer.returncode == 2
    assert "typo.yaml:3" in answer.stderr and "decode_batch_size" in answer.stderr
    answer = run_script("start.sh", "--model", str(tmp_path / "nowhere"))
    assert answer.returncode == 2
    assert "nowhere" in answer.stderr
    answer = run_script("stop.sh", "--port", "1")
    assert answer.returncode == 0
    assert "no server was running on port 1" in answer.stderr


def test_ctrl_c_stops_a_foreground_server() -> None:
    (port,) = free_ports(1)
    command = ["bash", str(ROOT / "scripts" / "start.sh"), "--foreground", "--port", str(port)]
    environment = dict(os.environ, LLM_SERVING_VENV=sys.prefix)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if "WorkAgent 0 is ready" in line:
            break
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(120) == 0
    assert not psutil.wait_procs(family, timeout=60)[1]
    process.stderr.close()


def test_ctrl_c_kills_a_work_agent_that_loads_the_model() -> None:
    (port,) = free_ports(1)
    command = [*command_of("llm_serving", "serve"), "--model", "demo", "--port", str(port), "--set", ONE_THREAD]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not (agents := work_agents(psutil.Process(process.pid))):
            assert process.poll() is None
        (agent,) = agents
        agent.suspend()  # it cannot notice that the master exits
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(120) == 0
            assert not agent.is_running()
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.kill()
