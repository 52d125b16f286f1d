"""`llm-serving reload`: make a running server read its YAML again."""

from __future__ import annotations

import argparse
import json

from llm_serving_tools.server_client import (
    ADMINISTRATOR_KEY,
    ServerRefusal,
    add_server_arguments,
    api_key_of,
    opened,
    url_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser, ADMINISTRATOR_KEY)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with opened(url_of(arguments), "/v1/reload", api_key_of(arguments), method="POST") as response:
        try:
            answer = json.load(response)
            changed, late = list(map(str, answer["changed"])), list(map(int, answer["late"]))
        except (ValueError, LookupError, TypeError):
            raise ServerRefusal(f"{url_of(arguments)} does not answer like an llm-serving server") from None
    print("\n".join(changed) or "nothing has changed", flush=True)
    if late:
        print(
            f"replicas {', '.join(map(str, late))} apply the changes when their WorkAgents have restarted", flush=True
        )
    return 0
