"""Starting, stopping, dying: nothing is left behind and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import ROOT, free_ports, metric, run_script, shared_memory_names, start_server

pytestmark = pytest.mark.end_to_end

ENDLESS = {"prompt": "Count from 1 to 9.", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_two_replicas_serve_and_without_restarts_one_may_die() -> None:
    server = start_server("--set", "serving_config.max_worker_restarts=0", num_agents=2)
    try:
        agents = server.processes[1:]
        assert len(agents) == 2

        async def run() -> None:
            async with asyncio.timeout(120), server.client() as client:
                streams = [asyncio.create_task(client.post("/v1/completions", json=ENDLESS)) for _ in range(4)]
                while await metric(client, "vllm:num_requests_running") < 4:
                    await asyncio.sleep(0)
                os.kill(agents[0].pid, signal.SIGKILL)
                answers = await asyncio.gather(*streams)
                assert sorted(answer.status_code for answer in answers) == [200, 200, 500, 500]
                assert len({answer.text.split('"text"')[1] for answer in answers if answer.is_success}) == 1
                assert (await client.get("/health")).status_code == 200
                agents[1].kill()
                psutil.wait_procs([agents[1]], timeout=10)
                while "no WorkAgent lives" not in (await client.get("/health")).text:
                    await asyncio.sleep(0)
                refused = await client.post("/v1/completions", json=ENDLESS)
                assert refused.status_code == 503
                assert "no WorkAgent lives" in refused.text

        asyncio.run(run())
    finally:
        server.stop()
    assert not psutil.wait_procs(server.processes, timeout=10)[1]


def test_started_twice_a_port_in_use_and_the_master_killed() -> None:
    """Neither start disturbs the server; when it is killed, its WorkAgent ends and no memory is left."""
    before = shared_memory_names()
    server = start_server()
    try:
        again = run_script("start.sh", "--port", str(server.port))
        assert again.returncode == 2
        assert f"a server runs on port {server.port} already" in again.stderr
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            refused = run_script("start.sh", "--port", str(port))
            assert refused.returncode == 2
            assert f"127.0.0.1:{port} is in use by another program" in refused.stderr
        assert httpx.get(f"{server.url}/health").status_code == 200
        master, agent = server.processes
        master.kill()
        assert not psutil.wait_procs([master, agent], timeout=10)[1]
        assert shared_memory_names() == before
    finally:
        server.stop()


def test_errors_of_the_command_line_are_met_kindly(tmp_path: Path) -> None:
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


def test_ctrl_c_ends_a_server_in_the_foreground() -> None:
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
    assert process.wait(30) == 0
    assert not psutil.wait_procs(family, timeout=10)[1]
    process.stderr.close()
