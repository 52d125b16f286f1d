"""`llm-serving quantize`: a model with weights of 8 or 4 bits."""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_serving.commands.arguments import Subcommands, say


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "quantize", help="write a model with weights of 8 or 4 bits, as compressed-tensors does", allow_abbrev=False
    )
    parser.add_argument("source", type=Path, metavar="FOLDER", help="folder of a model that is not quantised")
    parser.add_argument("target", type=Path, metavar="OUT", help="folder that does not exist")
    parser.add_argument(
        "--format",
        required=True,
        choices=("w8a8", "w8a16", "w4a16", "w4a8"),
        help="bits of weights and of activations; w8: a scale for each row",
    )
    parser.add_argument("--group-size", type=int, metavar="N", help="columns that share a scale of 4 bits; default 128")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving.commands.quantization import quantize

    quantize(arguments.source, arguments.target, arguments.format, arguments.group_size)
    say(f"{arguments.target}: done")
    return 0
