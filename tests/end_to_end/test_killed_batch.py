"""Batches whose process is killed: no line is lost, and none is answered twice."""

from __future__ import annotations

import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from support.server_process import ONE_THREAD, ROOT, start_server

NUM_LINES = 120
NUM_BEFORE = 5
"""Minimum number of answered lines when the process is killed."""
SETTINGS = ("--set", "model_config.decode_batch_size=4", "--set", ONE_THREAD)
TRACED = (
    "CREATE TABLE given (batch TEXT, number INTEGER);"
    "CREATE TRIGGER once AFTER UPDATE OF status ON lines WHEN new.status IS NOT NULL "
    "BEGIN INSERT INTO given VALUES (new.batch, new.number); END;"
)
"""SQL that lets a database record every time that a line gets an answer."""


def lines() -> bytes:
    each = (
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": f"Add {number} and 25.",
                "max_tokens": 40,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(NUM_LINES)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in each)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, timeout=60.0)) as database:
        yield database


def answered(path: Path) -> dict[int, bytes]:
    """Return the stored answers by line number."""
    with reading(path) as database:
        return dict(database.execute("SELECT number, answer FROM lines WHERE status IS NOT NULL"))


def events(client: httpx.Client) -> Iterator[str]:
    """Return the server's progress events until it ends."""
    with client.stream("GET", "/v1/live") as response:
        yield from (line for line in response.iter_lines() if line)
    raise AssertionError("the server has ended")


def read_progress(terminal: int) -> None:
    """Return when the progress bar, which a run writes to this terminal, shows some answered lines."""
    shown = b""
    while max(map(int, re.findall(rb" (\d+)/%d " % NUM_LINES, shown)), default=0) < NUM_BEFORE:
        shown += os.read(terminal, 2**16)


def trace(path: Path) -> None:
    with reading(path) as database:
        database.executescript(TRACED)


def check_each_once(path: Path, kept: dict[int, bytes], texts: list[Any]) -> None:
    """Check that every line has one answer, written once, and that answers from before the kill are unchanged."""
    assert 0 < len(kept) < NUM_LINES
    with reading(path) as database:
        given = Counter(number for (number,) in database.execute("SELECT number FROM given"))
    assert set(given.values()) == {1}, "a line was answered twice"
    assert set(given) == set(range(NUM_LINES)) - set(kept), "what was kept is not asked for again"
    assert [each["custom_id"] for each in texts] == [f"line-{number}" for number in range(NUM_LINES)]
    for number, answer in kept.items():
        assert texts[number]["response"]["body"] == json.loads(answer)


def test_run_batch_resumes_after_it_was_killed(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(lines())
    store = Path(f"{target}.unfinished")
    command = [
        sys.executable,
        "-m",
        "llm_serving",
        "run-batch",
        str(source),
        str(target),
    ]
    command += [
        "--config",
        str(ROOT / "configs" / "demo_cpu.yaml"),
        *SETTINGS,
    ]
    terminal, its_end = pty.openpty()
    termios.tcsetwinsize(its_end, (24, 100))  # without a width the bar has no text
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=its_end) as first:
        os.close(its_end)
        try:
            read_progress(terminal)
            family = psutil.Process(first.pid).children(recursive=True)
        finally:
            first.kill()
            os.close(terminal)
        assert not psutil.wait_procs(family, timeout=60)[1]
    assert not target.exists()
    kept = answered(store)
    trace(store)
    (beside := tmp_path / "beside.db").hardlink_to(store)  # the run deletes its own name
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    check_each_once(beside, kept, [json.loads(each) for each in target.read_text().splitlines()])


def test_batch_resumes_after_its_server_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "batches.db"
    arguments = [
        "--set",
        f"serving_config.batch_path={path}",
        *SETTINGS,
    ]
    server = start_server(*arguments)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60.0) as client:
            file = client.post(
                "/v1/files",
                files={"file": ("in.jsonl", lines())},
                data={"purpose": "batch"},
            ).json()
            body = {
                "input_file_id": file["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            batch_id = client.post("/v1/batches", json=body).json()["id"]
            next(None for _ in events(client) if len(answered(path)) >= NUM_BEFORE)
    finally:
        server.processes[0].kill()
        assert not psutil.wait_procs(server.processes, timeout=60)[1]
        server.stop()
    kept = answered(path)
    trace(path)
    server = start_server(*arguments)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60.0) as client:
            states = (client.get(f"/v1/batches/{batch_id}").json() for _ in events(client))
            batch = next(each for each in states if each["status"] not in ("in_progress", "finalizing"))
            assert batch["request_counts"] == {
                "total": NUM_LINES,
                "completed": NUM_LINES,
                "failed": 0,
            }
            texts = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    finally:
        server.stop()
    check_each_once(path, kept, [json.loads(each) for each in texts])
