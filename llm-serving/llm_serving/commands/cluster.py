"""`llm-serving cluster status`: machines and places of a Ray cluster."""

from __future__ import annotations

import argparse

from llm_serving.commands.arguments import Subcommands


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("cluster", help="look at a Ray cluster", allow_abbrev=False)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = subcommands.add_parser(
        "status", help="its machines, what is free on them, and the WorkAgents they have", allow_abbrev=False
    )
    status.add_argument("--address", default="auto", help="as cluster_config.address; default: one on this machine")
    status.set_defaults(run=run_status)


def run_status(arguments: argparse.Namespace) -> int:
    from llm_serving.executor.ray_status import status_lines

    print("\n".join(status_lines(arguments.address)), flush=True)
    return 0
