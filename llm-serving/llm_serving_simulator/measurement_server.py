"""A server that a command starts for itself, on a free port of this machine, and ends."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from llm_serving.cli import launcher
from llm_serving.cli.arguments import ended_in_order
from llm_serving.config import ServingConfig, load_config
from llm_serving.errors import ConfigError
from llm_serving.server.http.listener import bind


@contextlib.contextmanager
def own_server(
    path: Path | None, overrides: Sequence[str], model: str | None, recordings: Path | None = None
) -> Iterator[ServingConfig]:
    """Serves with a configuration; the one that is yielded says where. Its recordings are complete when it has ended.

    Args:
        path: The serving YAML.
        overrides: "section.key=value" each.
        model: In place of the configured one.
        recordings: Folder for what its scheduler was told and decided.

    Raises:
        ConfigError: It cannot be served like this.
        StartError: The server ended before it was ready.
    """
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    settings = [*overrides, "serving_config.server_ip=127.0.0.1", f"serving_config.server_port={port}"]
    if recordings is not None:
        settings += [f"scheduler_config.record_path={recordings}", "scheduler_config.record_file_bytes=4GB"]
    config = load_config(path, settings, model)
    if config.api_keys or config.serving.scheme != "http":
        raise ConfigError("a server that is measured must want no API key and speak plain HTTP")
    arguments = [text for each in settings for text in ("--set", each)]
    for name, value in (("--config", path), ("--model", model)):
        arguments += [] if value is None else [name, str(value)]
    with tempfile.TemporaryDirectory(prefix="llm-serving-") as folder, ended_in_order():
        launcher.start_silently(config, arguments, Path(folder))
        try:
            yield config
        finally:
            launcher.stop(Path(folder), None)
