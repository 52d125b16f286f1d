"""`llm-serving timeline`: save the newest steps of a running server as a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from llm_serving.errors import ConfigError, LLMServingError

from llm_serving_tools.server_client import add_server_arguments, api_key_of, opened, url_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE", help="default: trace.json")
    parser.add_argument("--steps", type=int, metavar="N", help="only the newest N steps")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    url, output = url_of(arguments), arguments.output
    query = "" if arguments.steps is None else f"?steps={arguments.steps}"
    with opened(url, f"/v1/timeline{query}", api_key_of(arguments)) as answer:
        content = answer.read()
    try:
        events = json.loads(content)["traceEvents"]
        output.write_bytes(content)
    except (ValueError, KeyError, TypeError):
        raise LLMServingError(f"{url} sent a response that is not a trace") from None
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror or error}") from None
    print(f"{output}: {len(events)} events; open it at https://ui.perfetto.dev")
    return 0
