"""Every model that the local caches hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llm_serving.hub.caches import DEFAULT_REVISIONS, huggingface_cache, huggingface_snapshot, modelscope_cache


class CachedModel(NamedTuple):
    name: str
    hub: str
    revision: str
    folder: Path


def cached_models() -> Iterator[CachedModel]:
    """By name: of Hugging Face the main revision, of ModelScope every one."""
    for model in sorted(huggingface_cache().glob("models--*--*")):
        name = model.name.removeprefix("models--").replace("--", "/")
        folder = huggingface_snapshot(name, DEFAULT_REVISIONS["huggingface"])
        if folder is not None:
            yield CachedModel(name, "huggingface", folder.name, folder)
    for folder in sorted(modelscope_cache().glob("models/*--*/snapshots/*")):
        name = folder.parents[1].name.replace("--", "/")
        yield CachedModel(name, "modelscope", folder.name, folder)
