from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from support.server_process import ONE_THREAD, Server, run_command, start_server

pytestmark = [pytest.mark.end_to_end, pytest.mark.mindspore]

BODY = {
    "prompt": "Count from 1 to 60.",
    "max_tokens": 300,
    "temperature": 4.0,
    "ignore_eos": True,
    "stream": True,
    "receipt": True,
}
READ = 40
"""Events that arrive before the master is killed."""


def start(folder: Path) -> Server:
    settings = ("resume_streams=True", "request_log=disk", f"request_log_path={folder}")
    return start_server("--set", ONE_THREAD, *(x for each in settings for x in ("--set", f"serving_config.{each}")))


def read_and_kill(server: Server) -> tuple[str, bytes]:
    """Return the stream's id and its first bytes, up to a complete event."""
    while True:
        data = b""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=120.0) as answer:
            assert answer.status_code == 200
            for piece in answer.iter_raw():
                data += piece
                if data.count(b"\n\n") >= READ:
                    break
            if b"[DONE]" not in data:  # on a busy machine all events may arrive at once
                server.processes[0].kill()
                return answer.headers["x-stream-id"], data[: data.rindex(b"\n\n") + 2]


def test_resumed_stream_has_the_same_bytes_after_the_master_was_killed(tmp_path: Path) -> None:
    server = start(tmp_path / "log")
    try:
        stream_id, first = read_and_kill(server)
        server.processes[0].wait(60)
    finally:
        server.stop()
    last_id = first[: -len(b"\n\n")].rpartition(b"\n\n")[2].split(b"\n")[0].removeprefix(b"id: ").decode()
    server = start(tmp_path / "log")
    try:
        path = f"{server.url}/v1/streams/{stream_id}"
        rest = httpx.get(path, headers={"Last-Event-ID": last_id}, timeout=120.0)
        whole = httpx.get(path, timeout=120.0)
    finally:
        server.stop()
    assert (rest.status_code, whole.status_code) == (200, 200)
    assert first + rest.content == whole.content
    assert rest.content.endswith(b"data: [DONE]\n\n")

    events = [event.split("\ndata: ")[1] for event in whole.text.split("\n\n")[:-2]]
    receipt = json.loads(events[-1])["receipt"]
    altered = json.loads(events[-1])["receipt"]
    altered["sampling"]["seed"] = str(int(receipt["sampling"]["seed"]) ^ 1)
    file = tmp_path / "receipts.jsonl"
    file.write_text(f"{json.dumps(receipt)}\n{json.dumps(altered)}\n")
    verified = run_command("verify", str(file), "--model", "demo")
    assert verified.returncode == 1, verified.stdout + verified.stderr
    assert verified.stdout.startswith(f"{file}:1: equal: ")
    assert f"{file}:2: different: " in verified.stdout
    assert "sampling.seed: does not fit" in verified.stdout
    assert "2 receipts: 1 equal, 1 different, 0 unreadable" in verified.stdout
    file.write_text(json.dumps(altered)[:-9])
    assert run_command("verify", str(file), "--model", "demo").returncode == 2
