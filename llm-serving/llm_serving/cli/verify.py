"""`llm-serving verify`: the answers of receipts, computed again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from llm_serving.cli.arguments import Subcommands, add_config_arguments, load_servable, say
from llm_serving.config import ServingConfig, load_config
from llm_serving.log import configure_logging


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "verify", help="compute the answers of receipts again, alone, and say what differs", allow_abbrev=False
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="RECEIPT",
        help="JSON or JSON lines: receipts, or answers with one; - is stdin",
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving.cli.receipt_file import verify_file

    config, overrides = load_servable(arguments), list(arguments.overrides)
    configure_logging("WARNING", "verify")

    def load(more: Sequence[str]) -> ServingConfig:
        return load_config(arguments.config, [*overrides, *more], arguments.model) if more else config

    return verify_file(arguments.file, load, say, print)
