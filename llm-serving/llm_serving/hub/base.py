"""Code shared by all hubs: interface, local caches, model names, file selection and download progress."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TextIO

from tqdm import tqdm

from llm_serving.errors import ModelError
from llm_serving.formats.folder import INDEX_NAME, SINGLE_NAME, indexed_names
from llm_serving.models.pooling import MODULE_FILE, MODULES_NAME, missing_module_files
from llm_serving.models.spec import CONFIG_NAME

_TITLES: Final = {"huggingface": "Hugging Face", "modelscope": "ModelScope"}
_FALSE: Final = ("", "0", "no", "off", "false")
_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_NAME: Final = re.compile(rf"{_PART}/{_PART}")
_FILE_ENDINGS: Final = (".safetensors", ".json", ".ckpt", ".bin", ".pt", ".pth", ".gguf", ".yaml", ".yml", ".git")
_REVISION: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,254}[A-Za-z0-9_-])?")
NAME_FORM: Final = "the name of a model on a hub is owner/name, such as Qwen/Qwen3-0.6B"
LOG_INTERVAL_S: Final = 10.0
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "*.tiktoken", "merges.txt", "vocab.txt")
"""Patterns of tokenizer files. A model folder must have a file that matches one of them."""
_SMALL: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_TEMPLATE: Final = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_MAX_SMALL_BYTES: Final = 2**27


@dataclass(frozen=True)
class HubModel:
    """One revision (branch, tag or commit) of a model, and its folder in the local cache of a hub.

    `sizes`: bytes of each file on the hub, by file name. None means that nothing is downloaded, because the folder was
    found in the cache.
    """

    name: str
    hub: str
    revision: str
    commit: str
    folder: Path
    sizes: Mapping[str, int] | None = None
    website: str = ""

    @property
    def source(self) -> str:
        how = "in the local cache, nothing is downloaded" if self.sizes is None else "downloaded from the hub"
        return f"{self.name} is revision {self.commit} of {_TITLES[self.hub]}, {how}: {self.folder}"

    @property
    def weight_sizes(self) -> dict[str, int]:
        """Bytes of each weight file, by file name. Raise ModelError if the hub has no weights in a supported format."""
        if self.sizes is None:
            names = weight_files([path.name for path in self.folder.iterdir()], self.folder / INDEX_NAME)
            return {name: (self.folder / name).stat().st_size for name in names}
        return {name: self.sizes[name] for name in weight_files(self.sizes, self.folder / INDEX_NAME)}


class Hub(Protocol):
    """A hub of models. Every method may raise ModelError, whose text says what to do."""

    main_branch: ClassVar[str]

    def cached(self, name: str, revision: str) -> HubModel | None:
        """Return a model in the local cache, perhaps incomplete, or None. Do not use the network."""

    def all_cached(self) -> Iterator[HubModel]:
        """Yield the models in the local cache by name."""

    def listed(self, name: str, revision: str) -> HubModel:
        """Ask the hub for a model. Return it with the sizes of its files."""

    def fetch(self, model: HubModel, files: Sequence[str]) -> None:
        """Download files into the model's folder, and resume interrupted downloads."""

    def unfinished_bytes(self, model: HubModel, sizes: Mapping[str, int]) -> int:
        """Return how many bytes of the files in `sizes` interrupted downloads have left on disk."""

    def settle(self, model: HubModel) -> None:
        """Record in the cache which commit a branch or tag refers to. Call this when the download is complete."""


def is_offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").strip().lower() not in _FALSE for name in names)


def expanded(path: str, variable: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ModelError(f"there is no home folder for {path}; set {variable} to a folder") from None


def why_not_a_name(text: str, folders: Sequence[Path]) -> str | None:
    """Return why `text` cannot be a hub's model name (owner/model), or None if it can. It cannot if `owner` is a
    subfolder of one of `folders`, because `text` is then a path.
    """
    if text.startswith(("/", ".", "~")) or text.endswith("/") or "\\" in text:
        return "it is written as a path"
    if not _NAME.fullmatch(text) or "--" in text or ".." in text:
        return NAME_FORM
    if text.lower().endswith(_FILE_ENDINGS):
        return "it ends like a file name"
    owner = text.partition("/")[0]
    if any((folder / owner).is_dir() for folder in folders):
        return f"a folder {owner} exists here, so it is read as a path"
    return None


def is_revision(text: str) -> bool:
    """Return whether a text can be a branch, tag or commit. Other texts would be unsafe in URLs and paths."""
    return _REVISION.fullmatch(text) is not None and ".." not in text and "//" not in text


class DownloadProgress(tqdm):
    """A tqdm bar that is always shown. If the output is not a terminal, it writes one line per update."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)  # an argument that only the progress bar of huggingface_hub takes
        options |= {"disable": False, "file": options.get("file") or sys.stderr, "leave": True}
        if not options["file"].isatty():
            options |= {
                "file": _LineStream(options["file"]),
                "mininterval": LOG_INTERVAL_S,
                "ascii": True,
                "ncols": 100,
            }
        super().__init__(*args, **options)


class _LineStream:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        for part in text.split("\r"):
            if part.strip():
                self._stream.write(part.rstrip("\n ") + "\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


def small_files(sizes: Mapping[str, int]) -> list[str]:
    patterns = (MODULE_FILE, _TEMPLATE)
    matching = [name for name in sizes if _matches(name, _SMALL) or any(each.fullmatch(name) for each in patterns)]
    names = [name for name in matching if sizes[name] <= _MAX_SMALL_BYTES]
    unwanted = [name for name in names if name.endswith(".index.json") and name != INDEX_NAME]
    return sorted(set(names) - set(unwanted), key=lambda name: (name != CONFIG_NAME, name))


def weight_files(names: Collection[str], index: Path) -> list[str]:
    """Return the safetensors files among `names` to download, in order. `index`: local copy of the index file."""
    if INDEX_NAME in names:
        return indexed_names(index)
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    return sorted(name for name in names if _matches(name, ("*.safetensors",)))


def missing_files(folder: Path) -> list[str]:
    """Return the names or patterns of required files that a folder lacks. Raise ModelError if its index is invalid."""
    names = [path.name for path in folder.iterdir() if path.exists()] if folder.is_dir() else []
    missing = [] if CONFIG_NAME in names else [CONFIG_NAME]
    if not any(_matches(name, TOKENIZERS) for name in names):
        missing.append("a tokenizer")
    if MODULES_NAME in names:
        missing += missing_module_files(folder)
    weights = weight_files(names, folder / INDEX_NAME)
    return missing + ([name for name in weights if name not in names] if weights else ["*.safetensors"])


def _matches(name: str, patterns: Collection[str]) -> bool:
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
