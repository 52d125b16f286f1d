"""Check a model that is larger than Ray's object store, with real Ray.

    python tests/tools/check_ray_store.py       # needs ray; about two minutes

If the store may spill to disk, machines get the model. If it may not, the server reports the error and exits. The model
is the shipped one, with an unused file in its folder that makes it larger.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from support.server_process import ROOT, RUN_DIR, Server, free_ports, run_command, start_server
from tools.check_ray_nodes import start_with_retries

STORE_BYTES: Final = 80 * 2**20
"""Smallest object store that Ray accepts."""
FILE_BYTES: Final = 3 * STORE_BYTES
DEMO_MODEL: Final = ROOT / "llm-serving" / "llm_serving" / "demo_model"
CONFIG: Final = ROOT / "configs" / "demo_cpu.yaml"
NO_DISK: Final = {"RAY_local_fs_capacity_threshold": "0.0"}
"""Variable that makes Ray treat every disk as full."""


def make_model(folder: Path) -> Path:
    """Copy the shipped model and add a file that makes it larger than the object store."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "original.bin").open("wb") as file:
        for _ in range(FILE_BYTES // 2**24):
            file.write(os.urandom(2**24))
    return folder


def settings(address: str, folder: Path) -> list[str]:
    chosen = {
        "cluster_config.engine": "ray",
        "cluster_config.address": address,
        "cluster_config.replicas": 1,
        "cluster_config.cpus_per_replica": 1,
        "cluster_config.weights": "object_store",
        "cluster_config.weights_cache_path": folder / "kept",
        "cluster_config.secret_file": folder / "secret",
        "model_config.model_path": folder / "model",
    }
    return [text for key, value in chosen.items() for text in ("--set", f"{key}={value}")]


def answer(server: Server) -> str:
    body = {"prompt": "Count from 1 to 9.", "max_tokens": 12, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120.0)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


@contextlib.contextmanager
def cluster(environment: Mapping[str, str]) -> Iterator[str]:
    """Start a cluster with room for a WorkAgent, whose Ray has these variables; return its address."""
    from ray.cluster_utils import Cluster

    os.environ.update(environment)
    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    made = start_with_retries(lambda: Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=True))
    try:
        yield made.address
    finally:
        made.shutdown()
        for name in environment:
            del os.environ[name]


def spills(folder: Path, expected: str) -> bool:
    with cluster({}) as address:
        began = time.monotonic()
        server = start_server("--config", str(CONFIG), *settings(address, folder))
        seconds = time.monotonic() - began
        try:
            same = answer(server) == expected
        finally:
            server.stop()
    sys.stdout.write(f"with spilling to disk: serves after {seconds:.1f} s; same answer: {same}\n")
    return same


def is_full(folder: Path) -> bool:
    (port,) = free_ports(1)
    with cluster(NO_DISK) as address:
        began = time.monotonic()
        result = run_command(
            "start", "--run-dir", str(RUN_DIR), "--config", str(CONFIG), "--port", str(port), *settings(address, folder)
        )
        seconds = time.monotonic() - began
    lines = [line for line in result.stderr.splitlines() if "object store has no room" in line]
    message = lines[-1] if lines else result.stderr
    sys.stdout.write(f"without spilling: exit code {result.returncode} after {seconds:.1f} s: {message}\n")
    return bool(lines) and result.returncode != 0


def main() -> int:
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    server = start_server()
    try:
        expected = answer(server)
    finally:
        server.stop()
    with tempfile.TemporaryDirectory(prefix="ray-store-proof-") as name:
        folder = Path(name)
        make_model(folder / "model")
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(secrets.token_hex(32))
        sys.stdout.write(f"a store of {STORE_BYTES / 1e6:.0f} MB, a model of {FILE_BYTES / 1e6:.0f} MB and more\n")
        good = is_full(folder)
        return 0 if spills(folder, expected) and good else 1


if __name__ == "__main__":
    sys.exit(main())
