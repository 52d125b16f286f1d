"""`llm-serving run-batch`: a file of requests without a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_serving.cli.arguments import EXIT_FAILED, Subcommands, add_config_arguments, load_servable, say
from llm_serving.errors import ConfigError
from llm_serving.log import configure_logging


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "run-batch",
        help="answer a file of requests without a server; a run that ends early goes on",
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="IN", help="JSON lines: custom_id, method, url, body")
    parser.add_argument(
        "target", type=Path, metavar="OUT", help="gets the answers in their order; OUT.errors the others"
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.source.is_file():
        raise ConfigError(f"{arguments.source}: no such file")
    config = load_servable(arguments)
    configure_logging(config.serving.log_level, "master")
    from llm_serving import master

    counts = master.run_batch(config, arguments.source, arguments.target)
    say(f"{arguments.target}: {counts.completed} of {counts.total} lines answered, {counts.failed} refused or failed")
    return EXIT_FAILED if counts.failed else 0
