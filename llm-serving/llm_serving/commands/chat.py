"""`llm-serving chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import argparse
import os

from llm_serving.commands.arguments import DEFAULT_URL, Subcommands
from llm_serving.commands.flags import API_KEY_VARIABLE
from llm_serving.errors import ConfigError


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser("chat", help="talk with a running server in the terminal", allow_abbrev=False)
    parser.add_argument("--url", default=DEFAULT_URL, help="of the server")
    parser.add_argument(
        "--api-key", metavar="KEY", default="", help=f"better in the environment variable {API_KEY_VARIABLE}"
    )
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
    key = arguments.api_key or os.environ.get(API_KEY_VARIABLE, "")
    chat(ChatClient(arguments.url, key, arguments.model, arguments.system, parameters))
    return 0
