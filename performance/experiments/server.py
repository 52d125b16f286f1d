"""A server of one's own, started and stopped by the project's scripts."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from http_client import HttpClient

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LESS_URGENT = ("nice", "-n", "5")
"""How a server runs: clients elsewhere would not wait for its cores, which those of an experiment share."""


class ServerError(Exception):
    """The server did not start, or did not answer; the text has what it said."""


@contextmanager
def serving(model: str, overrides: Sequence[str]) -> Iterator[HttpClient]:
    """Serves `model` (a folder, or `demo`) with `configs/demo_cpu.yaml` and SECTION.KEY=VALUE overrides.

    Raises:
        ServerError: It did not become ready.
    """
    port = _free_port()
    settings = [f"model_config.model_path={model}", *overrides]
    options = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="llm-serving-experiment-") as run_dir:
        try:
            _script(run_dir, "start.sh", "--port", str(port), *options, runs=LESS_URGENT)
            yield HttpClient("127.0.0.1", port)
        finally:
            _script(run_dir, "stop.sh", "--port", str(port))


def _script(run_dir: str, name: str, *arguments: str, runs: Sequence[str] = ()) -> None:
    environment = {**os.environ, "LLM_SERVING_RUN_DIR": run_dir}
    if sys.prefix != sys.base_prefix:
        environment["LLM_SERVING_VENV"] = sys.prefix
    command = [*runs, "bash", str(SCRIPTS / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)  # noqa: S603
    if result.returncode != 0:
        raise ServerError(f"{name} failed:\n{result.stdout}{result.stderr}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def read_counters(http: HttpClient) -> dict[str, float]:
    """The counters of `/metrics` by name, each summed over its labels."""
    response = await http.request("GET", "/metrics")
    if response.status != 200:
        raise ServerError(f"GET /metrics answered HTTP {response.status}")
    return parse_counters(response.body.decode())


def parse_counters(text: str) -> dict[str, float]:
    """Samples whose name ends with `_total`, out of Prometheus's text form."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if not line.startswith("#") and name.endswith("_total"):
            counters[name] = counters.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return counters
