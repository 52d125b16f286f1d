"""`llm-serving models`: which models are here by name, and what one would take."""

from __future__ import annotations

import argparse

from llm_serving.cli.arguments import Subcommands, say
from llm_serving.cli.stored_models import cached_table, stored_size
from llm_serving.config import load_config


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "models", help="list the models of the local caches, or what one takes and whether it fits", allow_abbrev=False
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help="folder or name; only its configuration is downloaded")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        lines = list(cached_table())
        if len(lines) == 1:
            say("the local caches hold no model")
    else:
        config = load_config(model=arguments.name)
        lines = [*stored_size(config).lines, *(f"notice: {notice}" for notice in config.notices)]
    print("\n".join(lines), flush=True)
    return 0
