"""`llm-serving chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import argparse

from llm_serving.commands.arguments import Subcommands, add_server_arguments, api_key_of
from llm_serving.errors import ConfigError


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("chat", help="talk with a running server in the terminal", allow_abbrev=False)
    add_server_arguments(parser)
    parser.add_argument("--model", metavar="NAME", default="", help="name that requests give; default: none")
    parser.add_argument("--system", metavar="TEXT", default="", help="said before the conversation")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="parameters", help="a parameter of requests"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving.commands.chat_client import ChatClient
    from llm_serving.commands.conversation import chat, read_value

    parameters = {}
    for given in arguments.parameters:
        name, found, value = given.partition("=")
        if not found:
            raise ConfigError(f"--set must be NAME=VALUE. Given: {given}")
        parameters[name] = read_value(value)
    chat(ChatClient(arguments.url, api_key_of(arguments), arguments.model, arguments.system, parameters))
    return 0
