"""Measurements on this machine: a server that a command starts for itself, and the CPU time of other programs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil
from llm_serving.cli import launcher
from llm_serving.cli.arguments import ended_in_order
from llm_serving.config import ServingConfig, load_config
from llm_serving.errors import ConfigError
from llm_serving.server.http.listener import bind

MAX_INTERFERENCE: Final = 0.1
"""Share of all cores that other programs may use during a measurement."""


@contextlib.contextmanager
def temporary_server(
    path: Path | None, overrides: Sequence[str], model: str | None, recordings: Path | None = None
) -> Iterator[ServingConfig]:
    """Run a server on a free port of this machine; yield its configuration. Its recordings are complete at the exit.

    Args:
        path: The serving YAML.
        overrides: "section.key=value" each.
        model: Replaces the configured model.
        recordings: Folder for recordings of the scheduler.

    Raises:
        ConfigError: The configuration cannot be served like this.
        StartError: The server ended before it was ready.
    """
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    settings = [*overrides, "serving_config.server_ip=127.0.0.1", f"serving_config.server_port={port}"]
    if recordings is not None:
        settings += [f"scheduler_config.record_path={recordings}", "scheduler_config.record_file_bytes=4GB"]
    config = load_config(path, settings, model)
    if config.api_keys or config.serving.scheme != "http":
        raise ConfigError("a measured server must have no API keys and no TLS")
    arguments = [text for each in settings for text in ("--set", each)]
    for name, value in (("--config", path), ("--model", model)):
        arguments += [] if value is None else [name, str(value)]
    with tempfile.TemporaryDirectory(prefix="llm-serving-") as folder, ended_in_order():
        launcher.start_silently(config, arguments, Path(folder))
        try:
            yield config
        finally:
            launcher.stop(Path(folder), None)


class CpuInterference:
    """Measures from its creation on how much CPU time other programs use."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._all_s, self._own_s = _all_s(), _own_s()

    def share(self) -> float:
        """Return the share of all cores used by programs other than this process and its descendants."""
        elapsed = (time.monotonic() - self._start_s) * (psutil.cpu_count() or 1)
        other_s = _all_s() - self._all_s - max(0.0, _own_s() - self._own_s)
        return max(0.0, other_s / elapsed) if elapsed > 0 else 0.0


def _all_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    total = 0.0
    this = psutil.Process()
    for each in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total
