"""`llm-serving start`: serve in the background."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from llm_serving.cli.arguments import add_config_arguments, load_servable, say
from llm_serving.config.schema import ServingConfig

from llm_serving_tools.background_server import add_run_dir, short, start_silently
from llm_serving_tools.signals import ended_in_order


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_run_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = load_servable(arguments)
    return start(config, _serve_arguments(arguments), arguments.run_dir)


def _serve_arguments(arguments: argparse.Namespace) -> list[str]:
    """Convert the arguments of `start` into those of `serve`. Hashes replace the API keys."""
    pairs = [("--config", arguments.config), ("--model", arguments.model)]
    pairs += [("--set", override) for override in arguments.overrides]
    return [text for name, value in pairs if value is not None for text in (name, str(value))]


def start(config: ServingConfig, serve_arguments: Sequence[str], run_dir: Path) -> int:
    with ended_in_order():
        log = start_silently(config, serve_arguments, run_dir)
    say(f"serving {config.model.model_name} on {config.serving.url}  (log: {short(log)})")
    print(curl_line(config))
    return 0


def curl_line(config: ServingConfig) -> str:
    body = json.dumps({"prompt": "Add 17 and 25.", "max_tokens": 16, "temperature": 0})
    url = f"{config.serving.url}/v1/completions"
    unverified = "k" if config.serving.ssl_certfile is not None else ""  # the certificate rarely names this address
    key = " -H 'Authorization: Bearer KEY'" if config.api_keys else ""
    return f"curl -s{unverified} {url}{key} -H 'Content-Type: application/json' -d '{body}'"
