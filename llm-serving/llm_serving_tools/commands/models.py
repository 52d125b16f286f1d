"""`llm-serving models`: list the models in the local caches, or show the memory that a model needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from llm_serving.cli.arguments import say, stored_size
from llm_serving.config import load_config
from llm_serving.errors import ModelError
from llm_serving.hub import cached_models
from llm_serving.hub.base import missing_files
from llm_serving.models.spec import CONFIG_NAME, ModelSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="folder or name; only its configuration is downloaded")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        lines = list(_cached_table())
        if len(lines) == 1:
            say("the local caches hold no model")
    else:
        config = load_config(model=arguments.name)
        lines = [*stored_size(config).lines, *(f"notice: {notice}" for notice in config.notices)]
    print("\n".join(lines), flush=True)
    return 0


def _cached_table() -> Iterator[str]:
    rows = [("NAME", "HUB", "REVISION", "STATE")]
    rows += [(each.name, each.hub, each.revision[:12], _state_of(each.folder)) for each in cached_models()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  ".join([*(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)), row[3]])


def _state_of(folder: Path) -> str:
    try:
        missing = missing_files(folder)
        if CONFIG_NAME not in missing:
            ModelSpec.from_folder(folder)
    except ModelError as error:
        return f"not supported: {str(error).removeprefix(f'{folder}/{CONFIG_NAME}: ')}"
    return f"incomplete, missing: {', '.join(missing[:3])}" if missing else "complete"
