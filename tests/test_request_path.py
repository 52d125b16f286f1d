"""How many files and functions of the package one plain request passes: a reader follows it through all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
from support.server_process import ONE_THREAD, ROOT, free_ports

MAX_FILES: Final = 67
MAX_FUNCTIONS: Final = 392
"""Of the master. They may only be lowered: what a request does not use, it should not enter."""

NUM_REQUESTS: Final = 3
"""Of which the shortest path counts: work that the server does from time to time may fall into one of them."""


def test_a_plain_completion_enters_few_files_and_functions(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    script = ROOT / "tests" / "support" / "traced_server.py"
    arguments = ["serve", "--model", "demo", "--port", str(port), "--set", ONE_THREAD]
    with subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            paths = []
            wait_until_ready(url, server)
            for _ in range(NUM_REQUESTS + 1):  # the first one fills caches
                print("start", file=server.stdin, flush=True)
                complete(url)
                print("stop", file=server.stdin, flush=True)
                paths.append({tuple(each) for each in json.loads(server.stdout.readline())})
        finally:
            server.terminate()
    path = min(paths[1:], key=len)
    files = Counter(file for file, _ in path)
    record_property("path of a plain completion", f"{len(files)} files, {len(path)} functions of the master")
    for package, number in Counter(file.partition("/")[0] for file in files).most_common():
        functions = sum(num for file, num in files.items() if file.partition("/")[0] == package)
        record_property(f"    {package}", f"{number} files, {functions} functions")
    assert len(files) <= MAX_FILES
    assert len(path) <= MAX_FUNCTIONS
    assert "engine/engine.py" in files, "the trace sees the threads of the engine too"


def complete(url: str) -> None:
    """Request four tokens, on a connection of its own."""
    body = {"model": "demo", "prompt": "Tell me a story", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    assert response.json()["usage"]["completion_tokens"] == 4


def wait_until_ready(url: str, server: subprocess.Popen[str]) -> None:
    """Poll `/health` as long as the server's process lives."""
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the server ended with exit code {server.returncode}")
