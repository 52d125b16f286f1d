"""What all hubs share: their interface, local caches, model names, wanted files, and the progress of a download."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TextIO

from tqdm import tqdm

from llm_serving.errors import ModelError
from llm_serving.formats.folder import INDEX_NAME, SINGLE_NAME, indexed_names
from llm_serving.models.pooling import MODULES_NAME, POOLING_FILES
from llm_serving.models.spec import CONFIG_NAME

DEFAULT_REVISIONS: Final = {"huggingface": "main", "modelscope": "master"}
"""Hub -> branch that counts where nobody names one."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_FALSE: Final = ("", "0", "no", "off", "false")
_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_NAME: Final = re.compile(rf"{_PART}/{_PART}")
_FILE_ENDINGS: Final = (".safetensors", ".json", ".ckpt", ".bin", ".pt", ".pth", ".gguf", ".yaml", ".yml", ".git")
_REVISION: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,254}[A-Za-z0-9_-])?")
NAME_FORM: Final = "the name of a model at a hub is owner/name, such as Qwen/Qwen3-0.6B"
LOG_INTERVAL_S: Final = 10.0
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "*.tiktoken", "merges.txt")
"""Patterns of files of which one is enough to read and write text."""
_SMALL: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_TEMPLATE: Final = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_MAX_SMALL_BYTES: Final = 2**27


@dataclass(frozen=True)
class Listing:
    """What a hub has of one revision of a model.

    Attributes:
        name: owner/name.
        revision: Branch, tag or commit that was asked for.
        commit: Which one it is; equal to `revision` where the hub does not tell.
        folder: Where the files of exactly this revision are put, by their names.
        sizes: File name -> bytes.
        website: The model's page.
    """

    name: str
    revision: str
    commit: str
    folder: Path
    sizes: Mapping[str, int]
    website: str


class Hub(Protocol):
    """A hub of models; every method may raise ModelError, whose text says what to do."""

    title: ClassVar[str]

    def snapshot(self, name: str, revision: str) -> Path | None:
        """The folder of a revision in the local cache, perhaps of a part of it; asks no network."""
        ...

    def listing(self, name: str, revision: str) -> Listing:
        """Asks what there is."""
        ...

    def fetch(self, listing: Listing, files: Sequence[str]) -> None:
        """Downloads files into `listing.folder`; what another attempt left is gone on with."""
        ...

    def unfinished_bytes(self, listing: Listing, files: Sequence[str]) -> int:
        """Bytes of these files that an earlier attempt has left on the disk."""
        ...

    def settle(self, listing: Listing) -> None:
        """Everything is there: from now on the revision means this commit without asking."""
        ...


def is_offline() -> bool:
    """Whether the operator wants no hub asked: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE, as other programs read them."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").strip().lower() not in _FALSE for name in names)


def huggingface_cache() -> Path:
    """The folder of all models: HF_HUB_CACHE, or `hub` in HF_HOME, or `~/.cache/huggingface/hub`."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(cache, "HF_HUB_CACHE")
    if home := os.environ.get("HF_HOME"):
        return _expanded(home, "HF_HOME") / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "HF_HUB_CACHE") / "huggingface" / "hub"


def modelscope_cache() -> Path:
    """The folder of all models: MODELSCOPE_CACHE, or `~/.cache/modelscope`."""
    return _expanded(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope", "MODELSCOPE_CACHE")


def _expanded(path: str, variable: str) -> Path:
    """Raises ModelError where nobody has the home folder that it begins with."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ModelError(f"there is no home folder for {path}; set {variable} to a folder") from None


def huggingface_model(name: str) -> Path:
    """Where the Hugging Face cache has a model: `refs/` by branch, `snapshots/` by commit, `blobs/` by content."""
    return huggingface_cache() / f"models--{name.replace('/', '--')}"


def huggingface_snapshot(name: str, revision: str) -> Path | None:
    """The folder of one revision; None: it is not there, not even in part."""
    model = huggingface_model(name)
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (model / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None
    folder = model / "snapshots" / commit
    return folder if folder.is_dir() else None


def modelscope_snapshot(name: str, revision: str) -> Path | None:
    """The folder of one revision; releases before 1.38 have one a model, whatever its revision, dots written `___`."""
    cache = modelscope_cache()
    owner, _, model = name.partition("/")
    older = Path(owner) / model.replace(".", "___")
    folders = [cache / "models" / f"{owner}--{model}" / "snapshots" / revision]
    if revision == DEFAULT_REVISIONS["modelscope"]:
        folders += [cache / "models" / older, cache / "hub" / "models" / older, cache / "hub" / older, cache / older]
    return next((folder for folder in folders if folder.is_dir()), None)


def why_no_name(text: str, folders: Sequence[Path]) -> str | None:
    """Why a text that is no existing path is no name of a model at a hub either; None where it is one.

    Args:
        text: As the operator wrote it.
        folders: Where a relative path would have been looked up.
    """
    if text.startswith(("/", ".", "~")) or text.endswith("/") or "\\" in text:
        return "it is written as a path"
    if not _NAME.fullmatch(text) or "--" in text or ".." in text:
        return NAME_FORM
    if text.lower().endswith(_FILE_ENDINGS):
        return "it ends as a file does"
    owner = text.partition("/")[0]
    if any((folder / owner).is_dir() for folder in folders):
        return f"there is a folder {owner} here, so it is read as a path"
    return None


def is_revision(text: str) -> bool:
    """Whether a hub may have a branch, tag or commit of this name; it becomes part of URLs and of paths."""
    return _REVISION.fullmatch(text) is not None and ".." not in text and "//" not in text


class DownloadProgress(tqdm):
    """A tqdm bar that is on whatever the environment says of bars, and that a log can take."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)  # of the library's own class
        options |= {"disable": False, "file": options.get("file") or sys.stderr, "leave": True}
        if not options["file"].isatty():
            options |= {"file": _Lines(options["file"]), "mininterval": LOG_INTERVAL_S, "ascii": True, "ncols": 100}
        super().__init__(*args, **options)


class _Lines:
    """A text stream in which every state of a bar is a line of its own."""

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
    """Configuration and tokenizer, config.json first: what decides whether the model can be served.

    Args:
        sizes: File name -> bytes of all that a hub has. Of files in folders only `POOLING_FILES` and templates are
            wanted.
    """
    wanted = [name for name in sizes if _matches(name, _SMALL) or name in POOLING_FILES or _TEMPLATE.fullmatch(name)]
    names = [name for name in wanted if sizes[name] <= _MAX_SMALL_BYTES]
    unwanted = [name for name in names if name.endswith(".index.json") and name != INDEX_NAME]
    return sorted(set(names) - set(unwanted), key=lambda name: (name != CONFIG_NAME, name))


def weight_files(names: Collection[str], index: Path) -> list[str]:
    """The safetensors files to have, in order; none where the model has its weights in another form only.

    A hub may have the weights a second time, in another form or cut in other pieces: the index counts, then the file
    with the usual name.

    Args:
        names: Of all files there are.
        index: Where the index is, if `names` has one.

    Raises:
        ModelError: As `indexed_names`.
    """
    if INDEX_NAME in names:
        return indexed_names(index)
    if SINGLE_NAME in names:
        return [SINGLE_NAME]
    return sorted(name for name in names if _matches(name, ("*.safetensors",)))


def missing_files(folder: Path) -> list[str]:
    """What a folder lacks of what a server wants of it, by name or by pattern.

    Raises:
        ModelError: Its index is none.
    """
    names = [path.name for path in folder.iterdir() if path.exists()] if folder.is_dir() else []
    missing = [] if CONFIG_NAME in names else [CONFIG_NAME]
    if not any(_matches(name, TOKENIZERS) for name in names):
        missing.append("a tokenizer")
    if MODULES_NAME in names:
        missing += [name for name in POOLING_FILES if not (folder / name).exists()]
    weights = weight_files(names, folder / INDEX_NAME)
    return missing + ([name for name in weights if name not in names] if weights else ["*.safetensors"])


def _matches(name: str, patterns: Collection[str]) -> bool:
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
