"""`llm-serving version`."""

from __future__ import annotations

import argparse

from llm_serving import __version__
from llm_serving.cli.arguments import Subcommands


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("version", help="print the version", allow_abbrev=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print(f"llm-serving {__version__}")
    return 0
