"""`llm-serving reload`: make a running server read its YAML again."""

from __future__ import annotations

import argparse
from typing import Any

from llm_serving_tools.server_client import ADMINISTRATOR_KEY, add_server_arguments, call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser, ADMINISTRATOR_KEY)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    changed, late = call(arguments, "/v1/reload", _changes, "POST")
    print("\n".join(changed) or "nothing has changed", flush=True)
    if late:
        print(
            f"replicas {', '.join(map(str, late))} apply the changes when their WorkAgents have restarted", flush=True
        )
    return 0


def _changes(content: Any) -> tuple[list[str], list[int]]:
    return list(map(str, content["changed"])), list(map(int, content["late"]))
