"""The command `serve`."""

from __future__ import annotations

import argparse

from llm_serving.cli.arguments import Subcommands, add_command, add_config_arguments, load_servable
from llm_serving.log import configure_logging, get_logger


def add_to(commands: Subcommands) -> None:
    text = "run the master, its WorkAgents and the HTTP server until interrupted"
    add_config_arguments(add_command(commands, "serve", run_serve, text))


def run_serve(arguments: argparse.Namespace) -> int:
    config = load_servable(arguments)
    configure_logging(config.serving.log_level, "master")
    for notice in config.notices:
        get_logger(__name__).warning(notice)
    from llm_serving import master

    return int(master.run(config))
