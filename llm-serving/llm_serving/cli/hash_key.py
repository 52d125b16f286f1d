"""`llm-serving hash-key`: what a configuration has in place of an API key."""

from __future__ import annotations

import argparse
import getpass
import sys

from llm_serving.cli.arguments import API_KEY, Subcommands
from llm_serving.errors import ConfigError


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "hash-key", help="read an API key and print what `api_keys` has in its place", allow_abbrev=False
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving.server.middleware.authentication import hash_key

    # From standard input: an argument would stay in the shell's history and in the list of processes.
    if sys.stdin is None:  # it was closed
        raise ConfigError("hash-key reads the API key from standard input, which is closed")
    key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if not API_KEY.fullmatch(key):
        raise ConfigError("an API key must be 16 to 512 printable ASCII characters without spaces")
    print(hash_key(key))
    return 0
