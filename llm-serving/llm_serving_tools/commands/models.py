"""`llm-serving models`: list the models in the local caches, or show the memory that a model needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llm_serving.cli.arguments import say, stored_size
from llm_serving.config import load_config
from llm_serving.errors import ModelError
from llm_serving.hub.base import (
    DEFAULT_REVISIONS,
    huggingface_cache,
    huggingface_snapshot,
    missing_files,
    modelscope_cache,
)
from llm_serving.models.spec import CONFIG_NAME, ModelSpec

from llm_serving_tools.text_table import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="folder or name; only its configuration is downloaded")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        rows = [(each.name, each.hub, each.revision[:12], _state_of(each.folder)) for each in cached_models()]
        if not rows:
            say("the local caches hold no model")
        lines = aligned([("NAME", "HUB", "REVISION", "STATE"), *rows])
    else:
        config = load_config(model=arguments.name)
        lines = [*stored_size(config).lines, *(f"notice: {notice}" for notice in config.notices)]
    print("\n".join(lines), flush=True)
    return 0


class CachedModel(NamedTuple):
    name: str
    hub: str
    revision: str
    folder: Path


def cached_models() -> Iterator[CachedModel]:
    """Yield cached models by hub, then by name: main revisions of Hugging Face, and all revisions of ModelScope."""
    for model in sorted(huggingface_cache().glob("models--*--*")):
        name = model.name.removeprefix("models--").replace("--", "/")
        folder = huggingface_snapshot(name, DEFAULT_REVISIONS["huggingface"])
        if folder is not None:
            yield CachedModel(name, "huggingface", folder.name, folder)
    for folder in sorted(modelscope_cache().glob("models/*--*/snapshots/*")):
        name = folder.parents[1].name.replace("--", "/")
        yield CachedModel(name, "modelscope", folder.name, folder)


def _state_of(folder: Path) -> str:
    try:
        missing = missing_files(folder)
        if CONFIG_NAME not in missing:
            ModelSpec.from_folder(folder)
    except ModelError as error:
        return f"not supported: {str(error).removeprefix(f'{folder}/{CONFIG_NAME}: ')}"
    return f"incomplete, missing: {', '.join(missing[:3])}" if missing else "complete"
