"""`llm-serving reload`: a running server takes over what its YAML says now."""

from __future__ import annotations

import argparse
import json

from llm_serving.cli.arguments import Subcommands, add_server_arguments, api_key_of


def add_to(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "reload",
        help="have a running server read its YAML again: limits, keys, classes, policy and budgets",
        allow_abbrev=False,
    )
    add_server_arguments(parser, "an administrator's; ")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving.cli.server_call import ServerRefusal, opened

    with opened(arguments.url, "/v1/reload", api_key_of(arguments), method="POST") as response:
        try:
            answer = json.load(response)
            changed, late = list(map(str, answer["changed"])), list(map(int, answer["late"]))
        except (ValueError, LookupError, TypeError):
            raise ServerRefusal(f"{arguments.url} does not answer as this server does") from None
    print("\n".join(changed) or "nothing has changed", flush=True)
    if late:
        print(f"replicas {', '.join(map(str, late))} follow when their WorkAgents are there again", flush=True)
    return 0
