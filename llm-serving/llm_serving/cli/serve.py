"""`llm-serving serve`: the master, its WorkAgents and the HTTP server in the foreground."""

from __future__ import annotations

import argparse

from llm_serving.cli.arguments import Subcommands, add_config_arguments, load_servable
from llm_serving.log import configure_logging, get_logger


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "serve", help="run the master, its WorkAgents and the HTTP server until interrupted", allow_abbrev=False
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = load_servable(arguments)
    configure_logging(config.serving.log_level, "master")
    for notice in config.notices:
        get_logger(__name__).warning(notice)
    from llm_serving import master

    return int(master.run(config))
