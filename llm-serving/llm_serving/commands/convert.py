"""`llm-serving convert`: a model from MindFormers' form into Hugging Face's, and back."""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_serving.commands.arguments import Subcommands, say


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "convert", help="write a model in the form of Hugging Face or of MindFormers", allow_abbrev=False
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder, or one *.safetensors or *.ckpt")
    parser.add_argument("target", type=Path, metavar="OUT", help="folder that does not exist")
    parser.add_argument("--to", required=True, choices=("hf", "mindformers"), help="whose names the tensors get")
    parser.add_argument("--files", default="safetensors", choices=("safetensors", "ckpt"), help="default: safetensors")
    parser.add_argument(
        "--joined", choices=("grouped", "stacked"), help="rows of w_qkv: grouped = MindFormers 1.4 and newer"
    )
    parser.add_argument("--config", type=Path, metavar="YAML", help="MindFormers YAML, for lack of a config.json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving.commands.conversion import convert

    joined, yaml = arguments.joined, arguments.config
    convert(arguments.source, arguments.target, arguments.to, files=arguments.files, order=joined, yaml=yaml)
    say(f"{arguments.target}: done")
    return 0
