"""Where the local caches of the hubs keep a model; nothing here asks a network."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from llm_serving.errors import ModelError

DEFAULT_REVISIONS: Final = {"huggingface": "main", "modelscope": "master"}
"""Hub -> branch that counts where nobody names one."""

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_FALSE: Final = ("", "0", "no", "off", "false")


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
