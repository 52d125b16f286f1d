"""The ModelScope hub with its own cache. The `modelscope_hub` package downloads and resumes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from llm_serving.errors import ModelError, shorten
from llm_serving.hub.base import HubModel, expanded

INSTALL: Final = "pip install modelscope-hub, or the extra `modelscope` of this package"


def modelscope_cache() -> Path:
    return expanded(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope", "MODELSCOPE_CACHE")


def _snapshots(name: str) -> Path:
    return modelscope_cache() / "models" / name.replace("/", "--") / "snapshots"


class ModelScope:
    """The hub at MODELSCOPE_ENDPOINT, or www.modelscope.cn."""

    main_branch: ClassVar[str] = "master"

    def cached(self, name: str, revision: str) -> HubModel | None:
        cache, (owner, _, model) = modelscope_cache(), name.partition("/")
        newer, older = _snapshots(name) / revision, Path(owner) / model.replace(".", "___")
        if newer.is_dir():
            return HubModel(name, "modelscope", revision, revision, newer)
        folders = [cache / "models" / older, cache / "hub" / "models" / older, cache / "hub" / older, cache / older]
        found = [folder for folder in folders if revision == self.main_branch and folder.is_dir()]
        return HubModel(name, "modelscope", revision, "unknown", found[0]) if found else None

    def all_cached(self) -> Iterator[HubModel]:
        for folder in sorted(modelscope_cache().glob("models/*--*/snapshots/*")):
            name = folder.parents[1].name.replace("--", "/")
            yield HubModel(name, "modelscope", folder.name, folder.name, folder)

    def listed(self, name: str, revision: str) -> HubModel:
        with _translated_errors(name, revision):
            files = _api().list_repo_files(name, "model", revision=revision)
            sizes = {file.path: file.size for file in files if not file.is_dir}
        website = f"https://www.modelscope.cn/models/{name}"
        return HubModel(name, "modelscope", revision, revision, _snapshots(name) / revision, sizes, website)

    def fetch(self, model: HubModel, files: Sequence[str]) -> None:
        missing = [file for file in files if not (model.folder / file).exists()]
        if not missing:
            return
        with _translated_errors(model.name, model.revision):
            # The folder is explicit, because by default the package would use the folder of an older release.
            _api().download_repo(
                model.name, "model", revision=model.revision, local_dir=model.folder, allow_patterns=missing
            )

    def unfinished_bytes(self, model: HubModel, sizes: Mapping[str, int]) -> int:
        return 0

    def settle(self, model: HubModel) -> None:
        return


def _api() -> Any:
    try:
        from modelscope_hub import HubApi
    except ImportError:
        raise ModelError(f"models of ModelScope need the package modelscope-hub: {INSTALL}") from None
    # Passed explicitly, because the package reads the environment only once.
    return HubApi(endpoint=os.environ.get("MODELSCOPE_ENDPOINT"), token=os.environ.get("MODELSCOPE_API_TOKEN"))


@contextmanager
def _translated_errors(name: str, revision: str) -> Iterator[None]:
    where = f"{name} at ModelScope"
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001  its errors have no common base class
        kind = type(error).__name__
        text = shorten(str(error))[1:-1]
        status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status_code", None)
        if status == 404 or "NotExist" in kind or "NotFound" in kind:
            raise ModelError(
                f"{where}, revision {revision}: there is no such model or revision, or it is private. Look the name up "
                f"at https://www.modelscope.cn/models; for a private one set MODELSCOPE_API_TOKEN"
            ) from None
        if status in (401, 403):
            raise ModelError(
                f"{where} may not be read: accept the conditions on its page with a ModelScope account, then set "
                f"MODELSCOPE_API_TOKEN to a token of that account"
            ) from None
        raise ModelError(f"{where} cannot be read: {kind}: {text}. Start again to resume the download") from None
