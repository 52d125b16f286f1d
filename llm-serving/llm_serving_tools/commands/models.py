"""`llm-serving models`: list the models in the local caches, or show the memory that a model needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_serving.cli.arguments import say, stored_size
from llm_serving.config import load_config
from llm_serving.errors import ModelError
from llm_serving.hub import HUBS
from llm_serving.hub.base import missing_files
from llm_serving.models.spec import CONFIG_NAME, ModelSpec

from llm_serving_tools.text_table import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="folder or name; only its configuration is downloaded")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        models = [model for hub in HUBS.values() for model in hub().all_cached()]
        rows = [(each.name, each.hub, each.commit[:12], _state_of(each.folder)) for each in models]
        if not rows:
            say("the local caches hold no model")
        lines = aligned([("NAME", "HUB", "REVISION", "STATE"), *rows])
    else:
        config = load_config(model=arguments.name)
        lines = [*stored_size(config).lines, *(f"notice: {notice}" for notice in config.notices)]
    print("\n".join(lines), flush=True)
    return 0


def _state_of(folder: Path) -> str:
    try:
        missing = missing_files(folder)
        if CONFIG_NAME not in missing:
            ModelSpec.from_folder(folder)
    except ModelError as error:
        return f"not supported: {str(error).removeprefix(f'{folder}/{CONFIG_NAME}: ')}"
    return f"incomplete, missing: {', '.join(missing[:3])}" if missing else "complete"
