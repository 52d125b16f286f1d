"""`llm-serving start` and `stop`: a server in the background."""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_serving.cli import launcher
from llm_serving.cli.arguments import Subcommands, add_config_arguments, load_servable


def add_to(commands: Subcommands) -> None:
    start = commands.add_parser(
        "start", help="serve in the background; returns when requests are answered", allow_abbrev=False
    )
    add_config_arguments(start)
    _add_run_dir(start)
    start.set_defaults(run=run_start)

    stop = commands.add_parser("stop", help="end what `start` started", allow_abbrev=False)
    stop.add_argument("--port", type=int, metavar="N", help="only the server on this port")
    _add_run_dir(stop)
    stop.set_defaults(run=run_stop)


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    help_text = "where pids and logs of background servers are kept"
    parser.add_argument("--run-dir", type=Path, default=Path(".run"), metavar="FOLDER", help=help_text)


def run_start(arguments: argparse.Namespace) -> int:
    config = load_servable(arguments)
    return launcher.start(config, _serve_arguments(arguments), arguments.run_dir)


def _serve_arguments(arguments: argparse.Namespace) -> list[str]:
    """The arguments of `serve` that mean the same; of a key they have the hash."""
    pairs = [("--config", arguments.config), ("--model", arguments.model)]
    pairs += [("--set", override) for override in arguments.overrides]
    return [text for name, value in pairs if value is not None for text in (name, str(value))]


def run_stop(arguments: argparse.Namespace) -> int:
    return launcher.stop(arguments.run_dir, arguments.port)
