"""Commands about the configuration and the installation: `config`, `hash-key` and `version`."""

from __future__ import annotations

import argparse
import getpass
import sys
from pathlib import Path

from llm_serving import __version__
from llm_serving.cli.arguments import API_KEY, Runner, Subcommands, add_command, add_config_arguments
from llm_serving.core.process import import_optional
from llm_serving.errors import ConfigError


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("config", help="check, document or import a configuration", allow_abbrev=False)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "check a configuration; print the effective values and their sources"
    add_config_arguments(add_command(subcommands, "check", _tool("check_config", "check"), text))
    text = "print a YAML with every key, its default and its meaning"
    add_command(subcommands, "reference", _tool("print_reference", "reference"), text)
    text = "write the config.json of MindIE-Service as a YAML"
    importing = add_command(subcommands, "import", _tool("import_mindie", "import"), text)
    importing.add_argument("source", type=Path, metavar="CONFIG_JSON")
    importing.add_argument("--output", type=Path, metavar="YAML", help="new file; default: standard output")
    add_command(commands, "hash-key", run_hash_key, "read an API key and print its hash for `api_keys`")
    add_command(commands, "version", run_version, "print the version")


def _tool(module: str, command: str) -> Runner:
    """Return a function that imports a module of the tools and runs it."""
    name, key = f"llm_serving_tools.commands.{module}", f"llm-serving config {command}"
    return lambda arguments: int(import_optional(name, key).run(arguments))


def run_hash_key(arguments: argparse.Namespace) -> int:
    from llm_serving.server.middleware.authentication import hash_key

    # The key comes from standard input, because an argument stays in the shell's history and the list of processes.
    if sys.stdin is None:  # closed
        raise ConfigError("hash-key reads the API key from standard input, which is closed")
    try:
        key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    except (EOFError, UnicodeDecodeError):
        key = ""
    key = key.strip()
    if not API_KEY.fullmatch(key):
        raise ConfigError("an API key must be 16 to 512 printable ASCII characters without spaces")
    print(hash_key(key))
    return 0


def run_version(arguments: argparse.Namespace) -> int:
    print(f"llm-serving {__version__}")
    return 0
