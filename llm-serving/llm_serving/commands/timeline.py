"""`llm-serving timeline`: what a running server did lately, as a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_serving.commands.arguments import DEFAULT_URL, Subcommands
from llm_serving.commands.flags import API_KEY_VARIABLE


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "timeline", help="save what a running server did lately as a trace for ui.perfetto.dev", allow_abbrev=False
    )
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        help=f"of the server; its API key, if it wants one, in the environment variable {API_KEY_VARIABLE}",
    )
    parser.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE")
    parser.add_argument("--steps", type=int, metavar="N", help="only the newest N steps")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving.commands.trace_file import save_timeline

    num_events = save_timeline(arguments.url, arguments.output, arguments.steps)
    print(f"{arguments.output}: {num_events} events; open it at https://ui.perfetto.dev")
    return 0
