"""Kill the WorkAgent of a real server repeatedly, as soon as its process exists, so that it is never loaded.

    python tests/tools/repeated_kills.py --kills 20

Prints the answers that clients got meanwhile, and how soon after the last kill the server served again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import psutil
from support.server_process import Server, start_server, unwind_on_sigterm

BODY = {"prompt": "Add 17 and 25.", "max_tokens": 16, "temperature": 0}


def kill_in_a_row(server: Server, num_kills: int) -> str:
    """Kill `num_kills` WorkAgents of the server, requesting an answer from time to time.

    Raises:
        AssertionError: An answer differs, or the server does not serve again within two minutes.
    """
    killed: set[int] = set()
    counts: Counter[str] = Counter()
    with httpx.Client(base_url=server.url, timeout=300.0) as client:
        expected = client.post("/v1/completions", json=BODY).json()["choices"]
        while len(killed) < num_kills:
            for agent in server.work_agents():
                if agent.pid not in killed and "llm_serving.work_agent" in agent.cmdline():
                    agent.kill()
                    killed.add(agent.pid)
            if len(killed) > 2:  # earlier, a restart is near, and a request would wait for it
                answer = client.post("/v1/completions", json=BODY)
                counts[f"{answer.status_code}, Retry-After {answer.headers.get('retry-after')}"] += 1
            time.sleep(0.02)
        began = time.monotonic()
        while client.get("/health").status_code != 200:
            assert time.monotonic() - began < 120, client.get("/health").text
            time.sleep(0.02)
        seconds = time.monotonic() - began
        assert client.post("/v1/completions", json=BODY).json()["choices"] == expected
    lines = [f"{count} answers: {what}" for what, count in sorted(counts.items())]
    return "\n".join([*lines, f"{len(killed)} kills in a row; served again {seconds:.1f} s after the last"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="number of kills (default: 20)")
    args = parser.parse_args()
    unwind_on_sigterm()
    server = start_server()
    try:
        sys.stdout.write(kill_in_a_row(server, args.kills) + "\n")
    finally:
        server.stop()
    assert not psutil.wait_procs(server.processes, timeout=10)[1]


if __name__ == "__main__":
    main()
