"""Models given by name, from Hugging Face or ModelScope. Only such models use the network."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from llm_serving.errors import ModelError
from llm_serving.formats.folder import INDEX_NAME
from llm_serving.hub.base import (
    NAME_FORM,
    Hub,
    HubModel,
    is_offline,
    is_revision,
    missing_files,
    small_files,
    weight_files,
    why_not_a_name,
)
from llm_serving.hub.huggingface import HuggingFace
from llm_serving.hub.modelscope import ModelScope
from llm_serving.models.memory import readable_size
from llm_serving.models.spec import CONFIG_NAME, ModelSpec

__all__ = ["HUBS", "NAME_FORM", "HubModel", "download", "is_revision", "locate", "why_not_a_name"]

HUBS: Final[Mapping[str, type[Hub]]] = {"huggingface": HuggingFace, "modelscope": ModelScope}


def locate(name: str, hub: str = "auto", revision: str | None = None) -> HubModel:
    """Find a model in the local caches, or download its configuration and tokenizer, but not its weights.

    `hub`: key of `HUBS`; `auto` selects the first hub whose cache has the model, otherwise Hugging Face. `revision`:
    branch, tag or commit, by default the main branch. Raise ModelError if the model does not exist, cannot be reached,
    or is of an unsupported family.
    """
    asked = [HUBS[hub]()] if hub in HUBS else [each() for each in HUBS.values()]
    incomplete: list[str] = []
    for each in asked:
        model = each.cached(name, revision or each.main_branch)
        if model is None:
            continue
        try:
            missing = missing_files(model.folder)
        except ModelError as error:  # the cache of another hub may be complete
            incomplete.append(str(error))
            continue
        if not missing:
            return model
        incomplete.append(f"{model.folder} lacks {', '.join(missing[:3])}")
    if is_offline():
        what = "; ".join(incomplete) or "no local cache has it"
        raise ModelError(
            f"{name}: {what}, and HF_HUB_OFFLINE forbids the download: unset it, or set HF_HOME, HF_HUB_CACHE or "
            f"MODELSCOPE_CACHE to the cache that has the model"
        )
    model = asked[0].listed(name, revision or asked[0].main_branch)
    _download_small_files(asked[0], model, model.sizes or {})
    return model


def download(model: HubModel, say: Callable[[str], None]) -> None:
    """Download the missing files of a located model, weights last. After a ModelError, another call resumes."""
    if model.sizes is None:
        return
    hub = HUBS[model.hub]()
    sizes = {name: size for name, size in model.weight_sizes.items() if not (model.folder / name).exists()}
    needed = sum(sizes.values()) - hub.unfinished_bytes(model, sizes)
    free = shutil.disk_usage(model.folder).free
    if needed > free:
        raise ModelError(
            f"{model.name}: {model.folder} must have {readable_size(needed)} free for the weights. Found: "
            f"{readable_size(free)}; set HF_HOME or MODELSCOPE_CACHE to a folder on another disk"
        )
    say(
        f"downloading {model.name}, revision {model.commit}, from {model.website}: {len(sizes)} files of "
        f"weights, {readable_size(sum(sizes.values()))}, to {model.folder}"
    )
    hub.fetch(model, list(sizes))
    hub.settle(model)


def _download_small_files(hub: Hub, model: HubModel, sizes: Mapping[str, int]) -> None:
    if CONFIG_NAME not in sizes:
        raise ModelError(f"{model.website} has no {CONFIG_NAME}: it is not a language model in Hugging Face format")
    hub.fetch(model, [CONFIG_NAME])
    ModelSpec.from_folder(model.folder)
    if not any(name.endswith(".safetensors") for name in sizes):
        endings = sorted({f"*{Path(name).suffix}" for name in sizes if name.endswith((".bin", ".pth", ".gguf"))})
        others = f" but {', '.join(endings)}, which are not read" if endings else ""
        raise ModelError(
            f"{model.website} has no *.safetensors{others}; look for a revision or a copy of the model in safetensors, "
            f"or download and convert it and name the folder"
        )
    hub.fetch(model, small_files(sizes))
    if missing := [name for name in weight_files(sizes, model.folder / INDEX_NAME) if name not in sizes]:
        raise ModelError(f"{model.website}: {INDEX_NAME} names {missing[0]}, which the hub does not have")
