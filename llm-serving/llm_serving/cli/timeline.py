"""`llm-serving timeline`: save the latest steps of a running server as a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from llm_serving.cli.arguments import Subcommands, add_command, add_server_arguments, api_key_of, url_of
from llm_serving.cli.server_call import opened
from llm_serving.errors import ConfigError, LLMServingError


def add_to(commands: Subcommands) -> None:
    parser = add_command(
        commands, "timeline", run, "save the newest steps of a running server as a trace for ui.perfetto.dev"
    )
    add_server_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE", help="default: trace.json")
    parser.add_argument("--steps", type=int, metavar="N", help="only the newest N steps")


def run(arguments: argparse.Namespace) -> int:
    num_events = save_timeline(url_of(arguments), arguments.output, arguments.steps, api_key_of(arguments))
    print(f"{arguments.output}: {num_events} events; open it at https://ui.perfetto.dev")
    return 0


def save_timeline(url: str, output: Path, num_steps: int | None = None, key: str = "") -> int:
    """Write the response of `GET /v1/timeline` to a file. Return the number of its events.

    Raise LLMServingError if the server refuses or sends no trace, ConfigError if the file cannot be written.
    """
    query = "" if num_steps is None else f"?steps={num_steps}"
    with opened(url, f"/v1/timeline{query}", key) as answer:
        content = answer.read()
    try:
        events = json.loads(content)["traceEvents"]
        output.write_bytes(content)
    except (ValueError, KeyError, TypeError):
        raise LLMServingError(f"{url} sent a response that is not a trace") from None
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror or error}") from None
    return len(events)
