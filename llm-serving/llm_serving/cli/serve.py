"""The commands `serve`, `start`, `stop` (a server in the background) and `run-batch` (no HTTP server)."""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_serving.cli import launcher
from llm_serving.cli.arguments import EXIT_FAILED, Subcommands, add_command, add_config_arguments, load_servable, say
from llm_serving.errors import ConfigError
from llm_serving.log import configure_logging, get_logger


def add_to(commands: Subcommands) -> None:
    serve = add_command(
        commands, "serve", run_serve, "run the master, its WorkAgents and the HTTP server until interrupted"
    )
    add_config_arguments(serve)
    start = add_command(commands, "start", run_start, "serve in the background; returns when requests are answered")
    add_config_arguments(start)
    _add_run_dir(start)
    stop = add_command(commands, "stop", run_stop, "end what `start` started")
    stop.add_argument("--port", type=int, metavar="N", help="only the server on this port")
    _add_run_dir(stop)
    batch = add_command(
        commands, "run-batch", run_file, "answer a file of requests without a server; an interrupted run is resumed"
    )
    batch.add_argument("source", type=Path, metavar="IN", help="JSON lines: custom_id, method, url, body")
    batch.add_argument(
        "target", type=Path, metavar="OUT", help="file for the answers, in order; failed lines go to OUT.errors"
    )
    add_config_arguments(batch)


def run_serve(arguments: argparse.Namespace) -> int:
    config = load_servable(arguments)
    configure_logging(config.serving.log_level, "master")
    for notice in config.notices:
        get_logger(__name__).warning(notice)
    from llm_serving import master

    return int(master.run(config))


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    help_text = "where pids and logs of background servers are kept"
    parser.add_argument("--run-dir", type=Path, default=Path(".run"), metavar="FOLDER", help=help_text)


def run_start(arguments: argparse.Namespace) -> int:
    config = load_servable(arguments)
    return launcher.start(config, _serve_arguments(arguments), arguments.run_dir)


def _serve_arguments(arguments: argparse.Namespace) -> list[str]:
    """Convert the arguments of `start` into those of `serve`. Hashes replace the API keys."""
    pairs = [("--config", arguments.config), ("--model", arguments.model)]
    pairs += [("--set", override) for override in arguments.overrides]
    return [text for name, value in pairs if value is not None for text in (name, str(value))]


def run_stop(arguments: argparse.Namespace) -> int:
    return launcher.stop(arguments.run_dir, arguments.port)


def run_file(arguments: argparse.Namespace) -> int:
    if not arguments.source.is_file():
        raise ConfigError(f"{arguments.source}: no such file")
    config = load_servable(arguments)
    configure_logging(config.serving.log_level, "master")
    from llm_serving import master

    counts = master.run_batch(config, arguments.source, arguments.target)
    say(f"{arguments.target}: {counts.completed} of {counts.total} lines answered, {counts.failed} refused or failed")
    return EXIT_FAILED if counts.failed else 0
