"""Models given by name, from Hugging Face or ModelScope. Only such models use the network."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_serving.errors import ModelError
from llm_serving.formats.folder import INDEX_NAME
from llm_serving.hub.base import (
    DEFAULT_REVISIONS,
    NAME_FORM,
    Hub,
    Listing,
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


@dataclass(frozen=True)
class HubModel:
    name: str
    hub: str
    commit: str
    folder: Path
    listing: Listing | None = None

    @property
    def source(self) -> str:
        how = "in the local cache, nothing is downloaded" if self.listing is None else "downloaded from the hub"
        return f"{self.name} is revision {self.commit} of {HUBS[self.hub].title}, {how}: {self.folder}"

    @property
    def weight_sizes(self) -> dict[str, int]:
        """Bytes of each weight file, by file name. Raise ModelError if the hub has no weights in a supported format."""
        if self.listing is None:
            names = weight_files([path.name for path in self.folder.iterdir()], self.folder / INDEX_NAME)
            return {name: (self.folder / name).stat().st_size for name in names}
        return {name: self.listing.sizes[name] for name in _weights_of(self.listing)}


def locate(name: str, hub: str = "auto", revision: str | None = None) -> HubModel:
    """Find a model in the local caches, or download its configuration and tokenizer, but not its weights.

    `hub`: key of `HUBS`; `auto` selects the first hub whose cache has the model, otherwise Hugging Face. `revision`:
    branch, tag or commit, by default the main branch. Raise ModelError if the model does not exist, cannot be reached,
    or is of an unsupported family.
    """
    asked = [hub] if hub in HUBS else list(HUBS)
    incomplete: list[str] = []
    for each in asked:
        requested = revision or DEFAULT_REVISIONS[each]
        folder = HUBS[each]().snapshot(name, requested)
        if folder is None:
            continue
        try:
            missing = missing_files(folder)
        except ModelError as error:  # the cache of another hub may be complete
            incomplete.append(str(error))
            continue
        if not missing:
            return HubModel(name, each, folder.name if folder.parent.name == "snapshots" else "unknown", folder)
        incomplete.append(f"{folder} lacks {', '.join(missing[:3])}")
    if is_offline():
        what = "; ".join(incomplete) or "no local cache has it"
        raise ModelError(
            f"{name}: {what}, and HF_HUB_OFFLINE forbids the download: unset it, or set HF_HOME, HF_HUB_CACHE or "
            f"MODELSCOPE_CACHE to the cache that has the model"
        )
    listing = HUBS[asked[0]]().listing(name, revision or DEFAULT_REVISIONS[asked[0]])
    return _download_small_files(asked[0], listing)


def download(model: HubModel, say: Callable[[str], None]) -> None:
    """Download the missing files of a located model, weights last. After a ModelError, another call resumes."""
    listing = model.listing
    if listing is None:
        return
    hub = HUBS[model.hub]()
    weights = [name for name in model.weight_sizes if not (model.folder / name).exists()]
    _check_disk(hub, listing, weights)
    num_bytes = sum(listing.sizes[name] for name in weights)
    say(
        f"downloading {listing.name}, revision {listing.commit}, from {listing.website}: {len(weights)} files of "
        f"weights, {readable_size(num_bytes)}, to {model.folder}"
    )
    hub.fetch(listing, weights)
    hub.settle(listing)


def _download_small_files(key: str, listing: Listing) -> HubModel:
    hub = HUBS[key]()
    if CONFIG_NAME not in listing.sizes:
        raise ModelError(f"{listing.website} has no {CONFIG_NAME}: it is not a language model in Hugging Face format")
    hub.fetch(listing, [CONFIG_NAME])
    ModelSpec.from_folder(listing.folder)
    if not any(name.endswith(".safetensors") for name in listing.sizes):
        raise ModelError(_no_weights(listing))
    hub.fetch(listing, small_files(listing.sizes))
    if missing := [name for name in _weights_of(listing) if name not in listing.sizes]:
        raise ModelError(f"{listing.website}: {INDEX_NAME} names {missing[0]}, which the hub does not have")
    return HubModel(listing.name, key, listing.commit, listing.folder, listing)


def _weights_of(listing: Listing) -> list[str]:
    return weight_files(listing.sizes, listing.folder / INDEX_NAME)


def _no_weights(listing: Listing) -> str:
    endings = sorted({f"*{Path(name).suffix}" for name in listing.sizes if name.endswith((".bin", ".pth", ".gguf"))})
    others = f" but {', '.join(endings)}, which are not read" if endings else ""
    return (
        f"{listing.website} has no *.safetensors{others}; look for a revision or a copy of the model in safetensors, "
        f"or download and convert it and name the folder"
    )


def _check_disk(hub: Hub, listing: Listing, weights: list[str]) -> None:
    needed = sum(listing.sizes[name] for name in weights) - hub.unfinished_bytes(listing, weights)
    free = shutil.disk_usage(listing.folder).free
    if needed > free:
        raise ModelError(
            f"{listing.name}: {listing.folder} must have {readable_size(needed)} free for the weights. Found: "
            f"{readable_size(free)}; set HF_HOME or MODELSCOPE_CACHE to a folder on another disk"
        )
