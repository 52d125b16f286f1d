"""`llm-serving stop`: stop servers in the background."""

from __future__ import annotations

import argparse

from llm_serving_tools.background_server import add_run_dir, stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, metavar="N", help="stop only the server on this port")
    add_run_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return stop(arguments.run_dir, arguments.port)
